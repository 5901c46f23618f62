"""The compressed cache: what is stored, how it is used, how it is packed."""

from manifoldkv.cache.codec import Codec
from manifoldkv.cache.compressed import compressed
from manifoldkv.cache.layers import CompressedCache

__all__ = ["Codec", "CompressedCache", "compressed"]

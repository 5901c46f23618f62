"""The compressed cache: what is stored, how it is used, how it is packed."""

from manifoldkv.cache.compressed import compressed
from manifoldkv.cache.layers import CompressedCache

__all__ = ["CompressedCache", "compressed"]

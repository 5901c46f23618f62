"""Compressed caches: stores of latents, attention over them, packed integers."""

from manifoldkv.cache.compressed import compressed
from manifoldkv.cache.layers import CompressedCache

__all__ = ["CompressedCache", "compressed"]

"""Compressed caches: stores of latents, attention over them, packed integers."""

from manifoldkv.serve.cache.compressed import compressed
from manifoldkv.serve.cache.layers import CompressedCache

__all__ = ["CompressedCache", "compressed"]

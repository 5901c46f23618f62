"""Stored caches: entropy-coded files that a codec writes and reads."""

from manifoldkv.codec.codec import Codec

__all__ = ["Codec"]

"""Stored caches: entropy-coded files that a codec writes and reads."""

from manifoldkv.serve.codec.codec import Codec

__all__ = ["Codec"]

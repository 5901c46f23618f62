"""What compression does to a model: perplexity, zero-shot accuracy and decode speed."""

from manifoldkv.evaluation.perplexity import Comparison, Perplexity, compare, perplexity
from manifoldkv.evaluation.speed import DecodeSpeed, decode_speed

__all__ = ["Comparison", "DecodeSpeed", "Perplexity", "compare", "decode_speed", "perplexity"]

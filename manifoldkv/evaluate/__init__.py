"""What compression does to a model: perplexity, questions that look back, accuracy and speed."""

from manifoldkv.evaluate.perplexity import Comparison, Perplexity, compare, perplexity
from manifoldkv.evaluate.speed import DecodeSpeed, decode_speed

__all__ = ["Comparison", "DecodeSpeed", "Perplexity", "compare", "decode_speed", "perplexity"]

"""What compression does to a model: perplexity and zero-shot accuracy, through the cache."""

from manifoldkv.evaluation.perplexity import Perplexity, perplexity

__all__ = ["Perplexity", "perplexity"]

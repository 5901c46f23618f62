"""What a transformers model is asked for: support, loading, attention, weights."""

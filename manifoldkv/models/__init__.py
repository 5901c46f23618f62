"""Models of transformers: support, loading, attention, weights."""

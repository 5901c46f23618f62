"""Text sources, and token ids sampled from them."""

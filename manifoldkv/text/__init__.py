"""Text sources, and the tokens that are read of them."""

"""What a user keeps: bases for every layer of a model, and how they are stored."""

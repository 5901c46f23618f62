"""Compression plans: bases for every layer of a model, and how they are stored."""

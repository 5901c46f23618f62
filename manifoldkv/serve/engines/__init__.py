"""Stored caches where engines look for them."""

"""Activations of decoder layers: capture, moments, and the layer as a function of its bases."""

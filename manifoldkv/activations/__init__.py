"""What a decoder layer sees and computes: capture, moments, and the layer as a function."""

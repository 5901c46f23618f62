"""Compiled kernels that decode from packed latents."""

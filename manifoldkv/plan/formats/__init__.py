"""Storage formats of latents."""

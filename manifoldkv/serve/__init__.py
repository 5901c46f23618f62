"""Running on a plan: cache, kernels, stored caches and engines."""

"""Kernels of CPUs, compiled by Numba."""

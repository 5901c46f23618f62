"""Kinds of measurement of the benchmark, one file each."""

"""Bases found by objectives and solvers, and their ranks: the paper."""

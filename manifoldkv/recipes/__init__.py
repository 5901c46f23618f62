"""Recipes: how a plan is made of objectives, solvers, rank rules and quantisers."""

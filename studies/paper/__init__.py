"""The parts of `studies/reproduce_paper.py`, which measures and calls them."""

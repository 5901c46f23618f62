"""From a model and a text to a plan."""

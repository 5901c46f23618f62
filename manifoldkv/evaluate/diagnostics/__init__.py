"""Errors of compressed layers, and the figures that are drawn from them."""

from manifoldkv.evaluate.diagnostics.layers import (
    LayerErrors,
    diagnose,
    diagnose_plan,
    layer_errors,
)

__all__ = ["LayerErrors", "diagnose", "diagnose_plan", "layer_errors"]

"""Sums over tokens, from which statistics are computed."""

from __future__ import annotations

import torch
from torch import Tensor

from manifoldkv.statistics.statistics import TensorStatistics


class Moments:
    """Sums over tokens of features, their products and those of gradients, in float64.

    Parameters
    ----------
    features : int
        Features of all KV heads, D.
    device : torch.device
        Device of the sums.
    jacobian : bool
        Whether there are gradients of the layer's output.
    """

    def __init__(self, features: int, device: torch.device, jacobian: bool = False) -> None:
        self._tokens = 0
        self._features = torch.zeros(features, dtype=torch.float64, device=device)
        self._products = torch.zeros(features, features, dtype=torch.float64, device=device)
        self._gradients = torch.zeros_like(self._products)
        self._of_output = torch.zeros_like(self._products) if jacobian else None

    def add(self, x: Tensor, gradient: Tensor, of_output: Tensor | None = None) -> None:
        """Add keys or values and gradients with respect to them, (b, H_kv, n, d) each."""
        x, gradient = _token_rows(x), _token_rows(gradient)
        self._tokens += len(x)
        self._features += x.sum(dim=0)
        self._products += x.mT @ x
        self._gradients += gradient.mT @ gradient
        if self._of_output is not None:
            assert of_output is not None
            rows = _token_rows(of_output)
            self._of_output += rows.mT @ rows

    @property
    def finite(self) -> bool:
        """Return whether all sums are finite."""
        sums = (self._features, self._products, self._gradients, self._of_output)
        return all(bool(x.isfinite().all()) for x in sums if x is not None)

    def statistics(self, readers: Tensor, samples: Tensor) -> TensorStatistics:
        """Return the statistics of all added tokens; parameters as in `TensorStatistics`."""
        mean = self._features / self._tokens
        covariance = self._products / self._tokens - torch.outer(mean, mean)
        jacobian = None if self._of_output is None else self._of_output / self._tokens
        return TensorStatistics(
            mean.cpu(),
            _symmetric(covariance),
            _symmetric(self._gradients / self._tokens),
            _symmetric(readers),
            None if jacobian is None else _symmetric(jacobian),
            samples,
            self._tokens,
        )


def _token_rows(x: Tensor) -> Tensor:
    """Concatenate heads and flatten tokens, (b, H_kv, n, d) to (b·n, H_kv·d), float64."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1).double()


def _symmetric(product: Tensor) -> Tensor:
    """Return symmetric matrices without the rounding errors of their products, on the CPU."""
    return (product + product.mT).cpu() / 2

"""Ridge regression of keys or values, and its reduced rank in the metric of a Fisher matrix."""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp

import torch
from torch import Tensor

from manifoldkv.coding.uniform import FLOOR, TINY

RIDGE = 1e-2
"""Ridge of a Fisher matrix, relative to the mean of its diagonal: few tokens leave it singular."""
PREDICTION_RIDGE = 3e-3
"""Ridge of a linear prediction, relative to the power of each input."""
LEAST_DEVIATION = 2.0**-9
"""Deviation of an input of a prediction, relative to its root mean square, mean included, up to
which it carries nothing: the rounding error of bfloat16."""


@dataclass(frozen=True)
class Regression:
    """Ridge regression of x (tokens, D) on inputs (tokens, inputs), and its sums by fold.

    Parameters
    ----------
    x, inputs : tuple of Tensor
        Centred outputs and inputs of every fold.
    means : tuple of Tensor
        Means over all tokens, (D,) and (inputs,), float64.
    grams, crossed : tuple of Tensor
        ``inputsᵀ inputs`` and ``inputsᵀ x`` of every fold, float64.
    """

    x: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    means: tuple[Tensor, Tensor]
    grams: tuple[Tensor, ...]
    crossed: tuple[Tensor, ...]

    @classmethod
    def of(cls, x: Tensor, inputs: Tensor, folds: int) -> Regression:
        """Cut the tokens into neighbouring folds of about one size."""
        x_mean, input_mean = x.mean(dim=0), inputs.mean(dim=0)
        xs = (x - x_mean).tensor_split(folds)
        parts = centred_inputs(inputs).tensor_split(folds)
        return cls(
            xs,
            parts,
            (x_mean.double(), input_mean.double()),
            tuple((part.mT @ part).double() for part in parts),
            tuple((part.mT @ y).double() for part, y in zip(parts, xs, strict=True)),
        )

    def on_all(self) -> tuple[Tensor, Tensor]:
        """Return mean and weights, (D,) and (inputs, D), float64."""
        gram, crossed = self._sums()
        weights = ridge(gram, crossed, self._smallest_power)
        return self.means[0] - self.means[1] @ weights, weights

    @property
    def gram(self) -> Tensor:
        """Return ``inputsᵀ inputs`` of all tokens, (inputs, inputs), float64."""
        return self._sums()[0]

    def _sums(self) -> tuple[Tensor, Tensor]:
        return torch.stack(self.grams).sum(dim=0), torch.stack(self.crossed).sum(dim=0)

    @property
    def _smallest_power(self) -> float:
        """Return the root of the least power that an input is scaled by: others carry nothing."""
        return smallest_power(self._sums()[0])

    def residuals_by_fold(self) -> Tensor:
        """Return the residuals of every fold by a regression on all others, (tokens, D)."""
        tokens = sum(len(x) for x in self.x)
        gram, crossed = self._sums()
        residuals = []
        for fold, (x, inputs) in enumerate(zip(self.x, self.inputs, strict=True)):
            # All tokens together have means of 0, so that the others' are those of this fold.
            others = max(1, tokens - len(x))  # a single token has no others
            x_mean = -x.sum(dim=0).double() / others
            input_mean = -inputs.sum(dim=0).double() / others
            fold_gram = gram - self.grams[fold] - others * torch.outer(input_mean, input_mean)
            fold_crossed = crossed - self.crossed[fold] - others * torch.outer(input_mean, x_mean)
            weights = ridge(fold_gram, fold_crossed, self._smallest_power)
            expected = x_mean - input_mean @ weights + inputs.double() @ weights
            residuals.append(x - expected.to(x))
        return torch.cat(residuals)


def centred_inputs(inputs: Tensor) -> Tensor:
    """Return inputs (tokens, inputs) without their means, 0 where they hardly vary.

    The weights of a constant would be fitted to rounding errors. So would those of an input that
    varies by less than its rounding error in 16 bits: they are large, and multiply this error.
    """
    centred = inputs - inputs.mean(dim=0)
    deviations, sizes = (x.square().mean(dim=0).sqrt() for x in (centred, inputs))
    return centred * (deviations > LEAST_DEVIATION * sizes)


def smallest_power(gram: Tensor) -> float:
    """Return the root of the least power that an input is scaled by: others carry nothing."""
    return FLOOR * float(gram.diagonal().max()) ** 0.5 + TINY


def ridge(gram: Tensor, crossed: Tensor, smallest: float | None = None) -> Tensor:
    """Return the weights of a ridge regression, (inputs, D), float64.

    Parameters
    ----------
    gram, crossed : Tensor
        ``inputsᵀ inputs`` and ``inputsᵀ x`` of centred inputs, or their means over tokens.
    smallest : float, optional
        Root of the least power that an input is scaled by; `smallest_power` if omitted.
    """
    smallest = smallest_power(gram) if smallest is None else smallest
    powers = gram.diagonal().clamp(min=0).sqrt().clamp(min=smallest)
    scaled = gram / powers / powers.unsqueeze(1)
    scaled += PREDICTION_RIDGE * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.solve(scaled, crossed / powers.unsqueeze(1)) / powers.unsqueeze(1)


def reduced_rank(weights: Tensor, gram: Tensor, fisher: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return factors (inputs, rank) and (rank, D) of a prediction that cost least.

    Reduced-rank regression (Izenman 1975) in the metric of the Fisher matrix.

    Parameters
    ----------
    weights : Tensor
        Of the prediction of full rank, (inputs, D), float64.
    gram : Tensor
        ``inputsᵀ inputs`` of centred inputs, (inputs, inputs).
    fisher : Tensor
        Fisher matrix of the predicted site, (D, D).
    rank : int
        Features that predict best; all D if larger.
    """
    first, second = leading_directions(weights.mT @ gram @ weights, fisher, rank)
    return weights @ first, second


def leading_directions(predicted: Tensor, fisher: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the directions in which a prediction saves most, (D, rank), and their duals (rank, D).

    Parameters
    ----------
    predicted : Tensor
        Second moment of the prediction, (D, D), float64.
    fisher, rank
        As in `reduced_rank`.
    """
    # Both factors are about as large whatever the unit; a power of two does not round.
    exponent = frexp(max(float(fisher.diagonal().mean()), TINY))[1]
    root, inverse = square_roots(fisher * 4.0 ** -(exponent // 2))
    directions = torch.linalg.eigh(root @ predicted @ root).eigenvectors.flip(-1)[:, :rank]
    return root @ directions, directions.mT @ inverse


def square_roots(fisher: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square root of a regularised Fisher matrix (…, D, D), and the inverse of that."""
    values, vectors = torch.linalg.eigh(fisher)
    mean = values.clamp(min=0).mean(dim=-1, keepdim=True)
    ridge = RIDGE * mean.clamp(min=torch.finfo(torch.float32).tiny)
    roots = (values.clamp(min=0) + ridge).sqrt().unsqueeze(-2)
    return (vectors * roots) @ vectors.mT, (vectors / roots) @ vectors.mT

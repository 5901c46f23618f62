"""Second moments of keys and values, and of gradients with respect to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from manifoldkv.basis import Site

SITES: tuple[Site, ...] = get_args(Site)


@dataclass(frozen=True, eq=False, repr=False)
class SiteMoments:
    """Moments of the keys or values of a layer, and of the gradients with respect to them.

    Features are those of all KV heads of a token, D = H_kv · d. Tensors are float64, on the CPU.

    Parameters
    ----------
    mean : Tensor
        Mean of the features, (D,).
    covariance : Tensor
        Covariance of the features, (D, D).
    fisher : Tensor
        Fisher information E[g gᵀ], (D, D); see `fisher_moments`.
    tokens : int
        Number of tokens of the averages.
    """

    mean: Tensor
    covariance: Tensor
    fisher: Tensor
    tokens: int

    @property
    def second(self) -> Tensor:
        """Return the second moment E[x xᵀ], (D, D)."""
        return self.covariance + torch.outer(self.mean, self.mean)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SiteMoments):
            return NotImplemented
        pairs = zip(self.tensors().values(), other.tensors().values(), strict=True)
        return all(torch.equal(mine, its) for mine, its in pairs)

    def __hash__(self) -> int:
        return hash((self.tokens, self.mean.shape))

    def __repr__(self) -> str:
        return f"SiteMoments({len(self.mean)} features, {self.tokens} tokens)"

    def tensors(self) -> dict[str, Tensor]:
        """Return all fields by name, the number of tokens as a scalar, int64."""
        return {
            "mean": self.mean,
            "covariance": self.covariance,
            "fisher": self.fisher,
            "tokens": torch.tensor(self.tokens),
        }


@dataclass(frozen=True)
class LayerMoments:
    """Moments of the keys and of the values of a layer."""

    key: SiteMoments
    value: SiteMoments

    def of(self, site: Site) -> SiteMoments:
        """Return the moments of a site."""
        return self.key if site == "key" else self.value

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of both sites by name, ``"key.mean"``, say."""
        return {f"{s}.{name}": x for s in SITES for name, x in self.of(s).tensors().items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> LayerMoments:
        """Return moments from their `tensors`."""
        sites = []
        for s in SITES:
            fields = {name: tensors[f"{s}.{name}"] for name in ("mean", "covariance", "fisher")}
            sites.append(SiteMoments(**fields, tokens=int(tensors[f"{s}.tokens"])))
        return cls(*sites)


class MomentSums:
    """Sums over tokens of features, their products and those of gradients, in float64."""

    def __init__(self, features: int, device: torch.device) -> None:
        self._tokens = 0
        self._features = torch.zeros(features, dtype=torch.float64, device=device)
        self._products = torch.zeros(features, features, dtype=torch.float64, device=device)
        self._gradients = torch.zeros_like(self._products)

    def add(self, x: Tensor, gradient: Tensor) -> None:
        """Add keys or values and the gradients with respect to them, (b, H_kv, n, d) each."""
        x, gradient = _token_rows(x), _token_rows(gradient)
        self._tokens += len(x)
        self._features += x.sum(dim=0)
        self._products += x.mT @ x
        self._gradients += gradient.mT @ gradient

    def moments(self) -> SiteMoments:
        """Return the moments of all added tokens."""
        mean = self._features / self._tokens
        covariance = self._products / self._tokens - torch.outer(mean, mean)
        fisher = self._gradients / self._tokens
        return SiteMoments(mean.cpu(), _symmetric(covariance), _symmetric(fisher), self._tokens)


def _token_rows(x: Tensor) -> Tensor:
    """Concatenate heads and flatten tokens, (b, H_kv, n, d) to (b·n, H_kv·d), float64."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1).double()


def _symmetric(product: Tensor) -> Tensor:
    """Return a symmetric matrix without the rounding errors of its product, on the CPU."""
    return (product + product.mT).cpu() / 2

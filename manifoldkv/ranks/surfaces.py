"""Error surfaces: layer-output error of one layer for every pair of candidate ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldkv.activations.layer import Batch, LayerActivations
from manifoldkv.activations.outputs import (
    every_sequence,
    layer_output,
    mixed_values,
    project_mixed_values,
)
from manifoldkv.basis import Basis, HeadGrouping, Rotary, identity_basis
from manifoldkv.ranks.base import LayerBases
from manifoldkv.ranks.budget import TOLERANCE, Ranks

SEQUENCES = 16
ROWS = 64
"""Default numbers of calibration sequences, and of query rows of each, of error surfaces."""


@dataclass(frozen=True, eq=False)
class ErrorSurface:
    """Layer-output error of one layer for every pair of candidate ranks.

    Parameters
    ----------
    key_ranks, value_ranks : tuple of int
        Candidate ranks, ascending.
    errors : Tensor
        Δ(r_K, r_V) or another cost of pairs, (key ranks, value ranks), float64.
    """

    key_ranks: tuple[int, ...]
    value_ranks: tuple[int, ...]
    errors: Tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ErrorSurface):
            return NotImplemented
        return self._ranks == other._ranks and torch.equal(self.errors, other.errors)

    def __hash__(self) -> int:
        return hash(self._ranks)

    def __repr__(self) -> str:
        keys, values = self._ranks
        errors = f"{float(self.errors.min()):.3g} to {float(self.errors.max()):.3g}"
        return f"ErrorSurface(key_ranks={keys}, value_ranks={values}, errors {errors})"

    @property
    def _ranks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.key_ranks, self.value_ranks

    def pairs(self) -> list[tuple[float, int, int]]:
        """Return error, key rank and value rank of every pair."""
        return [
            (float(self.errors[i, j]), key, value)
            for i, key in enumerate(self.key_ranks)
            for j, value in enumerate(self.value_ranks)
        ]

    def best(self, share: float) -> Ranks | None:
        """Return the pair of lowest error with r_K + r_V at most `share`, or None.

        Of equal errors the cheaper pair is chosen, then the one with the larger value rank.
        """
        affordable = [
            (error, key + value, key, value)
            for error, key, value in self.pairs()
            if key + value <= share + TOLERANCE
        ]
        return min(affordable)[2:] if affordable else None

    def rising_steps(self) -> int:
        """Return the number of steps to the next rank of a site that raise the error."""
        return sum(int((self.errors.diff(dim=axis) > 0).sum()) for axis in (0, 1))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the surface for checkpoints."""
        keys, values = torch.tensor(self.key_ranks), torch.tensor(self.value_ranks)
        return {"errors": self.errors, "key_ranks": keys, "value_ranks": values}

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor]) -> ErrorSurface:
        """Return a surface from its `tensors`."""
        keys, values = tensors["key_ranks"].tolist(), tensors["value_ranks"].tolist()
        return cls(tuple(keys), tuple(values), tensors["errors"])


@torch.no_grad()
def error_surface(
    activations: LayerActivations,
    key_bases: Mapping[int, Basis | None],
    value_bases: Mapping[int, Basis | None],
    *,
    rotary: Rotary = "pre",
    rows: Tensor | None = None,
) -> ErrorSurface:
    """Return Δ(r_K, r_V) of one layer for all pairs of bases.

    Parameters
    ----------
    activations : LayerActivations
        Activations on inputs from compressed lower layers (the paper), or from uncompressed ones.
    key_bases, value_bases : mapping
        Basis by rank, None for uncompressed keys or values at rank head_dim.
    rotary : {"pre", "post"}
        Whether keys are projected before or after rotation.
    rows : Tensor, optional
        Positions of queries, (m,), int64; all if omitted.
    """
    keys, values = tuple(sorted(key_bases)), tuple(sorted(value_bases))
    shared = HeadGrouping("shared", activations.kv_heads)
    identity = identity_basis(shared, activations.head_dim).like(activations.cos)
    bases = [identity if basis is None else basis for _, basis in sorted(value_bases.items())]
    errors = torch.zeros(len(keys), len(values), dtype=torch.float64)
    batches = every_sequence(activations).sequences.split(1)
    for sequences in batches:
        batch = Batch(sequences, rows)
        exact = activations.outputs_of(batch)
        for i, key in enumerate(keys):
            mixed: dict[HeadGrouping, Tensor] = {}
            for j, basis in enumerate(bases):
                if basis.grouping not in mixed:
                    mixed[basis.grouping] = mixed_values(
                        activations, basis.grouping, batch, key_bases[key], rotary=rotary
                    )
                attention = project_mixed_values(mixed[basis.grouping], basis)
                difference = layer_output(activations, attention, batch) - exact
                ratio = torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(exact)
                errors[i, j] += float(ratio) / len(batches)
    if key_bases[keys[-1]] is None and value_bases[values[-1]] is None:
        errors[-1, -1] = 0  # uncompressed: rounding errors only
    return ErrorSurface(keys, values, errors)


def layer_surface(
    activations: LayerActivations, bases: LayerBases, rotary: Rotary, rows: int | None
) -> ErrorSurface:
    """Return the surface of a layer over its candidate bases, on `rows` evenly spaced query rows.

    None is all rows. Full rank is uncompressed.
    """

    def of_site(by_rank: Mapping[int, Basis]) -> dict[int, Basis | None]:
        return {
            rank: None if rank == basis.head_dim else basis.like(activations.cos)
            for rank, basis in by_rank.items()
        }

    keys, values = of_site(bases.keys), of_site(bases.values)
    positions = spread_rows(activations.length, rows)
    return error_surface(activations, keys, values, rotary=rotary, rows=positions)


def spread_rows(length: int, count: int | None) -> Tensor | None:
    """Return `count` evenly spaced positions, (count,), or None for all."""
    if count is None or count >= length:
        return None
    return torch.linspace(0, length - 1, count).round().long()

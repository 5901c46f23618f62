"""Commuting bases of keys in closed form, and their refinement by layer-output error.

With second moments C_j = E[z zᴴ] and weights W_j of one frequency, averaged over phases, the cost
of errors is tr((I - A Bᴴ) C_j (I - A Bᴴ)ᴴ W_j). The minimum is at the leading eigenvectors U of
W_j^½ C_j W_j^½, with B = W_j^½ U and A = W_j^-½ U; an eigenvalue is the gain of its direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from manifoldkv.activations.capture import capture
from manifoldkv.activations.fisher import fisher_moments
from manifoldkv.activations.moments import SiteMoments
from manifoldkv.basis import Basis, HeadGrouping, detached
from manifoldkv.coding.regression import RIDGE
from manifoldkv.commuting import commuting_basis, hermitian_parts
from manifoldkv.models.decoder import Decoder
from manifoldkv.objectives import KQSVD, LayerOutput, Problem
from manifoldkv.objectives.linear_algebra import same_size, weighted_directions
from manifoldkv.recipes.run import Run
from manifoldkv.recipes.trainable import trainable
from manifoldkv.runs.progress import follow
from manifoldkv.solvers import RiemannianAdam

Forms = tuple[Tensor, Tensor]
"""Second moments of keys or values and weights of their errors, (groups, g·d, g·d) each."""

REFINEMENT = RiemannianAdam(learning_rate=0.3)
"""Solver of the refinement, on the manifolds of commuting bases."""


def closed_form(forms: Sequence[Forms], pairs: int, grouping: HeadGrouping) -> list[Basis]:
    """Return commuting bases of the keys of all layers, with the same frequencies, float32.

    The rank r_j of a frequency is its number of largest gains, summed over layers and groups.

    Parameters
    ----------
    forms : sequence of tuple of Tensor
        Forms of the keys of every layer, before or after rotation.
    pairs : int
        Number of pairs of latents of every group, Σ_j r_j.
    grouping : HeadGrouping
        Heads that share a basis.
    """
    width, directions = grouping.width, []
    for gram, weight in forms:
        moments, weights = hermitian_parts(gram, width), hermitian_parts(weight, width)
        directions.append(weighted_directions(moments, weights))  # (G, d/2, g), (G, d/2, g, g)
    saved = torch.stack([gains for gains, _, _ in directions]).sum(dim=(0, 1))  # (d/2, g)
    # The sort is stable and gains fall within a frequency: its first r_j directions are taken.
    kept = saved.flatten().sort(descending=True, stable=True).indices[:pairs].sort().values
    frequency, column = kept // width, kept % width
    frequencies, head_dim = tuple(frequency.tolist()), 2 * saved.shape[0]
    bases = []
    for _, down, up in directions:
        # Separated index tensors put their axis first: (pairs, G, g).
        down_columns = down[:, frequency, :, column].movedim(0, -1)
        up_columns = up[:, frequency, :, column].movedim(0, -1)
        down_columns, up_columns = same_size(down_columns, up_columns)
        columns = _stored(down_columns), _stored(up_columns)
        bases.append(commuting_basis(*columns, frequencies, grouping, head_dim))
    return bases


def _stored(columns: Tensor) -> Tensor:
    return detached(columns.to(torch.complex64))


def fisher_forms(
    decoder: Decoder, run: Run, grouping: HeadGrouping, folder: str | Path | None
) -> Iterator[tuple[Forms, Forms]]:
    """Yield forms of keys and of values by layer, weighted by Fisher information, in nats.

    Fisher moments are stored in the folder, from which a run resumes.
    """
    moments = fisher_moments(
        decoder.model, run.tokens, seed=run.config.seed, rotary="pre", folder=folder
    )
    for layer in moments:
        yield _fisher_forms(layer.key, grouping), _fisher_forms(layer.value, grouping)


def _fisher_forms(moments: SiteMoments, grouping: HeadGrouping) -> Forms:
    second = moments.second
    ridge = RIDGE * moments.fisher.diagonal().mean()
    weight = moments.fisher + ridge * torch.eye(len(second), dtype=second.dtype)
    return _diagonal_blocks(second, grouping), _diagonal_blocks(weight, grouping)


def _diagonal_blocks(matrix: Tensor, grouping: HeadGrouping) -> Tensor:
    """Return the diagonal blocks (G, g·d, g·d) of head groups in a matrix of all heads."""
    groups = grouping.groups
    blocks = matrix.unflatten(0, (groups, -1)).unflatten(2, (groups, -1))  # (G, p, G, p)
    return blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0)


def query_forms(
    decoder: Decoder, run: Run, grouping: HeadGrouping
) -> Iterator[tuple[Forms, Forms]]:
    """Yield forms of keys and of values by layer, with the weights of `KQSVD`.

    The forms of each site are scaled to a largest possible cost of 1.
    """
    objective = KQSVD()
    for activations in follow(capture(decoder.model, run.tokens), len(decoder.layers)):
        keys = objective.problem(activations, "key", grouping)
        values = objective.problem(activations, "value", grouping)
        yield (
            _relative(*objective.matrices(keys, None)),
            _relative(*objective.matrices(values, None)),
        )


def _relative(gram: Tensor, weight: Tensor) -> Forms:
    gram, weight = gram.cpu(), weight.cpu()
    total = (gram * weight).sum()
    return gram, weight / total if total > 0 else weight  # total is 0 for a layer of zeros


def refined(
    decoder: Decoder, run: Run, bases: Sequence[tuple[Basis, Basis]]
) -> Iterator[tuple[Basis, Basis]]:
    """Yield the bases of every layer, refined by the loss of `LayerOutput` at constant ranks.

    Keys are trained with uncompressed values and vice versa (Eq. dkv_delta).

    Parameters
    ----------
    decoder : Decoder
        View of the model.
    run : Run
        Calibration tokens and seed.
    bases : sequence of tuple of Basis
        Bases of keys and of values by layer.
    """
    objective, seed = LayerOutput(), run.config.seed
    for activations in follow(capture(decoder.model, run.tokens), len(bases)):
        key, value = bases[activations.layer]
        keys = objective.problem(activations, "key", key.grouping, "post")
        values = objective.problem(activations, "value", key.grouping)
        yield _refined(keys, key, seed), _refined(values, value, seed)


def _refined(problem: Problem, basis: Basis, seed: int) -> Basis:
    point = trainable(basis, problem.activations.device)
    points = [*point.parameters()]
    if not points:  # full rank
        return basis
    generator = torch.Generator().manual_seed(seed)
    REFINEMENT.train(problem, lambda: point().like(problem.activations.cos), points, generator)
    return point.trained()

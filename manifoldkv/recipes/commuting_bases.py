"""Bases that commute with the rotation of keys: in closed form, and refined by layer-output error.

With second moments C_j = E[z zᴴ] and weights W_j of one frequency, errors cost
tr((I - A Bᴴ) C_j (I - A Bᴴ)ᴴ W_j) when all phases are alike. The least cost is that of the leading
eigenvectors U of W_j^½ C_j W_j^½, with B = W_j^½ U and A = W_j^-½ U, and an eigenvalue is the
gain of its direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from manifoldkv.activations.capture import capture
from manifoldkv.activations.fisher import fisher_moments
from manifoldkv.activations.moments import SiteMoments
from manifoldkv.basis import SITES, Basis, HeadGrouping, detached
from manifoldkv.coding.transform import RIDGE
from manifoldkv.commuting import commuting_basis, hermitian_parts
from manifoldkv.models.decoder import Decoder
from manifoldkv.objectives import KQSVD, LayerOutput, Problem
from manifoldkv.objectives.linear_algebra import same_size, weighted_directions
from manifoldkv.recipes.run import Run
from manifoldkv.recipes.trainable import trainable
from manifoldkv.runs.progress import follow
from manifoldkv.solvers import RiemannianAdam

Forms = tuple[Tensor, Tensor]
"""Second moments of keys or values and the weight of errors in them, (groups, g·d, g·d) both."""

REFINEMENT = RiemannianAdam(learning_rate=0.3)
"""Steps and samples of the refinement; points are on manifolds of commuting bases."""


def closed_form(forms: Sequence[Forms], pairs: int, grouping: HeadGrouping) -> list[Basis]:
    """Return commuting bases of the keys of all layers, of the same frequencies.

    The ranks r_j of frequencies are those of the largest gains in all layers and groups together.

    Parameters
    ----------
    forms : sequence of tuple of Tensor
        Forms of the keys of every layer, before rotation or after it.
    pairs : int
        Pairs of latents of every group, Σ_j r_j.
    grouping : HeadGrouping
        Heads that share a basis.

    Returns
    -------
    list of Basis
        float32.
    """
    width, directions = grouping.width, []
    for gram, weight in forms:
        moments, weights = hermitian_parts(gram, width), hermitian_parts(weight, width)
        directions.append(weighted_directions(moments, weights))  # (G, d/2, g), (G, d/2, g, g)
    saved = torch.stack([gains for gains, _, _ in directions]).sum(dim=(0, 1))  # (d/2, g)
    # Stable, and gains of a frequency fall: the first r_j directions of each are taken.
    kept = saved.flatten().sort(descending=True, stable=True).indices[:pairs].sort().values
    at, column = kept // width, kept % width
    frequencies, head_dim = tuple(at.tolist()), 2 * saved.shape[0]
    bases = []
    for _, down, up in directions:
        # Two indices that stand apart put their axis first: (pairs, G, g).
        of_down = down[:, at, :, column].movedim(0, -1)
        of_up = up[:, at, :, column].movedim(0, -1)
        of_down, of_up = same_size(of_down, of_up)
        bases.append(
            commuting_basis(_stored(of_down), _stored(of_up), frequencies, grouping, head_dim)
        )
    return bases


def _stored(columns: Tensor) -> Tensor:
    return detached(columns.to(torch.complex64))


def fisher_forms(
    decoder: Decoder, run: Run, grouping: HeadGrouping, folder: str | Path | None
) -> Iterator[tuple[Forms, Forms]]:
    """Yield forms of the keys and of the values of every layer, in nats to second order.

    Fisher moments are stored in the folder, for a run that resumes.
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
    """Return the blocks of head groups on the diagonal of a matrix of all heads, (G, g·d, g·d)."""
    groups = grouping.groups
    blocks = matrix.unflatten(0, (groups, -1)).unflatten(2, (groups, -1))  # (G, p, G, p)
    return blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0)


def query_forms(
    decoder: Decoder, run: Run, grouping: HeadGrouping
) -> Iterator[tuple[Forms, Forms]]:
    """Yield forms of the keys and of the values of every layer, weighted as by `KQSVD`.

    The forms of each site are scaled so that the largest possible cost is 1.
    """
    objective = KQSVD()
    for activations in follow(capture(decoder.model, run.tokens), len(decoder.layers)):
        problems = [objective.problem(activations, site, grouping) for site in SITES]
        key, value = [_relative(*objective.matrices(problem, None)) for problem in problems]
        yield key, value


def _relative(gram: Tensor, weight: Tensor) -> Forms:
    gram, weight = gram.cpu(), weight.cpu()
    total = (gram * weight).sum()
    return gram, weight / total if total > 0 else weight  # a layer of zeros loses nothing


def refined(
    decoder: Decoder, run: Run, bases: Sequence[tuple[Basis, Basis]]
) -> Iterator[tuple[Basis, Basis]]:
    """Yield the bases of every layer, trained from these on the loss of `LayerOutput`.

    Keys are trained with exact values and the other way round (Eq. dkv_delta). Ranks and
    frequencies do not change.

    Parameters
    ----------
    decoder : Decoder
        Unwrapped.
    run : Run
        Calibration tokens and seed.
    bases : sequence of tuple of Basis
        Bases of the keys and the values of every layer.

    Raises
    ------
    RunError
        If a loss is not finite.
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

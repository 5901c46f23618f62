"""Rank and bits from one budget: Fisher coordinates, and bits where they save most nats."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.basis import Basis, HeadGrouping, Site, check_rotary
from manifoldkv.errors import RankError
from manifoldkv.layers.capture import capture
from manifoldkv.models.fingerprint import fingerprint
from manifoldkv.models.support import (
    attention_of,
    cached_tokens,
    check_supported,
    decoder_layers,
    sliding_windows,
)
from manifoldkv.pipeline.config import CompressionConfig
from manifoldkv.pipeline.recipes import BitRecipe
from manifoldkv.plan.coding import NORM_BYTES, Coding
from manifoldkv.plan.files import check_context
from manifoldkv.plan.layer import LayerPlan, detached
from manifoldkv.plan.plan import CompressionPlan, config_hash
from manifoldkv.plan.provenance import Provenance
from manifoldkv.ranks.bits import (
    allocate,
    best_gains,
    coherent_costs,
    fit_quantizers,
    pack_size,
    quantized,
)
from manifoldkv.ranks.fisher import LayerMoments, SiteMoments, fisher_moments
from manifoldkv.runs.progress import follow
from manifoldkv.runs.source import versions
from manifoldkv.solvers.base import check_seed
from manifoldkv.text.sources import TextSource
from manifoldkv.text.tokens import calibration_tokens

LOG = logging.getLogger(__name__)

SITES: tuple[Site, ...] = get_args(Site)
RIDGE = 1e-2
"""Of the mean of a Fisher matrix's diagonal, added to all of it: few tokens leave it singular."""
SAMPLES = 4096
"""Tokens that quantisers are fitted to, of each site."""


@dataclass(frozen=True)
class _Coordinates:
    """Fisher coordinates of a site, and what quantisers leave of them.

    Parameters
    ----------
    down, up : Tensor
        (D, D), float64: latents are ``(x - mean) @ down``, by falling variance.
    mean : Tensor or None
        (D,), float64.
    latents : Tensor
        Of some tokens, (SAMPLES, D), float64.
    costs : array
        Nats that a token's errors cost by pack and width, (packs, widths).
    """

    down: Tensor
    up: Tensor
    mean: Tensor | None
    latents: Tensor
    costs: NDArray[np.float64]


def solve_bits(
    model: PreTrainedModel, run: PreparedBits, folder: str | Path | None
) -> CompressionPlan:
    """Return the plan of a run, nothing tuned.

    Parameters
    ----------
    model : PreTrainedModel
        As in `compress`, and unwrapped.
    run : PreparedBits
        From `prepare_bits`.
    folder : str or Path, optional
        Where Fisher moments are stored, for a run that goes on.

    Raises
    ------
    OutputError, DivergenceError
        As `fisher_moments`.
    """
    config, recipe, ids = run.config, run.recipe, run.tokens
    windows, widths = sliding_windows(model.config), recipe.widths
    moments = fisher_moments(
        model, ids, seed=config.seed, rotary=config.rotary, first=recipe.sinks, folder=folder
    )
    sites = _all_coordinates(model, run, moments)
    cached = [cached_tokens(run.context, window) for window in windows for _ in SITES]
    bits = allocate([site.costs for site in sites], widths, run.budget, cached)
    predicted = sum(
        float(site.costs[np.arange(len(chosen)), [widths.index(b) for b in chosen]].sum())
        for site, chosen in zip(sites, bits, strict=True)
    )
    LOG.info("bits for %d sites; predicted: %.4f nats per token", len(sites), predicted)
    coded = [
        _coded(site, chosen, widths, run.grouping, norms=recipe.norms)
        for site, chosen in zip(sites, bits, strict=True)
    ]
    layers = [
        LayerPlan(key, value, window, key_coding=key_coding, value_coding=value_coding)
        for (key, key_coding), (value, value_coding), window in zip(
            coded[::2], coded[1::2], windows, strict=True
        )
    ]
    provenance = Provenance(
        model=model.config._name_or_path,
        text=run.text,
        sequences=ids.shape[0],
        length=ids.shape[1],
        context=run.context,
        recipe=recipe.describe(),
        seed=config.seed,
        requested_ratio=config.ratio,
        threads=torch.get_num_threads(),
        versions=versions(),
        predicted_nats=predicted,
    )
    return CompressionPlan(
        tuple(layers),
        config.rotary,
        config_hash(model.config),
        fingerprint(model),
        provenance,
        sinks=recipe.sinks,
    )


@dataclass(frozen=True)
class PreparedBits:
    """A run of `compress` by a `BitRecipe`, all asked that could refuse it before its long work.

    Parameters
    ----------
    config : CompressionConfig
        What plan to make.
    recipe : BitRecipe
        How.
    text : str
        Name of the calibration text.
    tokens : Tensor
        Token ids, (sequences, length), int64.
    context : int
        Tokens that the budget holds for.
    grouping : HeadGrouping
        Of all KV heads of a layer.
    budget : int
        Bytes of the latents of all layers.
    """

    config: CompressionConfig
    recipe: BitRecipe
    text: str
    tokens: Tensor
    context: int
    grouping: HeadGrouping
    budget: int


def prepare_bits(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    config: CompressionConfig,
    recipe: BitRecipe,
) -> PreparedBits:
    """Read the text and return what a run starts from; its errors are raised here."""
    if not 0 < config.ratio <= 1:
        raise RankError(f"ratio {config.ratio:g} is not in (0, 1]")
    check_seed(config.seed)
    check_rotary(config.rotary)
    if config.context is not None:
        check_context(config.context)
    check_supported(model)
    kv_heads = model.config.get_text_config().num_key_value_heads
    features = kv_heads * int(attention_of(decoder_layers(model)[0]).head_dim)
    _check_packs(features, recipe.widths)
    name, ids = calibration_tokens(model, tokens, config.sequences, config.length)
    context = ids.shape[1] if config.context is None else config.context
    windows = sliding_windows(model.config)
    budget = _latent_bytes(config.ratio, context, windows, features, recipe)
    return PreparedBits(config, recipe, name, ids, context, HeadGrouping("all", kv_heads), budget)


def _check_packs(features: int, widths: tuple[int, ...]) -> None:
    """Refuse widths of which packs of latents do not fit the features of a layer."""
    if features % pack_size(widths):
        raise RankError(
            f"{features} features of a layer are no packs of {pack_size(widths)} latents: leave "
            f"out widths of {widths} that are odd"
        )


def _all_coordinates(
    model: PreTrainedModel, run: PreparedBits, moments: list[LayerMoments]
) -> list[_Coordinates]:
    """Return the coordinates of keys and of values of all layers, one after the other."""
    recipe, rotary = run.recipe, run.config.rotary
    LOG.info("fitting quantisers of %d layers", len(moments))
    sites = []
    for activations in follow(capture(model, run.tokens), len(moments)):
        of_layer = moments[activations.layer]
        keys, values = activations.keys_in(rotary), activations.values_of()
        for own, x, centred in (
            (of_layer.key, keys, rotary == "pre"),
            (of_layer.value, values, True),
        ):
            sites.append(_coordinates(own, x[:, :, recipe.sinks :], recipe, centred=centred))
    return sites


def _coordinates(
    moments: SiteMoments, x: Tensor, recipe: BitRecipe, *, centred: bool
) -> _Coordinates:
    """Return the Fisher coordinates of keys or values (S, H_kv, n, d)."""
    x = x.transpose(1, 2).flatten(2).flatten(0, 1).cpu().double()  # (S·n, D)
    x = x[torch.linspace(0, len(x) - 1, min(len(x), SAMPLES)).long()]
    root, inverse = _square_roots(moments.fisher)
    second = moments.covariance
    if not centred:
        second = second + torch.outer(moments.mean, moments.mean)
    directions = torch.linalg.eigh(root @ second @ root).eigenvectors.flip(-1)
    down, up = root @ directions, inverse @ directions
    latents = (x - moments.mean if centred else x) @ down
    fitted = fit_quantizers(latents, recipe.widths, _norms(latents) if recipe.norms else None)
    costs = coherent_costs(fitted.distortion) / 2
    costs = costs.unflatten(0, (-1, pack_size(recipe.widths))).sum(dim=1)
    return _Coordinates(down, up, moments.mean if centred else None, latents, costs.numpy())


def _square_roots(fisher: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square root of a regularised Fisher matrix, and the inverse of that."""
    values, vectors = torch.linalg.eigh(fisher)
    ridge = RIDGE * values.clamp(min=0).mean().clamp(min=torch.finfo(torch.float32).tiny)
    roots = (values.clamp(min=0) + ridge).sqrt()
    return (vectors * roots) @ vectors.mT, (vectors / roots) @ vectors.mT


def _norms(latents: Tensor) -> Tensor:
    """Return the norm of every token in whitened coordinates, (tokens, 1)."""
    whitened = latents / _deviations(latents)
    return whitened.square().mean(dim=1, keepdim=True).sqrt()


def _deviations(latents: Tensor) -> Tensor:
    return latents.square().mean(dim=0).sqrt().clamp(min=torch.finfo(torch.float32).tiny)


def _latent_bytes(
    ratio: float,
    context: int,
    windows: Sequence[int | None],
    features: int,
    recipe: BitRecipe,
) -> int:
    """Return the bytes that are left for latents of a text, after norms and sinks."""
    cached = [cached_tokens(context, window) for window in windows]
    full = 4 * features * sum(cached)
    exact = min(recipe.sinks, context)
    of_sinks = 4 * features * sum(exact for window in windows if window is None)
    of_norms = 2 * NORM_BYTES * sum(cached) if recipe.norms else 0
    left = int(ratio * full + 1e-9) - of_sinks - of_norms
    if left < 0:
        raise RankError(
            f"ratio {ratio:g} is too small: {recipe.sinks} tokens that stay as they are and norms "
            f"take {(of_sinks + of_norms) / full:.3g} of the cache of {context} tokens"
        )
    return left


def _coded(
    site: _Coordinates,
    bits: NDArray[np.int64],
    widths: tuple[int, ...],
    grouping: HeadGrouping,
    *,
    norms: bool,
) -> tuple[Basis, Coding]:
    """Return basis and coding of the latents that have bits, widest first."""
    of_latents = torch.from_numpy(bits).repeat_interleave(pack_size(widths))
    order = of_latents.argsort(descending=True, stable=True)
    stored = int((of_latents > 0).sum())
    # Every head has as many latents: some of 0 bits may be among them.
    columns = order[: max(1, -(-stored // grouping.width)) * grouping.width]
    chosen = of_latents[columns]
    latents = site.latents[:, columns[:stored]]
    norm = _norms(latents) if norms and stored else torch.ones(1, 1, dtype=torch.float64)
    steps, gains = (torch.ones(len(columns), dtype=torch.float64) for _ in range(2))
    for width in set(chosen[:stored].tolist()):
        own = chosen == width
        x = latents[:, own[:stored]]
        steps[own] = fit_quantizers(x, (0, width), norm).step[:, 1]
        gains[own] = best_gains(x, norm * quantized(x / norm, steps[own], width))
    deviation = None
    if norms:
        deviation = torch.ones(len(columns), dtype=torch.float64)
        deviation[:stored] = _deviations(latents)
    down, up = (detached(x[:, columns].float().unsqueeze(0)) for x in (site.down, site.up))
    coding = Coding(
        chosen.to(torch.uint8),
        steps.float().unsqueeze(0),
        None if site.mean is None else site.mean.float().unsqueeze(0),
        None if deviation is None else deviation.float().unsqueeze(0),
        gains.float().unsqueeze(0),
    )
    return Basis(down, up, grouping), coding

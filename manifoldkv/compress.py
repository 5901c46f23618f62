"""The road in one call: text, activations, bases, plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Literal

import torch
from scipy.linalg import hadamard
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import get_layer_types_and_kwargs

from manifoldkv.activations import LayerActivations, Rotary, Site, capture
from manifoldkv.basis import Basis, HeadGrouping, fix_signs
from manifoldkv.cache.quantization import group_ranges
from manifoldkv.calibration import TextSource, open_text, sample_tokens
from manifoldkv.errors import PlanError, RankError, TextError, UnknownNameError, UnsolvableError
from manifoldkv.models import attention_of, check_supported, decoder_layers
from manifoldkv.objectives import OBJECTIVES
from manifoldkv.plan import (
    CompressionPlan,
    LayerPlan,
    Provenance,
    Quantization,
    check_layout,
    config_hash,
)
from manifoldkv.solvers import SOLVERS

SEQUENCES = 64
LENGTH = 512
"""Calibration windows drawn from a text source."""
RATIO_TOLERANCE = 1e-9

Rotation = Literal["none", "pca", "hadamard"]


@dataclass(frozen=True)
class Recipe:
    """How the bases of a plan are found.

    Parameters
    ----------
    objective, solver : str
        Registered names.
    key_grouping, value_grouping : str or int
        Which heads share a basis.
    """

    objective: str
    solver: str
    key_grouping: str | int = "shared"
    value_grouping: str | int = 1


RECIPES = {
    "eigen-attention": Recipe("eigen-attention", "closed-form"),
    "paper": Recipe("layer-output", "predictor"),
}


def compress(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    *,
    ratio: float = 0.5,
    recipe: str | Recipe = "eigen-attention",
    ranks: Literal["uniform"] = "uniform",
    rotary: Rotary = "pre",
    quantization: Quantization | None = None,
    seed: int = 0,
) -> CompressionPlan:
    """Find bases for the cache of a model.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with rotary embeddings. It is left as it was.
    tokens : Tensor, TextSource or str
        Calibration data: token ids (sequences, length) without padding; or a text, of which the
        calibration part is read with the tokenizer the model was saved with.
    ratio : float
        Largest share of the numbers of an uncompressed cache that may be stored, in (0, 1].
        The achieved one is `CompressionPlan.ratio`.
    recipe : str or Recipe
        ``"eigen-attention"``: closed form, seconds. ``"paper"``: decoder-layer output error with
        the MLP+QR predictor, minutes to hours.
    ranks : {"uniform"}
        Every layer gets the same ranks.
    rotary : {"pre", "post"}
        Whether keys are stored before rotation (better) or after it (faster).
    quantization : Quantization, optional
        Also round the latents to integers; see `quantize`.
    seed : int
        Of everything random.

    Raises
    ------
    UnsupportedModelError
        If the attention of the model cannot be handled.
    RankError
        If the ratio leaves a layer without keys or values, or is above 1.
    UnknownNameError, UnsolvableError
        If a recipe, objective or solver does not exist, or the two do not go together.
    TextError
        If the tokens are not a (sequences, length) tensor of ids, or the text is too short.
    PlanError
        If the layout of the quantisation does not fit the model.
    """
    check_supported(model)
    recipe = _recipe(recipe)
    if ranks != "uniform":
        raise UnknownNameError(f"unknown rank selection {ranks!r}; known: uniform")
    windows = sliding_windows(model.config)
    for index, window in enumerate(windows):
        check_layout(quantization, index, window)
    solve = _solve(recipe, rotary, seed)
    head_dim = attention_of(decoder_layers(model)[0]).head_dim
    key_rank, value_rank = uniform_ranks(ratio, head_dim)
    name, tokens = _tokens(model, tokens)
    layers = []
    for activations in _progress(capture(model, tokens), len(windows)):
        key = solve(activations, "key", key_rank)
        value = solve(activations, "value", value_rank)
        layers.append(LayerPlan(key, value, windows[activations.layer]))
    provenance = Provenance(
        model=model.config._name_or_path,
        text=name,
        sequences=tokens.shape[0],
        length=tokens.shape[1],
        objective=recipe.objective,
        solver=recipe.solver,
        seed=seed,
        requested_ratio=ratio,
        versions={p: version(p) for p in ("manifoldkv", "torch", "transformers", "geoopt")},
    )
    plan = CompressionPlan(tuple(layers), rotary, config_hash(model.config), provenance)
    return plan if quantization is None else quantize(plan, model, tokens, quantization)


def uniform_ranks(ratio: float, head_dim: int) -> tuple[int, int]:
    """Key and value rank of every layer, together at most ``ratio * 2 * head_dim``.

    They are equal, or the value rank is one larger: values lose more by compression.

    Raises
    ------
    RankError
        If that leaves nothing for keys, or the ratio is above 1.
    """
    if not 1 / head_dim <= ratio <= 1:
        raise RankError(f"ratio {ratio:g} is not between {1 / head_dim:g} (rank 1) and 1")
    total = int(ratio * 2 * head_dim + RATIO_TOLERANCE)
    return total // 2, total - total // 2


def quantize(
    plan: CompressionPlan,
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    quantization: Quantization,
    rotation: Rotation = "hadamard",
) -> CompressionPlan:
    """Round the latents of a plan to integers.

    A basis may be rotated within its subspace without any effect on exact latents; on rounded ones
    the effect is large.

    Parameters
    ----------
    plan : CompressionPlan
        Without quantisation.
    model, tokens
        As in `compress`; the tokens calibrate the rotation and the static ranges.
    quantization : Quantization
        Bits and layout.
    rotation : {"hadamard", "pca", "none"}
        ``"hadamard"`` spreads every direction evenly over all numbers of a latent (a random
        orthogonal matrix where the size is no power of two), ``"pca"`` sorts directions by
        variance, ``"none"`` leaves them as the solver found them.

    Raises
    ------
    PlanError
        If the plan is quantised already or made for another model, or the layout does not fit it.
    """
    if plan.quantization is not None:
        raise PlanError("the plan is quantised already")
    plan.check_model(model.config)
    if rotation not in ("hadamard", "pca", "none"):
        raise UnknownNameError(f"unknown rotation {rotation!r}; known: hadamard, pca, none")
    _, tokens = _tokens(model, tokens)
    layers = []
    for activations in _progress(capture(model, tokens), len(plan.layers)):
        layer = plan.layers[activations.layer]
        keys, values = activations.keys_in(plan.rotary), activations.values
        key = _rotated(layer.key, keys, rotation)
        key_range = None
        if quantization.layout == "static":
            latents = key.grouping.split(keys) @ key.down.to(keys)  # (S, runs, n, w·r)
            key_range = _plain(group_ranges(latents, quantization.group_size, dims=(0, 2)))
        value = _rotated(layer.value, values, rotation)
        layers.append(replace(layer, key=key, value=value, key_range=key_range))
    return replace(plan, layers=tuple(layers), quantization=quantization)


def sliding_windows(config: PretrainedConfig) -> list[int | None]:
    """The sliding window of every layer, in tokens."""
    _, keywords = get_layer_types_and_kwargs(config.get_text_config())
    return [layer.get("sliding_window") for layer in keywords]


def _recipe(recipe: str | Recipe) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise UnknownNameError(f"unknown recipe {recipe!r}; known: {', '.join(RECIPES)}")
    return RECIPES[recipe]


def _solve(
    recipe: Recipe, rotary: Rotary, seed: int
) -> Callable[[LayerActivations, Site, int], Basis]:
    objective = OBJECTIVES.get(recipe.objective)()
    solver = SOLVERS.get(recipe.solver)()
    groupings: dict[Site, str | int] = {
        "key": recipe.key_grouping,
        "value": recipe.value_grouping,
    }
    for site, grouping in groupings.items():
        possible, reason = solver.accepts(objective, site, grouping)
        if not possible:
            raise UnsolvableError(reason)

    def solve(activations: LayerActivations, site: Site, rank: int) -> Basis:
        grouping = HeadGrouping(groupings[site], activations.kv_heads)
        if rank == activations.head_dim:
            size = grouping.width * rank
            identity = torch.eye(size).expand(grouping.groups, -1, -1).contiguous()
            return Basis(identity, identity, grouping)
        problem = objective.problem(activations, site, grouping, rotary)
        basis = solver.solve(problem, rank, seed).basis
        down = _plain(basis.down)
        return Basis(down, down if basis.orthonormal else _plain(basis.up), grouping)

    return solve


def _plain(tensor: Tensor) -> Tensor:
    """As a plan keeps it."""
    return tensor.detach().cpu().contiguous()


def _tokens(model: PreTrainedModel, tokens: Tensor | TextSource | str) -> tuple[str, Tensor]:
    """Name and token ids of the calibration data."""
    if isinstance(tokens, Tensor):
        if tokens.ndim != 2 or tokens.numel() == 0 or tokens.is_floating_point():
            raise TextError(
                f"tokens must be integers of shape (sequences, length), not {tokens.dtype} "
                f"{tuple(tokens.shape)}"
            )
        return "tokens", tokens.long()
    source = open_text(tokens) if isinstance(tokens, str) else tokens
    length = min(LENGTH, model.config.get_text_config().max_position_embeddings)
    ids = sample_tokens(
        source, _tokenizer(model), sequences=SEQUENCES, length=length, split="calibration"
    )
    return source.name, ids


def _tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    name = model.config._name_or_path
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise TextError(
            f"no tokenizer is saved with model {name!r}: pass token ids instead of a text"
        ) from error


def _rotated(basis: Basis, x: Tensor, rotation: Rotation) -> Basis:
    """The same subspace with other coordinates; x are the keys or values (S, H_kv, n, d)."""
    if rotation == "none":
        return basis
    size = basis.down.shape[2]
    turn = _pca(basis, x) if rotation == "pca" else _hadamard(size).to(basis.down)
    down = _plain(basis.down @ turn)
    if not basis.orthonormal:
        return Basis(down, _plain(basis.up @ turn), basis.grouping)
    return Basis(down, down, basis.grouping)


def _pca(basis: Basis, x: Tensor) -> Tensor:
    """Directions of latents by falling variance: (groups, w·r, w·r)."""
    latents = basis.grouping.split(x).double() @ basis.down.to(x.device, torch.float64)
    flat = latents.transpose(0, 1).flatten(1, 2)  # (runs, S·n, w·r)
    if basis.grouping.groups == 1:
        flat = flat.flatten(0, 1).unsqueeze(0)
    centred = flat - flat.mean(dim=1, keepdim=True)
    directions = torch.linalg.eigh(centred.mT @ centred).eigenvectors.flip(-1)
    return fix_signs(directions).to(basis.down)


def _hadamard(size: int) -> Tensor:
    """An orthogonal matrix (size, size) whose entries are all about equally large."""
    generator = torch.Generator().manual_seed(size)
    if size & (size - 1) == 0:
        signs = torch.randint(0, 2, (size, 1), generator=generator) * 2.0 - 1
        return signs * torch.from_numpy(hadamard(size)).float() / size**0.5
    normal = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(normal).Q


def _progress(layers: Iterator[LayerActivations], total: int) -> Iterator[LayerActivations]:
    yield from tqdm(layers, total=total, desc="layers", disable=None, leave=False)

"""How far a compressed layer is from the uncompressed one. Every error column comes from here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.activations.capture import capture
from manifoldkv.activations.layer import Batch, LayerActivations
from manifoldkv.activations.outputs import attention_output, layer_output
from manifoldkv.basis import Basis, Rotary
from manifoldkv.cache.layers import CompressedLayer
from manifoldkv.cache.running import running_attention
from manifoldkv.coding.predictor import PredictorContext
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.interface import attend, rotation_of
from manifoldkv.models.rotary import Angles
from manifoldkv.modes import in_own_modes
from manifoldkv.plan.composition import Composer
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.site import SitePlan

AttentionOutput = Callable[[Batch], Tensor]
"""The output of attention (b, H_q, n, d) for some sequences, heads apart and before W_O."""


@dataclass(frozen=True)
class LayerErrors:
    """Errors of one layer, each a mean over sequences.

    Parameters
    ----------
    attention_output_error : float
        ``||A - Ã||_F / ||A||_F`` of the attention output, all heads, before W_O.
    layer_output_error : float
        The same ratio at the layer output: Δ, Eq. (dkv_delta).
    cosine_similarity : float
        Between layer outputs, token by token, mean over tokens.
    """

    attention_output_error: float
    layer_output_error: float
    cosine_similarity: float


@in_own_modes
def layer_errors(
    activations: LayerActivations,
    key_basis: Basis | None = None,
    value_basis: Basis | None = None,
    *,
    rotary: Rotary = "pre",
) -> LayerErrors:
    """Return the errors of one layer with the bases given; None leaves keys or values exact.

    To quote an error, pass activations of text that was not used for solving.
    """
    key_basis = None if key_basis is None else key_basis.like(activations.cos)
    value_basis = None if value_basis is None else value_basis.like(activations.cos)

    def with_bases(batch: Batch) -> Tensor:
        return attention_output(activations, key_basis, value_basis, rotary=rotary, batch=batch)

    return _errors(activations, with_bases)


@torch.no_grad()
def _errors(activations: LayerActivations, attention_of: AttentionOutput) -> LayerErrors:
    """Return the errors of one layer whose attention is replaced, one sequence at a time."""
    columns: list[Tensor] = []
    for sequences in torch.arange(activations.sequences).split(1):
        batch = Batch(sequences)
        exact = attention_output(activations, batch=batch)
        attention = attention_of(batch)
        output = layer_output(activations, attention, batch)
        expected = activations.outputs_of(batch)
        cosine = torch.nn.functional.cosine_similarity(output, expected, dim=-1).mean()
        columns.append(
            torch.stack([_ratio(attention, exact), _ratio(output, expected), cosine]).double()
        )
    return LayerErrors(*torch.stack(columns).mean(dim=0).tolist())


@in_own_modes
def diagnose(
    layers: Iterable[LayerActivations],
    bases: Mapping[int, tuple[Basis | None, Basis | None]],
    *,
    rotary: Rotary = "pre",
) -> pd.DataFrame:
    """Return the errors of many layers, each with its (key basis, value basis).

    Parameters
    ----------
    layers : iterable of LayerActivations
        As `capture` yields them.
    bases : mapping
        Layer index to bases; a layer that is missing is passed over.

    Returns
    -------
    DataFrame
        One row per layer: ``layer`` and the fields of `LayerErrors`.
    """
    rows = [
        {"layer": a.layer} | asdict(layer_errors(a, *bases[a.layer], rotary=rotary))
        for a in layers
        if a.layer in bases
    ]
    return pd.DataFrame(rows)


@in_own_modes
def diagnose_plan(model: PreTrainedModel, plan: CompressionPlan, tokens: Tensor) -> pd.DataFrame:
    """Return the errors of every layer of a plan.

    Every layer has the inputs of the uncompressed model and attends to keys and values as its cache
    holds them: projected, rounded, predicted, with uncompressed sink tokens. Keys and
    values are predicted from those that the layers below hold. The cache is filled in float32 at
    least: rounding in the dtype of the model is not part of an error.

    Parameters
    ----------
    model : PreTrainedModel
        The model the plan was made for.
    plan : CompressionPlan
        Of any recipe. Of recipe stored it is decoded keys and values that are attended to.
    tokens : Tensor
        Token ids, (S, n), int64; for an error to quote, not those the plan was fitted to.

    Returns
    -------
    DataFrame
        One row per layer: ``layer``, ``key_rank``, ``value_rank`` and the fields of `LayerErrors`.

    Raises
    ------
    PlanError
        If the plan was made for another model.
    """
    plan.check_model(Decoder.of(model))
    texts = [_Text(plan.predictor_context()) for _ in tokens]
    composer = Composer(plan.layers)
    rows = []
    for activations in capture(model, tokens):
        layer = plan.layers[activations.layer]
        for text in texts:
            text.context.begin(activations.layer)
        if plan.attended:
            attention = _over_cache(activations, plan, composer, texts)
        else:
            attention = _over_decoded(activations, plan, texts)
        errors = _errors(activations, attention)
        ranks = {"key_rank": layer.key.rank, "value_rank": layer.value.rank}
        rows.append({"layer": activations.layer} | ranks | asdict(errors))
    return pd.DataFrame(rows)


@dataclass
class _Text:
    """Inputs of predictors of one sequence.

    Parameters
    ----------
    context : PredictorContext
        Reconstructions in the layers below.
    layers : list of CompressedLayer
        The layers below of the cache, downwards, as many as predictors depend on.
    """

    context: PredictorContext
    layers: list[CompressedLayer] = field(default_factory=list)


def _over_cache(
    activations: LayerActivations,
    plan: CompressionPlan,
    composer: Composer,
    texts: list[_Text],
) -> AttentionOutput:
    """Return the attention of a layer over its compressed cache."""
    layer, place = plan.layers[activations.layer], (activations.dtype, activations.device)
    attention = running_attention(plan, activations.layer, *place, composer)
    angles = None
    if plan.rotary == "pre":
        angles = Angles(activations.cos, activations.sin, rotation_of(activations.module))

    def attend_to_cache(batch: Batch) -> Tensor:
        queries, keys, values = activations.projections(plan.rotary, batch)
        if plan.rotary == "pre":
            queries = activations.rotate(queries)
        text = texts[int(batch.sequences)]
        cache = CompressedLayer(layer, *place, plan.sinks)
        text.layers = [cache, *text.layers][: 1 + plan.reach]
        mask, settings = activations.mask, activations.settings
        return attention.attend(
            text.layers, queries, keys, values, mask, settings, angles, text.context
        )

    return attend_to_cache


def _over_decoded(
    activations: LayerActivations, plan: CompressionPlan, texts: list[_Text]
) -> AttentionOutput:
    """Return the attention of a layer over decoded keys and values."""
    layer = plan.layers[activations.layer]
    grouping = layer.key.grouping

    def decoded(site: SitePlan, x: Tensor, context: PredictorContext) -> Tensor:
        exact, coded = x[:, :, : plan.sinks], x[:, :, plan.sinks :]
        flat = grouping.split(coded)[0, 0].to("cpu", torch.float32)  # (n - sinks, D)
        rebuilt = site.reconstruct(flat, context)
        context.add(rebuilt)
        return torch.cat([exact, grouping.merge(rebuilt[None, None]).to(x)], dim=2)

    def attend_to_decoded(batch: Batch) -> Tensor:
        queries, keys, values = activations.projections(plan.rotary, batch)
        context = texts[int(batch.sequences)].context
        keys = decoded(layer.key, keys, context)
        values = decoded(layer.value, values, context)
        if plan.rotary == "pre":
            queries, keys = activations.rotate(queries), activations.rotate(keys)
        return attend(queries, keys, values, activations.mask, activations.settings)

    return attend_to_decoded


def _ratio(approximate: Tensor, exact: Tensor) -> Tensor:
    return torch.linalg.vector_norm(approximate - exact) / torch.linalg.vector_norm(exact)

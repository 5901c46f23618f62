"""A plan that cuts nothing, to round or to compare with."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from manifoldkv.core.basis import HeadGrouping, Rotary, check_rotary, identity_basis
from manifoldkv.core.modes import in_own_modes
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.fingerprint import config_hash
from manifoldkv.models.tokens import positions
from manifoldkv.plan.compute import AttentionShape
from manifoldkv.plan.formats.quantizer import LARGEST_INTEGER
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.provenance import Provenance
from manifoldkv.plan.site import SitePlan
from manifoldkv.runs.source import versions
from manifoldkv.statistics.capture import capture

TRIED_TOKENS = 16
"""On which it is tried out whether the layers of a model can be handled."""


@in_own_modes
def full_rank_plan(model: PreTrainedModel, rotary: Rotary = "post") -> CompressionPlan:
    """Return the plan whose cache holds keys and values whole, by identity bases of every head.

    A model on its cache has the same output as on a stock cache, but for rounding errors of sums.
    Rounded by `quantize` in the token layout it is the integer cache of inference engines: one
    range per token and group of features, behind a Hadamard matrix per head (as in QuaRot, Ashkboos
    et al. 2024, arXiv:2404.00456) or, with ``rotation="none"``, without one.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with rotary embeddings. It is left as it was; a few tokens run
        through it.
    rotary : {"pre", "post"}
        Whether keys are stored before rotation or, as stock caches do, after it.

    Returns
    -------
    CompressionPlan
        Of every layer two bases (H_kv, d, d), float32, grouping 1. Its provenance names no
        objective and no text: ``"none"``, of 0 sequences.

    Raises
    ------
    ModelError
        If the attention of the model cannot be handled.
    PlanError
        If there is no such rotary space.
    """
    decoder = Decoder.of(model)
    model = decoder.model
    check_rotary(rotary)
    last = model.get_input_embeddings().num_embeddings - 1
    ids = torch.linspace(0, last, TRIED_TOKENS).long()  # the first ones of many models are unused
    layers = []
    # Some families are known to be unsupported only when a layer of theirs has run.
    for activations in capture(model, ids.unsqueeze(0)):
        grouping = HeadGrouping(1, activations.kv_heads)
        key = SitePlan(identity_basis(grouping, activations.head_dim))
        value = SitePlan(identity_basis(grouping, activations.head_dim))
        layers.append(LayerPlan(key, value, decoder.windows[activations.layer]))
    recipe = {
        "objective": {"name": "none"},
        "solver": {"name": "full-rank"},
        "ranks": {"name": "full"},
        "key_grouping": 1,
        "value_grouping": 1,
    }
    provenance = Provenance(
        model=model.config._name_or_path,
        text="none",
        sequences=0,
        length=0,
        context=min(positions(model), LARGEST_INTEGER),
        recipe=recipe,
        seed=0,
        requested_ratio=1.0,
        threads=torch.get_num_threads(),
        versions=versions(),
    )
    return CompressionPlan(
        tuple(layers),
        rotary,
        config_hash(decoder.config),
        decoder.fingerprint(),
        AttentionShape(decoder.query_heads, decoder.rotary_dim),
        provenance,
    )

"""Contents of a plan, for people and for machines; the command inspect."""

from __future__ import annotations

from dataclasses import asdict
from math import nan
from typing import Any

from manifoldkv.cli.answers import Answer, size
from manifoldkv.cli.app import Inspect
from manifoldkv.cli.listing import listed
from manifoldkv.evaluate.perplexity import with_error
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan


def inspect(options: Inspect) -> Answer:
    """Return the description of a saved plan, or of all that plans are made of."""
    if options.plan is None:
        return listed()
    return describe(CompressionPlan.load(options.plan))


def describe(plan: CompressionPlan) -> Answer:
    """Return ratio, bytes, provenance, and the ranks and bits of every layer."""
    facts = {
        "ratio": plan.ratio,
        "bytes_per_token": plan.bytes_per_token(),
        "compute": plan.compute,
        "basis_bytes": plan.basis_nbytes(),
        "rotary": plan.rotary,
        "sinks": plan.sinks,
        "formats": plan.formats,
        "provenance": asdict(plan.provenance),
        "layers": [_layer_facts(layer, plan.variable_width) for layer in plan.layers],
    }
    return Answer(facts, _lines(plan))


def _layer_facts(layer: LayerPlan, bits: bool) -> dict[str, Any]:
    return {
        "key_rank": layer.key.rank,
        "value_rank": layer.value.rank,
        "head_dim": layer.key.head_dim,
        "key_grouping": layer.key.grouping.name,
        "value_grouping": layer.value.grouping.name,
        "window": layer.window,
        "bits": layer.mean_bits if bits else None,
    }


def _lines(plan: CompressionPlan) -> list[str]:
    provenance, first = plan.provenance, plan.layers[0]
    uncompressed = f"first {plan.sinks} tokens uncompressed, " if plan.sinks else ""
    predicted = []
    if provenance.predicted_nats is not None:
        predicted = [
            f"loss    {provenance.predicted_nats:.4f} nats per token predicted, on "
            f"{provenance.predicted_tokens:,} held-out tokens of the calibration text"
        ]
    if provenance.measured_nats is not None:
        error = provenance.measured_error
        measured = with_error(provenance.measured_nats, nan if error is None else error)
        predicted.append(f"        {measured} measured on the same tokens")
    return [
        f"model   {provenance.model}",
        f"bases   {provenance.origin}, {provenance.threads} threads, "
        f"{provenance.tuning_steps} steps tuned",
        f"cache   ratio {plan.ratio:.4g} at {provenance.context} tokens, "
        f"{plan.bytes_per_token():g} bytes per further token in bfloat16",
        f"        {uncompressed}keys {plan.rotary}-rotation, latents {plan.formats}",
        f"compute {plan.compute:.3g} times the multiplications of uncompressed attention "
        "in a decode step",
        *predicted,
        f"heads   keys {first.key.grouping.name}, values {first.value.grouping.name}; bases take "
        f"{size(plan.basis_nbytes())} in bfloat16",
        "layer   key rank  value rank  (of head_dim)"
        + ("   key bits  value bits" if plan.variable_width else ""),
        *(_layer_line(index, plan) for index in range(len(plan.layers))),
    ]


def _layer_line(index: int, plan: CompressionPlan) -> str:
    layer = plan.layers[index]
    ranks = f"{index:5}   {layer.key.rank:8}  {layer.value.rank:10}  ({layer.key.head_dim})"
    mean = layer.mean_bits
    return ranks + (f"{mean['key']:22.2f}{mean['value']:12.2f}" if plan.variable_width else "")

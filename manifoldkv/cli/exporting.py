"""The command that writes plain checkpoints."""

from __future__ import annotations

from pathlib import Path

from manifoldkv.cli.answers import Answer, size
from manifoldkv.cli.inputs import open_inputs
from manifoldkv.cli.options import ModelInMemory, PlanOptions, TextOptions
from manifoldkv.evaluation.perplexity import with_error
from manifoldkv.export import export_checkpoint
from manifoldkv.export.checkpoint import check_replaceable
from manifoldkv.export.fold import check_foldable


def export(
    model: ModelInMemory, plan: PlanOptions, out: Path, text: TextOptions, *, force: bool
) -> Answer:
    """Write a plain checkpoint, and measure what it loses."""
    check_replaceable(out, force=force)
    inputs = open_inputs(model, [plan], text)
    check_foldable(inputs.model, inputs.plan)  # before a text is read from the Hub
    exported = export_checkpoint(
        inputs.model,
        inputs.plan,
        out,
        tokenizer=inputs.tokenizer,
        held_out=inputs.held_out_tokens(text),
        force=force,
    )
    measured = exported.measured
    assert measured is not None  # there were held-out tokens
    before, after = measured.uncompressed.perplexity, measured.compressed.perplexity
    facts = {
        "checkpoint": str(exported.folder),
        "bytes_per_token": exported.bytes_per_token,
        "stock_bytes_per_token": exported.stock_bytes_per_token,
        "uncompressed_perplexity": before,
        "exported_perplexity": after,
        "added_nll": measured.added_nll,
        "standard_error": measured.standard_error,
    }
    lines = [
        f"cache       {size(exported.bytes_per_token)} per token, "
        f"{size(exported.stock_bytes_per_token)} before",
        f"perplexity  {after:.3f}, {before:.3f} before, on {measured.compressed.predicted} "
        "held-out tokens",
        f"added       {with_error(measured.added_nll, measured.standard_error)} nats per token",
        f"checkpoint: {exported.folder}",
    ]
    return Answer(facts, lines)

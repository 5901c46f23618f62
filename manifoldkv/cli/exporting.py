"""The command that writes plain checkpoints."""

from __future__ import annotations

from manifoldkv.cli.answers import Answer, size
from manifoldkv.cli.app import Export
from manifoldkv.cli.inputs import open_inputs
from manifoldkv.evaluation.perplexity import with_error
from manifoldkv.export import export_checkpoint
from manifoldkv.export.checkpoint import check_replaceable
from manifoldkv.export.fold import check_foldable


def export(options: Export) -> Answer:
    """Write a plain checkpoint, and measure its loss."""
    check_replaceable(options.out, force=options.force)
    inputs = open_inputs(options, options.plan)
    (plan,) = inputs.plans
    check_foldable(inputs.model, plan)  # before a text is read from the Hub
    exported = export_checkpoint(
        inputs.model,
        plan,
        options.out,
        tokenizer=inputs.tokenizer,
        held_out=inputs.held_out_tokens(options),
        force=options.force,
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
        f"perplexity  {after:.3f}, {before:.3f} before, on {measured.compressed.tokens_scored} "
        "held-out tokens",
        f"added       {with_error(measured.added_nll, measured.standard_error)} nats per token",
        f"checkpoint: {exported.folder}",
    ]
    return Answer(facts, lines)

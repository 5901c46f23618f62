"""The command that writes plain checkpoints."""

from __future__ import annotations

from pathlib import Path

from manifoldkv.cli.answers import Answer, size
from manifoldkv.cli.inputs import held_out_tokens, load, plan_for, text_to_measure
from manifoldkv.cli.options import GivenModel, GivenPlan, GivenText
from manifoldkv.evaluation.perplexity import with_error
from manifoldkv.export import Exported, export_checkpoint
from manifoldkv.export.checkpoint import check_replaceable
from manifoldkv.export.fold import check_foldable


def export(
    model: GivenModel, plan: GivenPlan, out: Path, text: GivenText, *, force: bool
) -> Answer:
    """Write a plain checkpoint, and measure what it loses."""
    check_replaceable(out, force=force)
    source = text_to_measure(text.name, model.name)
    loaded, tokenizer = load(model)
    known = plan_for(plan, loaded)
    check_foldable(loaded, known)
    held_out = held_out_tokens(source, text, loaded, tokenizer)
    found = export_checkpoint(
        loaded, known, out, tokenizer=tokenizer, held_out=held_out, force=force
    )
    return _answer(found)


def _answer(found: Exported) -> Answer:
    measured = found.measured
    assert measured is not None  # there were held-out tokens
    facts = {
        "checkpoint": str(found.folder),
        "bytes_per_token": found.bytes_per_token,
        "stock_bytes_per_token": found.stock_bytes_per_token,
        "uncompressed_perplexity": measured.uncompressed.perplexity,
        "exported_perplexity": measured.compressed.perplexity,
        "added_nll": measured.added_nll,
        "standard_error": measured.standard_error,
    }
    lines = [
        f"cache       {size(found.bytes_per_token)} per token, "
        f"{size(found.stock_bytes_per_token)} before",
        f"perplexity  {measured.compressed.perplexity:.3f}, "
        f"{measured.uncompressed.perplexity:.3f} before, on {measured.compressed.tokens_scored} "
        "held-out tokens",
        f"added       {with_error(measured.added_nll, measured.standard_error)} nats per token",
        f"checkpoint: {found.folder}",
    ]
    return Answer(facts, lines)

"""The command that makes plans."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.cli.answers import Answer, size
from manifoldkv.cli.app import Compress
from manifoldkv.cli.describing import describe
from manifoldkv.cli.inputs import REFERENCE_TEXT, is_reference, load
from manifoldkv.cli.process import Interrupted
from manifoldkv.cli.settings import configured
from manifoldkv.core.errors import ArgumentError, RunError
from manifoldkv.core.files import check_writable
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.tokens import positions
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.recipes.compress import check as check_before_text
from manifoldkv.recipes.compress import compress as find_plan
from manifoldkv.recipes.compress import frontier, ratio_from_bytes
from manifoldkv.recipes.config import CompressionConfig
from manifoldkv.recipes.self_generated import OWN_SEQUENCES, own_text
from manifoldkv.text.sources import OWN, TextSource, open_text
from manifoldkv.text.tokens import LENGTH

LOG = logging.getLogger(__name__)

SAMPLED = 4, 64
"""Number and length of the sequences that a model samples for an estimate."""


def compress(options: Compress) -> Answer:
    """Find a plan and save it, or estimate its bytes and its loss."""
    out, checkpoints = options.out, options.checkpoints
    if not options.dry_run:
        _check_overwrites(out, checkpoints, options.force)
    model, source, config = _opened(options)
    if options.dry_run:
        return _estimated(model, source, options, config)
    check_writable(out)
    if source is None:  # the text is sampled before `find_plan` checks the rest
        check_before_text(model, OWN, config)
    try:
        tokens = _own_text(model, options) if source is None else source
        plan = find_plan(model, tokens, config, folder=checkpoints, executor=options.executor)
    except KeyboardInterrupt as interruption:
        saved = "nothing is saved; with --checkpoints FOLDER the same command resumes"
        if checkpoints is not None:
            saved = f"finished parts are in {checkpoints}; the same command resumes there"
        raise Interrupted(f"interrupted: {saved}") from interruption
    if source is None:
        plan = replace(plan, provenance=replace(plan.provenance, text=OWN))
    plan.save(out)
    facts, lines = describe(plan)
    return Answer(facts | {"plan": str(out)}, [*lines, f"plan: {out}"])


def _opened(
    options: Compress,
) -> tuple[PreTrainedModel, TextSource | None, CompressionConfig]:
    """Check the options, and return model, text (None for the model's own) and settings.

    Raises
    ------
    ArgumentError
        If the budget contradicts itself, or a name or a setting is unknown.
    """
    nbytes, context = options.nbytes, options.context
    budgets = {"--ratio": options.ratio, "--bytes": nbytes, "--nats": options.nats}
    asked = [name for name, value in budgets.items() if value is not None]
    if len(asked) > 1:
        raise ArgumentError(f"{' and '.join(asked)} exclude each other: give one")
    if options.dry_run and options.nats is not None:
        raise ArgumentError("--dry-run estimates a run at one ratio: give --ratio, not --nats")
    if nbytes is not None and context is None:
        raise ArgumentError("--bytes needs --context, the number of tokens that they hold")
    config = configured(options.recipe, options.settings or ())
    ratio = config.ratio if options.ratio is None else options.ratio
    config = replace(config, ratio=ratio, context=context)
    config = replace(
        config, compute=options.compute, nats=options.nats, objective=options.objective
    )
    config = replace(config, sequences=options.sequences, length=options.length)
    text = options.text
    if text is None:
        text = REFERENCE_TEXT if is_reference(options.model) else OWN
    source = None if text == OWN else open_text(text)
    model, _ = load(options)
    if nbytes is not None and context is not None:
        ratio = ratio_from_bytes(model, nbytes, context=context, recipe=config.recipe)
        config = replace(config, ratio=ratio)
    return model, source, config


def _check_overwrites(out: Path, checkpoints: Path | None, force: bool) -> None:
    """Refuse to overwrite a plan, unless it is the run's own or --force is set."""
    own = checkpoints is not None and checkpoints.resolve() == out.resolve()
    if not force and not own and any((out / name).exists() for name in CompressionPlan.FILES):
        raise RunError(
            f"{out} holds a plan already: take another folder as --out, or --force to overwrite it"
        )


def _own_text(model: PreTrainedModel, options: Compress) -> Tensor:
    """Return the calibration text that a model samples, resumed from checkpoints if it is there."""
    count = options.sequences or OWN_SEQUENCES
    return own_text(model, count, options.length, folder=options.checkpoints)


def _estimated(
    model: PreTrainedModel, source: TextSource | None, options: Compress, config: CompressionConfig
) -> Answer:
    """Return bytes and losses, on a short text where the model is yet to sample its own."""
    tokens: TextSource | Tensor | None = source
    if tokens is None:
        check_before_text(model, OWN, config)
        most = min(LENGTH, positions(model)) if options.length is None else options.length
        count, length = SAMPLED
        tokens = own_text(model, count, min(length, most))
        config = replace(config, context=most if config.context is None else config.context)
    losses = frontier(model, tokens, config)
    decoder, recipe = Decoder.of(model), config.complete_recipe()
    elements, itemsize = 2 * decoder.features * len(decoder.layers), decoder.dtype.itemsize
    stock_bytes = elements * itemsize
    cache_bytes = config.ratio * elements * (2 if recipe.in_sixteen_bits else itemsize)
    facts = {"cache_bytes": cache_bytes, "stock_bytes": stock_bytes, "frontier": losses}
    lines = [
        f"cache   at most {size(cache_bytes)} per token, {size(stock_bytes)} uncompressed",
        *_frontier_lines(losses),
        "Nothing was saved: leave --dry-run out to run it.",
    ]
    return Answer(facts, lines)


def _frontier_lines(losses: dict[str, float]) -> list[str]:
    if not losses:
        return []
    rows = [f"{compute:>9}  {nats:8.4f}" for compute, nats in losses.items()]
    return ["--compute  nats per token, at least", *rows]

"""Commands about plans: compress, inspect."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.cli.answers import Answer, duration, size
from manifoldkv.cli.inputs import REFERENCE_TEXT, is_reference, load
from manifoldkv.cli.options import GivenModel, Interrupted
from manifoldkv.cli.settings import configured
from manifoldkv.errors import ArgumentError, RunError
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.recipes.compress import check as check_before_text
from manifoldkv.recipes.compress import compress as find_plan
from manifoldkv.recipes.compress import ratio_from_bytes
from manifoldkv.recipes.config import CompressionConfig
from manifoldkv.recipes.estimate import Estimate
from manifoldkv.recipes.estimate import estimate as estimate_run
from manifoldkv.recipes.named import DEFAULT_RECIPE, RECIPES
from manifoldkv.recipes.own import OWN_SEQUENCES, own_text
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_model
from manifoldkv.runs.files import check_writable
from manifoldkv.text.sources import OWN, TextSource, open_text
from manifoldkv.text.tokens import LENGTH, positions

LOG = logging.getLogger(__name__)

REHEARSED_TOKENS = 8
"""Of its own text that a model writes to estimate what all of it takes."""
LONG_SECONDS = 600.0
"""A run that takes longer says so before it begins."""


@dataclass(frozen=True)
class Request:
    """What ``manifoldkv compress`` is asked for by its arguments."""

    model: GivenModel
    text: str | None
    ratio: float | None
    nbytes: int | None
    context: int | None
    recipe: str
    settings: tuple[str, ...]
    sequences: int | None
    length: int | None

    @property
    def named_text(self) -> str:
        """Return the name of the text: docstrings or the model's own if none is given."""
        if self.text is not None:
            return self.text
        return REFERENCE_TEXT if is_reference(self.model.name) else OWN

    def config(self) -> CompressionConfig:
        """Return the settings of the run, of which a budget in bytes is not yet one."""
        config = replace(
            configured(self.recipe, self.settings),
            sequences=self.sequences,
            length=self.length,
            context=self.context,
        )
        return config if self.ratio is None else replace(config, ratio=self.ratio)

    def within_bytes(self, config: CompressionConfig, model: PreTrainedModel) -> CompressionConfig:
        """Return the settings with the ratio that a budget in bytes comes to, if there is one."""
        if self.nbytes is None or self.context is None:
            return config
        ratio = ratio_from_bytes(model, self.nbytes, context=self.context, recipe=config.recipe)
        return replace(config, ratio=ratio)

    def check(self) -> None:
        """Refuse a budget that contradicts itself."""
        if self.nbytes is not None and self.ratio is not None:
            raise ArgumentError("--ratio and --bytes both say how much the cache takes: give one")
        if self.nbytes is not None and self.context is None:
            raise ArgumentError(
                "--bytes are those of a text: say with --context how many tokens it has"
            )


def estimate(request: Request) -> Answer:
    """Estimate what a run would take."""
    request.check()
    name = request.named_text
    config, source = request.config(), None if name == OWN else open_text(name)
    model, _ = load(request.model)
    config = request.within_bytes(config, model)
    found = _estimated(model, source, request, config)
    return Answer(asdict(found), _estimate_lines(found))


def compress(request: Request, out: Path, work: Path | None, *, force: bool) -> Answer:
    """Find a plan and save it."""
    request.check()
    config = request.config()
    _check_overwrites(out, work, force)
    name = request.named_text
    source = None if name == OWN else open_text(name)
    model, _ = load(request.model)
    config = request.within_bytes(config, model)
    check_writable(out)
    if source is None:  # the text is written before `find_plan` checks the rest
        check_before_text(model, name, config)
    if config.recipe != RECIPES[DEFAULT_RECIPE]:
        _warn_of_long_work(_estimated(model, source, request, config), request.recipe)
    with resumable(work):
        tokens = _own_text(model, request, work) if source is None else source
        plan = find_plan(model, tokens, config, folder=work)
    if source is None:
        plan = replace(plan, provenance=replace(plan.provenance, text=OWN))
    plan.save(out)
    return Answer(_plan_facts(plan) | {"plan": str(out)}, [*_plan_lines(plan), f"plan: {out}"])


def inspect(folder: Path) -> Answer:
    """Return what a plan stores, and where it comes from."""
    plan = CompressionPlan.load(folder)
    return Answer(_plan_facts(plan), _plan_lines(plan))


def _check_overwrites(out: Path, work: Path | None, force: bool) -> None:
    """Refuse to overwrite a plan, unless it is told to or the folder is the run's own."""
    own = work is not None and work.resolve() == out.resolve()
    if not force and not own and any((out / name).exists() for name in CompressionPlan.FILES):
        raise RunError(
            f"{out} holds a plan already: take another folder as --out, or --force to overwrite it"
        )


def _own_text(model: PreTrainedModel, request: Request, work: Path | None) -> Tensor:
    """Return the calibration text that a model writes, or has written in an interrupted run."""
    count = request.sequences or OWN_SEQUENCES

    def write() -> Tensor:
        LOG.info("writing %d texts to calibrate on", count)
        return own_text(model, count, request.length)

    if work is None:
        return write()
    settings = {"model": digest_of_model(model), "shape": [count, request.length]}
    stored = Checkpoints(work, settings).made_by(own_text)
    return stored.tensors("own-text", lambda: {"tokens": write()})["tokens"]


def _estimated(
    model: PreTrainedModel, source: TextSource | None, request: Request, config: CompressionConfig
) -> Estimate:
    """Estimate a run, with random tokens in the place of a text that is not written yet.

    What writing it takes is a part of its own.
    """
    if source is not None:
        return estimate_run(model, source, config)
    length = min(LENGTH, positions(model)) if request.length is None else request.length
    count, few = request.sequences or OWN_SEQUENCES, min(REHEARSED_TOKENS, length)
    start = time.perf_counter()
    own_text(model, count, few)
    writing = (time.perf_counter() - start) * length / few
    tokens = torch.randint(model.get_input_embeddings().num_embeddings, (count, length))
    found = estimate_run(model, tokens, config)
    return replace(found, seconds={"text": writing} | found.seconds)


def _warn_of_long_work(estimated: Estimate, recipe: str) -> None:
    """Say before the work begins that another recipe is quicker, if it takes too long."""
    seconds = sum(estimated.seconds.values())
    if seconds > LONG_SECONDS:
        LOG.warning(
            "recipe %s takes about %s here if nothing of it is done yet, by an estimate; "
            "recipe %s is quicker",
            recipe,
            duration(seconds),
            DEFAULT_RECIPE,
        )


@contextmanager
def resumable(work: Path | None) -> Iterator[None]:
    """Say which work is saved if Ctrl-C ends the block."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        left = "nothing is saved; with --work FOLDER the same command resumes"
        if work is not None:
            left = f"finished parts are in {work}; the same command resumes there"
        raise Interrupted(f"interrupted: {left}") from interruption


def _estimate_lines(found: Estimate) -> list[str]:
    parts = ", ".join(f"{part} {duration(s)}" for part, s in found.seconds.items() if s > 0)
    return [
        f"time    about {duration(sum(found.seconds.values()))} ({parts})",
        f"memory  {size(found.weight_bytes)} of weights, "
        f"{size(found.activation_bytes)} of activations (in files where they do not fit)",
        f"cache   at most {size(found.cache_bytes)} per token, "
        f"{size(found.stock_bytes)} uncompressed",
        "Nothing was saved: leave --dry-run out to run it.",
    ]


def _plan_facts(plan: CompressionPlan) -> dict[str, Any]:
    return {
        "ratio": plan.ratio,
        "bytes_per_token": plan.bytes_per_token(),
        "basis_bytes": plan.basis_nbytes(),
        "rotary": plan.rotary,
        "sinks": plan.sinks,
        "formats": plan.formats,
        "provenance": asdict(plan.provenance),
        "layers": [
            {
                "key_rank": layer.key.rank,
                "value_rank": layer.value.rank,
                "head_dim": layer.key.head_dim,
                "key_grouping": layer.key.grouping.name,
                "commuting": layer.key.basis.commuting,
                "value_grouping": layer.value.grouping.name,
                "window": layer.window,
                "bits": layer.mean_bits if plan.variable_width else None,
            }
            for layer in plan.layers
        ],
    }


def _plan_lines(plan: CompressionPlan) -> list[str]:
    provenance, first = plan.provenance, plan.layers[0]
    exact = f"first {plan.sinks} tokens uncompressed, " if plan.sinks else ""
    keys = f"{first.key.grouping.name}{' (commuting)' if first.key.basis.commuting else ''}"
    predicted = []
    if provenance.predicted_nats is not None:
        predicted = [
            f"loss    {provenance.predicted_nats:.4f} nats per token predicted, on "
            f"{provenance.predicted_tokens:,} held-out tokens of the calibration text"
        ]
    return [
        f"model   {provenance.model}",
        f"bases   {provenance.origin}, {provenance.threads} threads, "
        f"{provenance.tuning_steps} steps tuned",
        f"cache   ratio {plan.ratio:.4g} at {provenance.context} tokens, "
        f"{plan.bytes_per_token():g} bytes per further token in bfloat16",
        f"        {exact}keys {plan.rotary}-rotation, latents {plan.formats}",
        *predicted,
        f"heads   keys {keys}, values {first.value.grouping.name}; bases take "
        f"{size(plan.basis_nbytes())} once",
        "layer   key rank  value rank  (of head_dim)"
        + ("   key bits  value bits" if plan.variable_width else ""),
        *(
            f"{index:5}   {layer.key.rank:8}  {layer.value.rank:10}  ({layer.key.head_dim})"
            + (_bits(layer) if plan.variable_width else "")
            for index, layer in enumerate(plan.layers)
        ),
    ]


def _bits(layer: LayerPlan) -> str:
    """Return the mean bits of keys and values as the end of a layer's line."""
    return f"{layer.mean_bits['key']:22.2f}{layer.mean_bits['value']:12.2f}"

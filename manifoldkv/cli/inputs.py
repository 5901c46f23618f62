"""Models, plans and texts as commands are given them, read and checked."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from manifoldkv.cli.options import GivenModel, GivenPlan, GivenText
from manifoldkv.errors import ArgumentError
from manifoldkv.models.loading import load_model
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.text.sources import HELP, TextSource, open_text
from manifoldkv.text.tokens import LENGTH, check_length, checked_tokens, positions, sample_tokens

REFERENCES = ("reference-llama", "reference-qwen3")
REFERENCE_TEXT = "docstrings"

LOG = logging.getLogger(__name__)


def load(given: GivenModel) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, with progress bars where somebody sees them."""
    if not sys.stderr.isatty():
        disable_progress_bar()
    dtype = getattr(torch, given.dtype)
    return load_model(given.name, dtype=dtype, device=_device(given.device), offload=given.offload)


def _device(name: str) -> str:
    """Return the device of a name, which for ``auto`` is the GPU that torch computes on."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def plan_for(given: GivenPlan, model: PreTrainedModel, *, attended: bool = True) -> CompressionPlan:
    """Load a plan, which must be made for a model unless another one's is asked for.

    Where caches of it are `attended` to, it must be for such caches.
    """
    plan = CompressionPlan.load(given.folder)
    if attended:
        plan.check_attended()
    if given.other_weights:
        return plan.transferred_to(model)
    plan.check_model(model)
    return plan


def text_to_measure(name: str | None, model: str) -> TextSource:
    """Open a text that has a held-out part; docstrings for a reference model if none is named.

    Raises
    ------
    ArgumentError
        If none is named for another model, or it is no such text.
    """
    if name is None and not is_reference(model):
        raise ArgumentError(f"name a text to measure {model} on with --text: {HELP}")
    return open_text(REFERENCE_TEXT if name is None else name)


def is_reference(model: str) -> bool:
    """Return whether a model is one of this repository, which know nothing but docstrings."""
    return Path(model).name in REFERENCES


def held_out_tokens(
    source: TextSource,
    given: GivenText,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> Tensor:
    """Return windows of the held-out part of a text, refused if the model cannot read them."""
    length = min(LENGTH, positions(model)) if given.length is None else given.length
    check_length(model, length)
    LOG.info("reading %d × %d held-out tokens of %s", given.sequences, length, source.name)
    tokens = sample_tokens(
        source, tokenizer, sequences=given.sequences, length=length, split="held-out"
    )
    return checked_tokens(model, tokens)

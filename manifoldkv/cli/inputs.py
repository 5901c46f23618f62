"""Models, plans and texts that commands name, read and checked."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from manifoldkv.cli.options import ModelInMemory, TextOptions
from manifoldkv.core.errors import ArgumentError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.loading import load_model
from manifoldkv.models.tokens import check_length, checked_tokens, positions
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.text.sources import HELP, TextSource, open_text
from manifoldkv.text.tokens import LENGTH, sample_tokens

REFERENCES = ("reference-llama", "reference-qwen3")
REFERENCE_TEXT = "docstrings"

LOG = logging.getLogger(__name__)


class Inputs(NamedTuple):
    """A model, plans for it, and a text to measure them on."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    plans: list[CompressionPlan]
    source: TextSource

    def held_out_tokens(self, options: TextOptions) -> Tensor:
        """Return windows of the held-out part, refused if the model cannot read them."""
        count, length = options.sequences, options.length
        if length is None:
            length = min(LENGTH, positions(self.model))
        check_length(self.model, length)
        LOG.info("reading %d × %d held-out tokens of %s", count, length, self.source.name)
        tokens = sample_tokens(
            self.source, self.tokenizer, sequences=count, length=length, split="held-out"
        )
        return checked_tokens(self.model, tokens)


def open_inputs(options: TextOptions, *plans: Path, attended: bool = True) -> Inputs:
    """Open a text, then load a model and plans of it; `attended` as in `load_plan`."""
    source = _text_to_measure(options.text, options.model)
    model, tokenizer = load(options)
    other = options.other_weights
    loaded = [load_plan(p, model, other_weights=other, attended=attended) for p in plans]
    return Inputs(model, tokenizer, loaded, source)


def load(options: ModelInMemory) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, with progress bars on a terminal."""
    if not sys.stderr.isatty():
        disable_progress_bar()
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, options.dtype)
    return load_model(options.model, dtype=dtype, device=device, offload=options.offload)


def load_plan(
    folder: Path, model: PreTrainedModel, *, other_weights: bool, attended: bool = True
) -> CompressionPlan:
    """Load a plan made for a model, or with `other_weights` for another of its shape.

    Where caches of it are `attended` to, it must be for such caches.
    """
    plan = CompressionPlan.load(folder)
    if attended:
        plan.check_attended()
    if other_weights:
        return plan.transferred_to(Decoder.of(model))
    plan.check_model(Decoder.of(model))
    return plan


def is_reference(model: str) -> bool:
    """Return whether a model is one of this repository, trained on nothing but docstrings."""
    return Path(model).name in REFERENCES


def _text_to_measure(name: str | None, model: str) -> TextSource:
    """Open a text that has a held-out part; docstrings by default for a reference model.

    Raises
    ------
    ArgumentError
        If another model has no text, or the name is not that of a text with a held-out part.
    """
    if name is None and not is_reference(model):
        raise ArgumentError(f"name a text to measure {model} on with --text: {HELP}")
    return open_text(REFERENCE_TEXT if name is None else name)

"""Probe runs: the first layer on a few sequences, to estimate the time and memory of a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from manifoldkv.activations.capture import capture
from manifoldkv.activations.layer import LayerActivations
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.offloading import is_offloaded
from manifoldkv.models.projected import log_probabilities
from manifoldkv.recipes.tune import SEQUENCES_PER_STEP

LOG = logging.getLogger(__name__)

T = TypeVar("T")

PROBED_SEQUENCES = 4
FORWARDS_OF_TUNING = 5
"""Number of forward passes per sequence of a tuning step: uncompressed, compressed, and compressed
with its gradient."""
FORWARDS_OF_FISHER = 5
"""Number of forward passes per sequence of Fisher moments: forwards, backwards, and every layer
again."""


@dataclass(frozen=True)
class Estimate:
    """Estimated time and memory of a run, and the size of its cache.

    Parameters
    ----------
    seconds : dict
        Seconds of ``"capture"``, ``"bases"``, ``"ranks"`` and ``"tuning"``.
    weight_bytes : int
        Bytes of all weights; with offloading those of one decoder layer and outside of layers.
    activation_bytes : int
        Largest bytes of one layer's activations, in files where they do not fit into memory.
    cache_bytes : float
        Largest bytes per token of a text as long as the calibration sequences, in the dtype of the
        model.
    stock_bytes : int
        Bytes per token of the uncompressed cache.
    frontier : dict of str to float
        Loss in nats per token within some amounts of work (`CompressionPlan.work`), of recipes that
        have such a budget: that of a rate-distortion calculation on a few sequences, which
        measured losses exceed.
    """

    seconds: dict[str, float]
    weight_bytes: int
    activation_bytes: int
    cache_bytes: float
    stock_bytes: int
    frontier: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Probe:
    """Measurements of the first layer on a few sequences.

    Parameters
    ----------
    decoder : Decoder
        View of the model.
    tokens : Tensor
        All calibration tokens, (sequences, length).
    activations : LayerActivations
        Activations of the first layer on the first sequences.
    forward : float
        Seconds of a forward pass of one sequence.
    per_layer : float
        Seconds of the capture of a layer on all sequences.
    """

    decoder: Decoder
    tokens: Tensor
    activations: LayerActivations
    forward: float
    per_layer: float

    @classmethod
    def of(cls, decoder: Decoder, tokens: Tensor) -> Probe:
        """Measure the first layer."""
        LOG.info("probe run on %d sequences", min(PROBED_SEQUENCES, len(tokens)))
        model = decoder.model
        few = tokens[:PROBED_SEQUENCES].to(model.device)
        with torch.no_grad():
            log_probabilities(model, few[:1])  # the first call is slower than all others
            forward, _ = timed(lambda: log_probabilities(model, few[:1]))
        captured = capture(model, few, [0])  # a generator, which keeps the layer's weights loaded
        first, activations = timed(lambda: next(captured))
        per_layer = max(0.0, first - forward) * len(tokens) / len(few)
        return cls(decoder, tokens, activations, forward, per_layer)

    @property
    def layers(self) -> int:
        """Return the number of decoder layers."""
        return len(self.decoder.layers)

    @property
    def input_bytes(self) -> int:
        """Return the bytes per token of the inputs of a layer."""
        return int(self.activations.inputs.shape[-1] * self.activations.inputs.itemsize)

    @property
    def fisher_seconds(self) -> float:
        """Return the estimated seconds of Fisher moments."""
        return FORWARDS_OF_FISHER * len(self.tokens) * self.forward

    def estimate(
        self,
        *,
        ratio: float,
        capture: float,
        bases: float,
        ranks: float,
        activation_bytes: int,
        tuning_steps: int = 0,
    ) -> Estimate:
        """Return the estimate of a run.

        `ratio` is that of the cache, `capture`, `bases` and `ranks` are seconds, and
        `activation_bytes` are bytes per token.
        """
        tuning = tuning_steps * SEQUENCES_PER_STEP * FORWARDS_OF_TUNING * self.forward
        elements = 2 * self.decoder.features
        uncompressed = self.layers * elements * self.decoder.dtype.itemsize
        return Estimate(
            {"capture": capture, "bases": bases, "ranks": ranks, "tuning": tuning},
            weight_bytes=_weight_bytes(self.decoder),
            activation_bytes=self.tokens.numel() * activation_bytes,
            cache_bytes=ratio * uncompressed,
            stock_bytes=uncompressed,
        )


def _weight_bytes(decoder: Decoder) -> int:
    def nbytes(module: torch.nn.Module) -> int:
        return sum(p.numel() * p.itemsize for p in module.parameters())

    layers = [nbytes(layer) for layer in decoder.layers]
    held_in_turns = sum(layers) - max(layers) if is_offloaded(decoder.model) else 0
    return nbytes(decoder.model) - held_in_turns


def timed(run: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds of a call and its result."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result

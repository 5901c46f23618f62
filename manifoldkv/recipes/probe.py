"""A probe run: the first layer on a few sequences, to estimate what all will take."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
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
"""Cost of tuning for each sequence of a step, in forward passes: the exact one, the compressed one,
and the compressed one again with its gradient."""
FORWARDS_OF_FISHER = 5
"""Cost of Fisher moments for each sequence, in forward passes: one forwards and backwards, and
every layer again."""


@dataclass(frozen=True)
class Estimate:
    """Time and memory of a run, which are estimates, and the bytes of its cache.

    Parameters
    ----------
    seconds : dict
        Of the parts: ``"capture"``, ``"bases"``, ``"ranks"`` and ``"tuning"``.
    weight_bytes : int
        All weights; of an offloaded model those of one decoder layer and all that is not in one.
    activation_bytes : int
        Of one layer, with what an iterative solver stores of it at most; they go to files where
        they do not fit.
    cache_bytes : float
        Most bytes per token of a text as long as the calibration sequences, in the dtype of
        the model.
    stock_bytes : int
        Per token of the uncompressed cache.
    """

    seconds: dict[str, float]
    weight_bytes: int
    activation_bytes: int
    cache_bytes: float
    stock_bytes: int


@dataclass(frozen=True)
class Probe:
    """The first layer on a few sequences.

    Parameters
    ----------
    decoder : Decoder
        View of the model.
    tokens : Tensor
        All calibration tokens, (sequences, length).
    activations : LayerActivations
        Of the first layer, on the first sequences.
    forward : float
        Seconds of a sequence through the model.
    per_layer : float
        Seconds of the capture of a layer, on all sequences.
    """

    decoder: Decoder
    tokens: Tensor
    activations: LayerActivations
    forward: float
    per_layer: float

    @classmethod
    def of(cls, decoder: Decoder, tokens: Tensor) -> Probe:
        """Run the probe."""
        LOG.info("rehearsing on %d sequences", min(PROBED_SEQUENCES, len(tokens)))
        model = decoder.model
        few = tokens[:PROBED_SEQUENCES].to(model.device)
        with torch.no_grad():
            log_probabilities(model, few[:1])  # the first call is slower than all others
            forward, _ = timed(lambda: log_probabilities(model, few[:1]))
        captured = capture(model, few, [0])  # keeps the layer's weights while it is there
        first, activations = timed(lambda: next(captured))
        per_layer = max(0.0, first - forward) * len(tokens) / len(few)
        return cls(decoder, tokens, activations, forward, per_layer)

    @property
    def layers(self) -> int:
        """Return the number of decoder layers."""
        return len(self.decoder.layers)

    @property
    def input_bytes(self) -> int:
        """Return the bytes of the inputs of a layer, per token."""
        return int(self.activations.inputs.shape[-1] * self.activations.inputs.itemsize)

    @property
    def fisher_seconds(self) -> float:
        """Return the seconds of Fisher moments."""
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

        Parameters
        ----------
        ratio : float
            Of the cache.
        capture, bases, ranks : float
            Seconds of these parts.
        activation_bytes : int
            Per token.
        tuning_steps : int
            Of `tune`.
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
    found = run()
    return time.perf_counter() - start, found

"""State of one forward pass on a compressed cache, shared by its hooks."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manifoldkv.core.errors import CacheError, ModelError
from manifoldkv.models.interface import identity_rotation
from manifoldkv.plan.predictor import PredictorContext
from manifoldkv.serve.cache.layers import CompressedCache
from manifoldkv.serve.cache.storage import GrowingTensor, working_dtype


@dataclass
class _RotaryCall:
    """One call of the model's rotary embedding, for the new tokens."""

    module: nn.Module
    inputs: Tensor
    rest: tuple[Any, ...]
    angles: tuple[Tensor, Tensor]

    def angles_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the same call at other positions."""
        # Not the module itself, whose hook would record another call.
        return self.module.forward(self.inputs, positions, *self.rest)


class _HeldAngles:
    """Angles of all tokens of a cache, which are kept from one pass to the next."""

    def __init__(self) -> None:
        self._parts = GrowingTensor(dim=3), GrowingTensor(dim=3)  # (B or 1, 1, rotary, n)
        self._positions = torch.zeros(1, 0, dtype=torch.int64)
        self._frequencies: list[Tensor] = []

    def at(self, call: _RotaryCall, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of all tokens, whose positions are (B or 1, n).

        They are (B or 1, n, rotary dimension), with tokens last in memory, as in reconstructed
        keys: rotation then runs over neighbours.
        """
        frequencies = [x.clone() for x in call.module.buffers()]  # some grow with the text
        batch, new, _ = call.angles[0].shape
        before = positions.shape[1] - new
        surplus = self._positions.shape[1] - before
        angles = call.angles
        if (
            self._positions.device == positions.device
            and batch == len(positions)
            and surplus >= 0
            and torch.equal(self._positions[:, surplus:], positions[:, :before])
            and all(map(torch.equal, frequencies, self._frequencies))
        ):
            for part in self._parts:
                part.drop_first(surplus)
        else:
            for part in self._parts:
                part.clear()
            angles = call.angles_at(positions)
        for part, x in zip(self._parts, angles, strict=True):
            part.append(x.to(working_dtype(x.dtype, x.device)).mT.unsqueeze(1))
        self._positions, self._frequencies = positions, frequencies
        cos, sin = (part.view[:, 0].mT for part in self._parts)
        return cos, sin


class ForwardPass(threading.local):
    """State of a forward pass, separate in every thread.

    Parameters
    ----------
    family : str
        Name of the model's class, for messages.
    """

    def __init__(self, family: str) -> None:
        self._family = family
        self._cache: CompressedCache | None = None
        self._rotary_calls: list[_RotaryCall] = []
        self._held: list[_HeldAngles] = []  # by call of the rotary embedding
        self._angles: dict[int, tuple[Tensor, Tensor]] = {}
        self._identities: dict[tuple[torch.device, torch.Size], tuple[Tensor, Tensor]] = {}
        self.attended = 0
        """Number of layers that have attended to the cache."""
        self.context = PredictorContext(None, ())
        """Reconstructions of lower layers, the inputs of the next layers' predictors."""

    def begin(self, cache: CompressedCache, context: PredictorContext) -> None:
        """Hold the cache and an empty context until `end`."""
        self.end()  # the previous call may have failed
        self._cache, self.context, self.attended = cache, context, 0

    def end(self) -> None:
        """Release the cache and the new tokens, which are large for a long text."""
        self._cache, self.context = None, PredictorContext(None, ())
        self._rotary_calls.clear()
        self._angles.clear()
        self._identities.clear()

    @property
    def cache(self) -> CompressedCache:
        """Return the cache of the pass.

        Raises
        ------
        CacheError
            Outside of a pass.
        """
        if self._cache is None:
            raise CacheError(
                "a layer runs by itself inside a compressed block, as gradient checkpointing lets "
                "it for a gradient: call the model as a whole, and train it outside of the block"
            )
        return self._cache

    def record_rotary_call(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: tuple[Tensor, Tensor],
    ) -> None:
        """Record a call of the rotary embedding, and the positions of the new tokens."""
        if self._cache is None:  # not called from inside the model
            return
        given = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
        if not self._rotary_calls:  # all kinds of layers have the same positions
            self._cache.append_positions(given["position_ids"])
        rest = tuple(given[name] for name in ("layer_type",) if name in given)
        self._rotary_calls.append(_RotaryCall(module, given["x"], rest, output))

    def identity(self, cos: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotation by angle 0 of as many tokens as `cos` is of, cached."""
        key = cos.device, cos.shape
        if key not in self._identities:
            self._identities[key] = identity_rotation(cos, *cos.shape[-2:])
        return self._identities[key]

    def angles_of_newest(self, tokens: int, cos: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the newest tokens for layers that receive `cos`.

        Raises
        ------
        ModelError
            If no recorded call returned `cos`.
        """
        index = next((i for i, x in enumerate(self._rotary_calls) if x.angles[0] is cos), None)
        if index is None:
            raise ModelError(
                f"{self._family} is not supported with keys stored before rotation: "
                "its layers do not receive the angles its rotary embedding made"
            )
        if index not in self._angles:
            self._held += [_HeldAngles() for _ in range(index + 1 - len(self._held))]
            positions = self.cache.positions()
            self._angles[index] = self._held[index].at(self._rotary_calls[index], positions)
        every_cos, every_sin = self._angles[index]
        first = every_cos.shape[1] - tokens
        return every_cos[:, first:], every_sin[:, first:]

"""State of one forward pass on a compressed cache, shared by its hooks."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manifoldkv.cache.layers import CompressedCache
from manifoldkv.cache.storage import working_dtype
from manifoldkv.coding.predictor import PredictorContext
from manifoldkv.errors import CacheError, ModelError
from manifoldkv.models.interface import identity_rotation
from manifoldkv.models.rotary import tokens_last


@dataclass
class _RotaryCall:
    """One call of the model's rotary embedding."""

    module: nn.Module
    inputs: Tensor
    rest: tuple[Any, ...]
    cos: Tensor

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the same call at other positions."""
        # Not the module itself, whose hook would record another call.
        return self.module.forward(self.inputs, positions, *self.rest)


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
        self._angles: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
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
        """Release the cache, and angles and tokens, which are large for a long text."""
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
        self._rotary_calls.append(_RotaryCall(module, given["x"], rest, output[0]))

    def identity(self, cos: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotation by angle 0 of as many tokens as `cos` is of, cached."""
        key = cos.device, cos.shape
        if key not in self._identities:
            self._identities[key] = identity_rotation(cos, *cos.shape[-2:])
        return self._identities[key]

    def angles_of_newest(self, tokens: int, cos: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the newest tokens for layers that receive `cos`, cached.

        Raises
        ------
        ModelError
            If no recorded call returned `cos`.
        """
        calls = [call for call in self._rotary_calls if call.cos is cos]
        if not calls:
            raise ModelError(
                f"{self._family} is not supported with keys stored before rotation: "
                "its layers do not receive the angles its rotary embedding made"
            )
        key = (id(cos), tokens)
        if key not in self._angles:
            newest_cos, newest_sin = calls[0].angles(self.cache.positions(tokens))
            dtype = working_dtype(cos.dtype, cos.device)
            self._angles[key] = tokens_last(newest_cos.to(dtype)), tokens_last(newest_sin.to(dtype))
        return self._angles[key]

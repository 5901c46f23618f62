"""AQUA-KV: linear prediction along the layers, residuals of one width (Shutova et al.)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from methods.base import Setting, register_method
from methods.higgs import WIDTHS, Higgs
from methods.windows import WindowMethod, calibration_of

FIRST_BITS = 4
"""Bits of the first layer, which nothing is predicted from."""
RIDGE = 1e-3
"""Ridge of a predictor, relative to the mean power of its inputs."""


class Predictor(NamedTuple):
    """A linear prediction ``x ↦ x weights + bias``, (inputs, F) and (F,), float32."""

    weights: Tensor
    bias: Tensor

    @classmethod
    def fitted(cls, inputs: Tensor, outputs: Tensor) -> Predictor:
        """Return the ridge regression of outputs (..., F) on inputs (..., inputs)."""
        x = inputs.flatten(0, -2).double()
        x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
        gram = x.mT @ x
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        solution = torch.linalg.solve(gram, x.mT @ outputs.flatten(0, -2).double()).float()
        return cls(solution[:-1], solution[-1])

    def __call__(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weights + self.bias


@register_method("aqua-kv")
class AquaKV(WindowMethod):
    """AQUA-KV: keys and values predicted from the layer below, residuals in HIGGS of one width.

    Shutova et al., arXiv:2501.19392. Keys before rotation are predicted from the reconstructed keys
    of the layer below, values from the reconstructed keys of their own layer and the reconstructed
    values of the layer below, by ridge regressions that are fitted layer by layer on
    reconstructions. Residuals are stored in `Higgs` at 4, 3 or 2 bits, the first layer at
    `FIRST_BITS`. The paper codes a buffer of at least 128 tokens at once; here a token is coded
    when it leaves the newest 128. Sink tokens, which are not coded, are left out of the fit.
    """

    def __init__(self, setting: Setting, ratio: float) -> None:
        super().__init__(setting, ratio)
        self.first = Higgs(setting.features, FIRST_BITS, setting.seed)
        self.others = Higgs(setting.features, round(16 * ratio), setting.seed)

    @classmethod
    def ratios(cls, requested: Sequence[float]) -> Sequence[float]:
        return [bits / 16 for bits in WIDTHS]

    def coded_bytes(self, tokens: int) -> int:
        layers = self.first.nbytes + (self.setting.layers - 1) * self.others.nbytes
        return 2 * tokens * layers

    def facts(self) -> dict[str, float]:
        elements = sum(x.numel() for pair in self.predictors for of in pair for x in of)
        return super().facts() | {"basis_bytes": 2 * elements}

    @cached_property
    def predictors(self) -> list[tuple[Predictor, Predictor]]:
        """The predictors of keys and values of all layers but the first."""
        keys, values = calibration_of(self.setting)
        key, value = self.first.reconstruct(keys[0]), self.first.reconstruct(values[0])
        predictors = []
        for true_key, true_value in zip(keys[1:], values[1:], strict=True):
            of_key = Predictor.fitted(key, true_key)
            key = self._coded(true_key, of_key(key))
            inputs = torch.cat([key, value], dim=-1)
            of_value = Predictor.fitted(inputs, true_value)
            value = self._coded(true_value, of_value(inputs))
            predictors.append((of_key, of_value))
        return predictors

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        coded_keys, coded_values = (
            [self.first.reconstruct(keys[0])],
            [self.first.reconstruct(values[0])],
        )
        for layer, (of_key, of_value) in enumerate(self.predictors, start=1):
            key = self._coded(keys[layer], of_key(coded_keys[-1].float()))
            inputs = torch.cat([key, coded_values[-1]], dim=-1).float()
            coded_keys.append(key)
            coded_values.append(self._coded(values[layer], of_value(inputs)))
        return torch.stack(coded_keys), torch.stack(coded_values)

    def _coded(self, x: Tensor, predicted: Tensor) -> Tensor:
        """Return x from its prediction and the codes of its residual."""
        return (predicted + self.others.reconstruct(x.float() - predicted)).to(x.dtype)

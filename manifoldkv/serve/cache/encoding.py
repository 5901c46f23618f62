"""Encoding of new keys or values of a layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from manifoldkv.plan.predictor import PredictorContext
from manifoldkv.plan.site import SitePlan
from manifoldkv.serve.cache.mixed import WidthStore
from manifoldkv.serve.cache.storage import Store


class TokenEncoder:
    """Encoding of new tokens, and their reconstruction if predictors need it.

    Parameters
    ----------
    planned : SitePlan
        Of keys or values, in mixed widths.
    up : Tensor
        Up-projection of the r stored latents, (r, D), or by head, (H_kv, r, d), which the maps of
        the layer hold.
    constant : callable
        Returns a tensor in the dtype in which it is held.
    working : torch.dtype
        Of products.
    is_input : bool
        Whether a predictor has the keys or values as an input.
    few_tokens : int
        Most new tokens that a kernel encodes.
    """

    def __init__(
        self,
        planned: SitePlan,
        up: Tensor,
        constant: Callable[[Tensor], Tensor],
        working: torch.dtype,
        *,
        is_input: bool,
        few_tokens: int,
    ) -> None:
        predictor = planned.predictor
        self._down = constant(planned.basis.down[0][:, : planned.latents].mT)  # (r, D)
        self._up = up
        mean = torch.zeros(planned.features) if planned.mean is None else planned.mean
        self._mean = mean.to(self._down.device, working).view(1, 1, -1)
        self._inputs = () if predictor is None else predictor.inputs
        factors = [] if predictor is None else [predictor.weights, predictor.expansion]
        self._factors = [constant(x) for x in factors if x is not None]
        self.expansion = self._factors[1] if len(self._factors) > 1 else None
        """Second factor of a predictor of low rank, (rank, D)."""
        self._is_input, self._few_tokens = is_input, few_tokens

    def store(self, store: Store, x: Tensor, context: PredictorContext) -> Tensor:
        """Store new keys or values (B, m, D), and return their reconstruction.

        It is empty if no predictor has it as an input.
        """
        x = x.to(self._mean.dtype)
        predicted = self._predicted(context)
        expected = self._mean if predicted is None else predicted + self._mean
        if x.shape[0] * x.shape[1] <= self._few_tokens:
            assert isinstance(store, WidthStore)
            latents = store.append_projected(x, expected, self._down)
        else:
            latents = self._append(store, (x - expected) @ self._down.to(x.dtype).mT)
        if not self._is_input:
            return x[:0]
        up = self._up.to(latents.dtype)
        if up.ndim == 2:
            return latents @ up + expected
        return (latents.unsqueeze(1) @ up).transpose(1, 2).flatten(2) + expected

    def _append(self, store: Store, latents: Tensor) -> Tensor:
        """Store latents (B, m, r), and return their reconstructions if predictors need them."""
        if not self._is_input:
            store.append(latents.unsqueeze(1))
            return latents
        return store.append_and_read(latents.unsqueeze(1))[:, 0, :, : latents.shape[2]]

    def _predicted(self, context: PredictorContext) -> Tensor | None:
        if not self._inputs:
            return None
        inputs = context.of(self._inputs)
        predicted = inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=-1)
        for factor in self._factors:
            predicted = predicted @ factor.to(predicted.dtype)
        return predicted

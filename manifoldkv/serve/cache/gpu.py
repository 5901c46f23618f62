"""Decoding on packed latents by Triton kernels, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from triton import language as tl

from manifoldkv.models.interface import Rotate
from manifoldkv.models.rotary import Angles
from manifoldkv.models.rotation import Rotation
from manifoldkv.plan.composition import Composer
from manifoldkv.plan.formats.mixed import MixedWidths
from manifoldkv.plan.predictor import Input, PredictorContext
from manifoldkv.plan.site import SitePlan
from manifoldkv.serve.cache.composed import NewTokens
from manifoldkv.serve.cache.decoding import DecodingSites, store_and_range
from manifoldkv.serve.cache.layers import CompressedLayer
from manifoldkv.serve.cache.sites import Seen
from manifoldkv.serve.cache.storage import Store, constant_dtype, working_dtype
from manifoldkv.serve.kernels.tables import LatentTables
from manifoldkv.serve.kernels.triton.latents import zeros_beside
from manifoldkv.serve.kernels.triton.products import mix, project, scores
from manifoldkv.serve.kernels.triton.tables import Keys, tabulate_keys, tabulate_latents


class GPUSites(DecodingSites):
    """`ComposedSites` whose scores and mixtures are those of Triton kernels.

    Products are of bfloat16 with models in 16 bits, sums of float32. Rotations other than in pairs
    of features are left to torch. Parameters are as in `ComposedSites`.
    """

    def __init__(
        self, composer: Composer, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(composer, index, dtype, device)
        self._latents = {
            one: tabulate_latents(LatentTables.of_quantizer(quantizer), device)
            for one, quantizer in self._quantizers.items()
        }
        self._integer_values = self._integer_values.to(constant_dtype(dtype))
        self._keys: tuple[Rotate, Keys | None] | None = None
        self._operands = tl.bfloat16 if dtype.itemsize == 2 else tl.float32

    def _new_tokens(
        self, planned: SitePlan, dtype: torch.dtype, device: torch.device, *, is_input: bool
    ) -> NewTokens:
        return _GPUTokens(planned, dtype, device, is_input=is_input)

    def scores(
        self,
        layers: Sequence[CompressedLayer],
        queries: Tensor,
        angles: Angles | None,
        seen: Seen,
    ) -> Iterator[Tensor]:
        assert angles is not None  # keys are stored before rotation
        if self._keys_under(angles) is None or not seen.latents:
            yield from super().scores(layers, queries, angles, seen)
        else:
            yield self._scores(layers, queries, angles, seen)

    def mix(self, layers: Sequence[CompressedLayer], weights: Tensor, seen: Seen) -> Tensor:
        rows = weights.float().flatten(1, 2)  # (B, H_q·m, n)
        sources = [(_packed(layers, one, seen), self._latents[one]) for one in self._value_maps]
        by_row = mix(rows, seen.latents, sources, self._operands).to(self._integer_values.dtype)
        # By head, of all sequences: (H_kv, B·R, 1 + r).
        by_head = by_row.unflatten(1, weights.shape[1:3]).transpose(0, 1).flatten(1, 2)
        mixed = torch.bmm(by_head, self._integer_values)
        return mixed.unflatten(1, (len(weights), -1)).transpose(0, 1)

    def attends(self, angles: Angles) -> bool:
        return self._keys_under(angles) is not None

    def attended(
        self,
        layers: Sequence[CompressedLayer],
        queries: Tensor,
        scaling: float,
        seen: Seen,
        angles: Angles,
        sinks: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        scores = self._scores(layers, queries, angles, seen, scaling)
        if sinks is not None:
            keys, values = (x.float() for x in sinks)
            scores = torch.cat([scores, queries.float() @ (scaling * keys.mT)], dim=-1)
        weights = scores.softmax(dim=-1)
        output = self.mix(layers, weights, seen)
        return output if sinks is None else output + weights[..., seen.latents :] @ values

    def _scores(
        self,
        layers: Sequence[CompressedLayer],
        queries: Tensor,
        angles: Angles,
        seen: Seen,
        scaling: float = 1.0,
    ) -> Tensor:
        """Return the scores of all visible latents, (B, H_kv, R, n), float32."""
        keys = self._keys_under(angles)
        assert keys is not None
        codes = _packed(layers, (0, "key"), seen)
        predicted = None
        for one, part in self._integer_predicted.items():
            if predicted is None:
                predicted = zeros_beside(codes, len(part))
            packed = _packed(layers, one, seen)
            project(part, packed, self._latents[one], predicted, self._operands)
        given = codes, keys, angles.cos, angles.sin, predicted
        return scores(queries, *given, scaling=scaling, dtype=self._operands)

    def _keys_under(self, angles: Angles) -> Keys | None:
        """Return the tables of keys under a rotation; None for one that is not in pairs."""
        if self._keys is None or self._keys[0] is not angles.rotate:
            features, heads = len(self._key_mean), self._grouping.heads
            rotation = Rotation.of(angles.rotate, features // heads, angles.cos.shape[2])
            keys = None
            if rotation is not None:
                expansion = self._key_expansion
                if expansion is None and self._integer_predicted:
                    expansion = torch.eye(features, device=self._integer_up.device)
                keys = tabulate_keys(
                    self._latents[0, "key"],
                    self._integer_up,
                    self._key_mean.float(),
                    *(rotation.partner, rotation.sign, rotation.angle),
                    None if expansion is None else expansion.float(),
                )
            self._keys = angles.rotate, keys
        return self._keys[1]


class _GPUTokens(NewTokens):
    """New tokens in few operations, each of which costs the start of a kernel."""

    def __init__(
        self, planned: SitePlan, dtype: torch.dtype, device: torch.device, *, is_input: bool
    ) -> None:
        super().__init__(planned, dtype, device, is_input=is_input)
        assert isinstance(planned.quantizer, MixedWidths)
        stored, working = planned.quantizer.stored, working_dtype(dtype, device)
        held = constant_dtype(dtype)
        down, up = (
            x[0].to(device, held).to(working) for x in (planned.basis.down, planned.basis.up)
        )
        self._down, self._up = down[:, :stored].contiguous(), up[:, :stored].mT.contiguous()
        mean = torch.zeros(planned.features) if planned.mean is None else planned.mean
        self._mean = mean.to(device, working).view(1, 1, -1)

    def store(self, store: Store, x: Tensor, context: PredictorContext) -> Tensor:
        x = x.to(self._down.dtype)
        predicted = self._predicted(context)
        expected = self._mean if predicted is None else predicted + self._mean
        latents = ((x - expected) @ self._down).unsqueeze(1)
        if not self._is_input:
            store.append(latents)
            return x[:0]
        found = store.append_and_read(latents)[:, 0, :, : len(self._up)]
        return expected + found @ self._up


def _packed(layers: Sequence[CompressedLayer], one: Input, seen: Seen) -> Tensor:
    """Return the visible latents of a site."""
    store, first, stop = store_and_range(layers, one, seen)
    return store.visible(first, stop)

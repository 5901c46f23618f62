"""Decoding on packed latents by compiled kernels: nothing of tokens × features is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from manifoldkv.cache.composed import ComposedSites, NewTokens, offset_of, store_of
from manifoldkv.cache.layers import CompressedLayer
from manifoldkv.cache.mixed import MixedWidthStore
from manifoldkv.cache.sites import Seen
from manifoldkv.cache.storage import constant_dtype, split_tiles, working_dtype
from manifoldkv.coding.mixed import MixedWidths
from manifoldkv.coding.planes import BitPlanes
from manifoldkv.coding.predictor import Input, PredictorContext
from manifoldkv.kernels.decode import is_available, mix, project, scores
from manifoldkv.kernels.quantize import project as project_few
from manifoldkv.kernels.tables import KeyTables, LatentTables
from manifoldkv.models.interface import AttentionSettings, Rotate
from manifoldkv.models.rotary import Angles
from manifoldkv.models.rotation import Rotation
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.site import SitePlan

FEW_TOKENS = 16
"""Most new tokens that a kernel projects; torch is faster with more."""
TOKENS_AT_A_TIME = 2048
"""Tokens whose predictions are held at a time."""


def can_compile(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether kernels decode for models in a dtype on a device."""
    in_float32 = working_dtype(dtype, device) == torch.float32
    return device.type == "cpu" and in_float32 and is_available()


class CompiledSites(ComposedSites):
    """`ComposedSites` whose scores and mixtures are those of compiled kernels, on a CPU.

    Rotations other than in pairs of features, and many queries at once, are left to torch.
    Parameters are as in `ComposedSites`.
    """

    def __init__(
        self, layers: Sequence[LayerPlan], index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers, index, dtype, device)
        needed = {(0, "key"), *self._key_predicted, *self._value_maps}
        quantizers = {one: _quantizer(layers, index, one) for one in needed}
        self._tables = {one: _latent_tables(quantizer) for one, quantizer in quantizers.items()}

        def folded(one: Input, part: Tensor) -> Tensor:
            """Return a map of latents as one of integers less their centres."""
            quantizer = quantizers[one]
            stored = quantizer.stored
            factor = quantizer.step[:stored] * quantizer.gain[:stored]
            return (part[:, :stored].float() * factor).contiguous()

        self._integer_up = folded((0, "key"), self._key_up)
        self._integer_predicted = {one: folded(one, x) for one, x in self._key_predicted.items()}
        joined = [folded(one, part) for one, part in self._value_maps.items()]
        heads = self._grouping.heads
        self._integer_values = torch.cat(joined, dim=1).unflatten(0, (heads, -1)).mT.contiguous()
        self._key_tables: tuple[Rotate, KeyTables | None] | None = None

    def _new_tokens(
        self, planned: SitePlan, dtype: torch.dtype, device: torch.device, *, is_input: bool
    ) -> NewTokens:
        return _CompiledTokens(planned, dtype, device, is_input=is_input)

    def scores(
        self,
        layers: Sequence[CompressedLayer],
        queries: Tensor,
        angles: Angles | None,
        seen: Seen,
    ) -> Iterator[Tensor]:
        assert angles is not None  # keys are stored before rotation
        tables = self._tables_of(angles)
        if tables is None or not seen.latents:
            yield from super().scores(layers, queries, angles, seen)
            return
        queries = queries.float().contiguous()
        cos, sin = angles.cos.float(), angles.sin.float()
        size = TOKENS_AT_A_TIME if self._integer_predicted else seen.latents
        for start, stop in split_tiles(0, seen.latents, size):
            predicted = None
            if self._integer_predicted:
                rank = len(next(iter(self._integer_predicted.values())))
                predicted = queries.new_zeros(len(queries), rank, stop - start)
                for one, part in self._integer_predicted.items():
                    packed = _packed(layers, one, seen, start, stop)
                    project(*packed, self._tables[one], part, predicted)
            packed = _packed(layers, (0, "key"), seen, start, stop)
            of_tile = cos[:, start:stop], sin[:, start:stop]
            yield scores(queries, *packed, tables, *of_tile, predicted)

    def mix(self, layers: Sequence[CompressedLayer], weights: Tensor, seen: Seen) -> Tensor:
        weights = weights[..., : seen.latents].float()
        total = weights.sum(dim=-1, keepdim=True)  # (B, H_kv, R, 1)
        output = total * self._value_mean.view(weights.shape[1], 1, -1)
        if not seen.latents:
            return output
        rows = weights.flatten(1, 2)  # (B, H_q·m, n)
        mixed = [
            mix(rows, *_packed(layers, one, seen, 0, seen.latents), self._tables[one])
            for one in self._value_maps
        ]
        by_head = torch.cat(mixed, dim=2).unflatten(1, weights.shape[1:3])  # (B, H_kv, R, r)
        return output + by_head @ self._integer_values

    def decodes(self, layer: CompressedLayer, settings: AttentionSettings) -> bool:
        plain = settings.softcap is None and settings.sinks is None
        return plain and layer.tokens_seen > 0 and (not layer.sinks.size or layer.sinks.are_first)

    def decode(
        self,
        layers: Sequence[CompressedLayer],
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        angles: Angles,
        context: PredictorContext,
    ) -> Tensor:
        layer, heads = layers[0], self._grouping.heads
        visible, _ = layer.get_mask_sizes(1)
        self.store(layer, keys, values, context)
        skipped = layer.sinks.size
        seen = Seen(layer.tokens_held - visible + skipped, visible - skipped, [], None)
        batch, _, _, head_dim = queries.shape
        by_head = queries.reshape(batch, heads, -1, head_dim).float() * scaling
        parts = []
        if skipped:
            angles = angles.of_tokens(skipped, visible)
            sink_keys, sink_values = layer.sinks.seen()
            parts.append(by_head @ sink_keys.mT)  # (B, H_kv, R, s)
        parts += self.scores(layers, by_head, angles, seen)
        weights = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).softmax(dim=-1)
        output = self.mix(layers, weights[..., skipped:], seen)
        if skipped:
            output = output + weights[..., :skipped] @ sink_values.float()
        return output.to(queries.dtype).view(batch, -1, 1, head_dim)

    def _tables_of(self, angles: Angles) -> KeyTables | None:
        """Return the tables of keys under a rotation; None for one that is not in pairs."""
        if self._key_tables is None or self._key_tables[0] is not angles.rotate:
            features, heads = len(self._key_mean), self._grouping.heads
            rotation = Rotation.of(angles.rotate, features // heads, angles.cos.shape[2])
            tables = None
            if rotation is not None:
                latents, expansion = self._tables[0, "key"], self._key_expansion
                if self._integer_predicted and expansion is None:
                    expansion = torch.eye(features)
                mean = self._key_mean
                tables = KeyTables.of(latents, self._integer_up, mean, heads, rotation, expansion)
            self._key_tables = angles.rotate, tables
        return self._key_tables[1]


class _CompiledTokens(NewTokens):
    """New tokens, a few of which are projected by a kernel."""

    def __init__(
        self, planned: SitePlan, dtype: torch.dtype, device: torch.device, *, is_input: bool
    ) -> None:
        super().__init__(planned, dtype, device, is_input=is_input)
        self._dtype = dtype
        down = planned.basis.down[0].to(constant_dtype(dtype)).float()
        self._by_latent = down.mT.contiguous()  # (r, D)
        mean = self._by_latent.new_zeros(planned.features)
        self._mean = (mean if planned.mean is None else planned.mean.float()).unsqueeze(0)

    def _latents(self, x: Tensor, predicted: Tensor | None) -> Tensor:
        if x.shape[0] * x.shape[1] > FEW_TOKENS:
            return super()._latents(x, predicted)
        expected = self._mean if predicted is None else predicted + self._mean
        # In the dtype of the model, as latents of many tokens.
        return project_few(x, expected, self._by_latent).unsqueeze(1).to(self._dtype)


def _packed(
    layers: Sequence[CompressedLayer], one: Input, seen: Seen, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Return codes (B, bytes, t) and scales (B, t) of visible latents of a site."""
    store = store_of(layers, one)
    assert isinstance(store, MixedWidthStore)
    first = offset_of(layers, store, seen)
    return store.packed(first + start, first + stop)


def _quantizer(layers: Sequence[LayerPlan], index: int, one: Input) -> MixedWidths:
    below, site = one
    quantizer = layers[index - below].of(site).quantizer
    assert isinstance(quantizer, MixedWidths)
    return quantizer


def _latent_tables(quantizer: MixedWidths) -> LatentTables:
    bits = quantizer.bits[: quantizer.stored]
    return LatentTables.of(BitPlanes(bits.tolist(), bits.device), bits)

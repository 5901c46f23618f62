"""Attention over packed latents by Triton kernels, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from triton import language as tl

from manifoldkv.models.interface import AttentionSettings
from manifoldkv.models.rotation import Rotation
from manifoldkv.plan.composition import Composer
from manifoldkv.plan.predictor import Input, PredictorContext
from manifoldkv.serve.cache.backend import (
    AttentionBackend,
    Seen,
    attend_by_scores,
    joined,
    split_queries,
)
from manifoldkv.serve.cache.layers import CompressedLayer
from manifoldkv.serve.cache.maps import LayerMaps, latent_tables
from manifoldkv.serve.cache.storage import constant_dtype
from manifoldkv.serve.cache.torch_backend import TorchBackend
from manifoldkv.serve.kernels.triton.latents import zeros_beside
from manifoldkv.serve.kernels.triton.products import mix, project, scores
from manifoldkv.serve.kernels.triton.tables import Keys, Latents, tabulate_keys, tabulate_latents


class TritonBackend(AttentionBackend):
    """Attention by Triton kernels.

    Products are of bfloat16 with models in 16 bits, sums of float32. Rotations other than in pairs
    of features, and many queries at once, are left to torch.

    Parameters
    ----------
    maps : LayerMaps
        Of the layer.
    latents : dict of Input to Latents
        Of keys, and of all that values and predictions of keys depend on.
    operands : tl.dtype
        Of products.
    """

    def __init__(self, maps: LayerMaps, latents: dict[Input, Latents], operands: tl.dtype) -> None:
        self._maps, self._latents, self._operands = maps, latents, operands
        self._torch = TorchBackend(maps)
        self._mixed_factors = maps.mixed_factors
        self._tables = maps.by_rotation(self._tabulated)

    @classmethod
    def of(
        cls, composer: Composer, index: int, dtype: torch.dtype, device: torch.device
    ) -> TritonBackend:
        maps = LayerMaps(composer, index, dtype, device, constant_dtype(dtype), packed=True)
        tables = latent_tables(composer.layers, index, maps.factors)
        latents = {one: tabulate_latents(x, device) for one, x in tables.items()}
        return cls(maps, latents, tl.bfloat16 if dtype.itemsize == 2 else tl.float32)

    def store(
        self, layer: CompressedLayer, keys: Tensor, values: Tensor, context: PredictorContext
    ) -> None:
        self._maps.store(layer, keys, values, context)

    def attend(self, queries: Tensor, seen: Seen, settings: AttentionSettings) -> Tensor:
        if self._tables.under(seen.angles) is None or not seen.latents:
            return self._torch.attend(queries, seen, settings)
        if seen.mask is None and settings.is_plain:
            return self._attend_to_all(queries, seen, settings.scaling)
        scores, mix = partial(self.scores, seen), partial(self.mix, seen)
        return attend_by_scores(queries, self._maps.heads, seen, settings, scores, mix)

    def reconstruct(self, seen: Seen, size: int) -> tuple[list[Tensor], list[Tensor]]:
        return self._torch.reconstruct(seen, size)

    def scores(self, seen: Seen, queries: Tensor, scaling: float = 1.0) -> Iterator[Tensor]:
        """Yield the scores of all visible latents at once, (B, H_kv, R, n), float32."""
        keys = self._tables.under(seen.angles)
        assert keys is not None
        assert seen.angles is not None
        codes = _packed(seen, (0, "key"))
        predicted = None
        for one, part in self._maps.key_predicted.items():
            if predicted is None:
                predicted = zeros_beside(codes, len(part))
            packed = _packed(seen, one)
            project(part, packed, self._latents[one], predicted, self._operands)
        given = codes, keys, seen.angles.cos, seen.angles.sin, predicted
        yield scores(queries, *given, scaling=scaling, dtype=self._operands)

    def mix(self, seen: Seen, weights: Tensor) -> Tensor:
        """Return the values of latents mixed by weights (B, H_kv, R, n), (B, H_kv, R, d)."""
        rows, values = weights.float().flatten(1, 2), self._maps.values  # (B, H_q·m, n)
        sources = [(_packed(seen, one), self._latents[one]) for one in self._maps.columns]
        by_row = mix(rows, seen.latents, sources, self._operands) * self._mixed_factors
        # By head, of all sequences: (H_kv, B·R, 1 + r).
        by_head = (
            by_row.to(values.dtype).unflatten(1, weights.shape[1:3]).transpose(0, 1).flatten(1, 2)
        )
        mixed = torch.bmm(by_head, values)
        return mixed.unflatten(1, (len(weights), -1)).transpose(0, 1)

    def _attend_to_all(self, queries: Tensor, seen: Seen, scaling: float) -> Tensor:
        """Return the attention output without mask, soft cap and learnt sinks."""
        by_head = split_queries(queries, self._maps.heads)
        tiles = [*self.scores(seen, by_head, scaling)]
        tiles += [by_head.float() @ (scaling * keys.float().mT) for keys, _ in seen.exact]
        weights = joined(tiles).softmax(dim=-1)
        output, start = self.mix(seen, weights), seen.latents
        for _, values in seen.exact:
            stop = start + values.shape[2]
            output = output + weights[..., start:stop] @ values.float()
            start = stop
        return output.to(queries.dtype).reshape(queries.shape)

    def _tabulated(self, rotation: Rotation) -> Keys:
        maps, prediction = self._maps, self._maps.prediction
        return tabulate_keys(
            self._latents[0, "key"],
            maps.packed_up,
            maps.key_mean.float(),
            *(rotation.partner, rotation.sign, rotation.angle),
            None if prediction is None else prediction.float(),
        )


def _packed(seen: Seen, one: Input) -> Tensor:
    """Return the visible latents of keys or values."""
    store, first, stop = seen.packed(one)
    return store.visible(first, stop)

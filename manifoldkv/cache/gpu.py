"""Decoding on packed latents by Triton kernels, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from triton import language as tl

from manifoldkv.cache.composed import ComposedSites, of_integers, offset_of, store_of
from manifoldkv.cache.layers import CompressedLayer
from manifoldkv.cache.mixed import WidthStore
from manifoldkv.cache.sites import Seen
from manifoldkv.coding.predictor import Input
from manifoldkv.kernels.gpu import Keys, mix, project, scores, tabulate_keys, tabulate_latents
from manifoldkv.kernels.tables import LatentTables
from manifoldkv.models.interface import Rotate
from manifoldkv.models.rotary import Angles
from manifoldkv.models.rotation import Rotation
from manifoldkv.plan.composition import Composer


class GPUSites(ComposedSites):
    """`ComposedSites` whose scores and mixtures are those of Triton kernels.

    Products are of bfloat16 with models in 16 bits, sums of float32. Rotations other than in pairs
    of features are left to torch. Parameters are as in `ComposedSites`.
    """

    def __init__(
        self, composer: Composer, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(composer, index, dtype, device)
        quantizers = self._quantizers(composer.layers, index)
        self._latents = {
            one: tabulate_latents(LatentTables.of_quantizer(quantizer), device)
            for one, quantizer in quantizers.items()
        }
        self._integer_up = of_integers(self._key_up, quantizers[0, "key"])
        self._integer_predicted = {
            one: of_integers(part, quantizers[one]) for one, part in self._key_predicted.items()
        }
        joined = [self._value_mean.float().unsqueeze(1)]
        joined += [of_integers(part, quantizers[one]) for one, part in self._value_maps.items()]
        by_head = torch.cat(joined, dim=1).unflatten(0, (self._grouping.heads, -1))
        self._integer_values = by_head.mT.contiguous()  # (H_kv, 1 + r, d)
        self._keys: tuple[Rotate, Keys | None] | None = None
        self._operands = tl.bfloat16 if dtype.itemsize == 2 else tl.float32

    def scores(
        self,
        layers: Sequence[CompressedLayer],
        queries: Tensor,
        angles: Angles | None,
        seen: Seen,
    ) -> Iterator[Tensor]:
        assert angles is not None  # keys are stored before rotation
        keys = self._keys_under(angles)
        if keys is None or not seen.latents:
            yield from super().scores(layers, queries, angles, seen)
            return
        predicted = None
        for one, part in self._integer_predicted.items():
            if predicted is None:
                shape = len(queries), len(part), seen.latents
                predicted = torch.zeros(shape, device=queries.device)
            packed = _packed(layers, one, seen)
            project(part, *packed, self._latents[one], predicted, self._operands)
        packed = _packed(layers, (0, "key"), seen)
        rotation = angles.cos, angles.sin
        yield scores(queries.float(), *packed, keys, *rotation, predicted, self._operands)

    def mix(self, layers: Sequence[CompressedLayer], weights: Tensor, seen: Seen) -> Tensor:
        rows = weights[..., : seen.latents].float().flatten(1, 2)  # (B, H_q·m, n)
        mixed = [rows.sum(dim=-1, keepdim=True)]
        for one in self._value_maps:
            packed = _packed(layers, one, seen)
            mixed.append(mix(rows, *packed, self._latents[one], self._operands))
        by_head = torch.cat(mixed, dim=-1).unflatten(1, weights.shape[1:3])  # (B, H_kv, R, 1 + r)
        return torch.einsum("bhrk,hkd->bhrd", by_head, self._integer_values)

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


def _packed(layers: Sequence[CompressedLayer], one: Input, seen: Seen) -> tuple[Tensor, Tensor]:
    """Return the visible codes and scales of a site."""
    store = store_of(layers, one)
    assert isinstance(store, WidthStore)
    first = offset_of(layers, store, seen)
    return store.visible(first, first + seen.latents)

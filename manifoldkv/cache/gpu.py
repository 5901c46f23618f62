"""Decoding on packed latents by Triton kernels, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from triton import language as tl

from manifoldkv.cache.decoding import DecodingSites, store_and_range
from manifoldkv.cache.layers import CompressedLayer
from manifoldkv.cache.sites import Seen
from manifoldkv.coding.mixed import MixedWidths
from manifoldkv.coding.predictor import Input
from manifoldkv.kernels.gpu import mix, project, scores
from manifoldkv.kernels.gpu_latents import zeros_beside
from manifoldkv.kernels.gpu_tables import Keys, Latents, tabulate_keys, tabulate_latents
from manifoldkv.kernels.tables import LatentTables
from manifoldkv.models.rotary import Angles
from manifoldkv.models.rotation import Rotation
from manifoldkv.plan.composition import Composer


class GPUSites(DecodingSites[Keys]):
    """`ComposedSites` whose scores and mixtures are those of Triton kernels.

    Products are of bfloat16 with models in 16 bits, sums of float32. Rotations other than in pairs
    of features are left to torch. Parameters are as in `ComposedSites`.
    """

    def __init__(
        self, composer: Composer, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._latents: dict[Input, Latents] = {}
        super().__init__(composer, index, dtype, device)
        self._operands = tl.bfloat16 if dtype.itemsize == 2 else tl.float32

    def _add_tables(self, one: Input, quantizer: MixedWidths, device: torch.device) -> None:
        self._latents[one] = tabulate_latents(LatentTables.of_quantizer(quantizer), device)

    def scores(
        self,
        layers: Sequence[CompressedLayer],
        queries: Tensor,
        angles: Angles | None,
        seen: Seen,
    ) -> Iterator[Tensor]:
        assert angles is not None  # keys are stored before rotation
        if self._tables_under(angles) is None or not seen.latents:
            yield from super().scores(layers, queries, angles, seen)
        else:
            yield self._scores(layers, queries, angles, seen)

    def mix(self, layers: Sequence[CompressedLayer], weights: Tensor, seen: Seen) -> Tensor:
        rows = weights.float().flatten(1, 2)  # (B, H_q·m, n)
        sources = [(_packed(layers, one, seen), self._latents[one]) for one in self._columns]
        by_row = mix(rows, seen.latents, sources, self._operands) * self._mixed_factors
        # By head, of all sequences: (H_kv, B·R, 1 + r).
        by_head = (
            by_row.to(self._values.dtype)
            .unflatten(1, weights.shape[1:3])
            .transpose(0, 1)
            .flatten(1, 2)
        )
        mixed = torch.bmm(by_head, self._values)
        return mixed.unflatten(1, (len(weights), -1)).transpose(0, 1)

    def attends(self, angles: Angles) -> bool:
        return self._tables_under(angles) is not None

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
        keys = self._tables_under(angles)
        assert keys is not None
        codes = _packed(layers, (0, "key"), seen)
        predicted = None
        for one, part in self._key_predicted.items():
            if predicted is None:
                predicted = zeros_beside(codes, len(part))
            packed = _packed(layers, one, seen)
            project(part, packed, self._latents[one], predicted, self._operands)
        given = codes, keys, angles.cos, angles.sin, predicted
        return scores(queries, *given, scaling=scaling, dtype=self._operands)

    def _tabulated(self, rotation: Rotation, prediction: Tensor | None) -> Keys:
        return tabulate_keys(
            self._latents[0, "key"],
            self._scaled_up(),
            self._key_mean.float(),
            *(rotation.partner, rotation.sign, rotation.angle),
            None if prediction is None else prediction.float(),
        )


def _packed(layers: Sequence[CompressedLayer], one: Input, seen: Seen) -> Tensor:
    """Return the visible latents of a site."""
    store, first, stop = store_and_range(layers, one, seen)
    return store.visible(first, stop)

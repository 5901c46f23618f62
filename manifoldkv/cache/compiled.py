"""Decoding on packed latents by compiled kernels: nothing of tokens × features is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from manifoldkv.cache.composed import Constant, NewTokens
from manifoldkv.cache.decoding import DecodingSites, store_and_range
from manifoldkv.cache.layers import CompressedLayer
from manifoldkv.cache.mixed import WidthStore
from manifoldkv.cache.sites import Seen
from manifoldkv.cache.storage import Store, split_tiles
from manifoldkv.coding.mixed import MixedWidths
from manifoldkv.coding.predictor import Input
from manifoldkv.kernels.decode import mix, project, scores
from manifoldkv.kernels.step import Source, StepTables, attend, most_sources
from manifoldkv.kernels.tables import KeyTables, LatentTables
from manifoldkv.kernels.views import Array, Packed
from manifoldkv.models.rotary import Angles
from manifoldkv.models.rotation import Rotation
from manifoldkv.plan.composition import Composer
from manifoldkv.plan.site import SitePlan

FEW_TOKENS = 16
"""Most new tokens that a kernel projects; torch is faster with more."""
TOKENS_AT_A_TIME = 2048
"""Tokens whose predictions are held at a time."""


class CompiledSites(DecodingSites[KeyTables]):
    """`ComposedSites` whose scores and mixtures are those of compiled kernels, on a CPU.

    Rotations other than in pairs of features, and many queries at once, are left to torch.
    Parameters are as in `ComposedSites`.
    """

    def __init__(
        self, composer: Composer, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._tables: dict[Input, LatentTables] = {}
        super().__init__(composer, index, dtype, device)
        # In the order of the columns of `_values`.
        self._sources = list(dict.fromkeys([*self._columns, *self._key_predicted]))
        self._step: StepTables | None = None

    def _held_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        return torch.float32  # that of the kernels, at every step

    def _add_tables(self, one: Input, quantizer: MixedWidths, device: torch.device) -> None:
        self._tables[one] = LatentTables.of_quantizer(quantizer)

    def _new_tokens(
        self,
        planned: SitePlan,
        up: Tensor,
        constant: Constant,
        working: torch.dtype,
        *,
        is_input: bool,
    ) -> NewTokens:
        return _CompiledTokens(planned, up, constant, working, is_input=is_input)

    def scores(
        self,
        layers: Sequence[CompressedLayer],
        queries: Tensor,
        angles: Angles | None,
        seen: Seen,
    ) -> Iterator[Tensor]:
        assert angles is not None  # keys are stored before rotation
        tables = self._tables_under(angles)
        if tables is None or not seen.latents:
            yield from super().scores(layers, queries, angles, seen)
            return
        queries, size = queries.float(), seen.latents
        if self._key_predicted:
            size = TOKENS_AT_A_TIME
        for start, stop in split_tiles(0, seen.latents, size):
            tile = replace(seen, offset=seen.offset + start, latents=stop - start)
            predicted = None
            if self._key_predicted:
                rank = len(next(iter(self._key_predicted.values())))
                predicted = queries.new_zeros(len(queries), rank, stop - start)
                for one, part in self._key_predicted.items():
                    project(_packed(layers, one, tile), self._tables[one], part, predicted)
            of_tile = angles.of_tokens(start, stop)
            cos, sin = of_tile.cos.float(), of_tile.sin.float()
            out = queries.new_empty(*queries.shape[:3], stop - start)
            packed = _packed(layers, (0, "key"), tile)
            scores(queries, packed, tables, cos, sin, predicted, out.flatten(1, 2))
            yield out

    def mix(self, layers: Sequence[CompressedLayer], weights: Tensor, seen: Seen) -> Tensor:
        rows = weights[..., : seen.latents].float().flatten(1, 2)  # (B, H_q·m, n)
        mixed = rows.new_zeros(*rows.shape[:2], self._values.shape[1])
        mixed[..., 0] = rows.sum(dim=-1)
        for one, columns in self._columns.items() if seen.latents else ():
            mix(rows, _packed(layers, one, seen), self._tables[one], mixed, columns.start)
        mixed *= self._mixed_factors
        return mixed.unflatten(1, weights.shape[1:3]) @ self._values

    def attends(self, angles: Angles) -> bool:
        """Return whether `attend` takes a rotation, and the number of the layer's sources."""
        return len(self._sources) <= most_sources() and self._tables_under(angles) is not None

    def attended(
        self,
        layers: Sequence[CompressedLayer],
        queries: Tensor,
        scaling: float,
        seen: Seen,
        angles: Angles,
        sinks: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        by_head = (queries.float() * scaling).contiguous()
        no_tokens = by_head[:, :, :0]
        keys, values = (no_tokens, no_tokens) if sinks is None else sinks

        def packed(one: Input) -> Packed:
            return _packed(layers, one, seen)

        further = keys.float().contiguous(), values.float().contiguous()
        return self.attend(by_head, packed, angles, further)

    def attend(
        self,
        queries: Tensor,
        packed: Callable[[Input], Packed],
        angles: Angles,
        sinks: tuple[Tensor, Tensor],
        tiles: Array | None = None,
    ) -> Tensor:
        """Return the attention output of a token of every text, (B, H_kv, R, d), float32.

        Parameters
        ----------
        queries : Tensor
            Scaled and rotated queries, (B, H_kv, R, d), float32, contiguous.
        packed : callable
            Returns the latents of a site of the layer or of one below.
        angles : Angles
            Of the tokens.
        sinks, tiles
            As in `manifoldkv.kernels.step.attend`.
        """
        sources = [packed(one) for one in self._sources]
        cos, sin = angles.cos.float(), angles.sin.float()
        tables = self._step_tables(angles)
        return attend(queries, packed((0, "key")), sources, tables, cos, sin, sinks, tiles)

    def _step_tables(self, angles: Angles) -> StepTables:
        """Return the tables of `attend`."""
        keys = self._tables_under(angles)
        assert keys is not None
        if self._step is None or self._step.keys is not keys:
            sources = [
                Source(self._tables[one], self._key_predicted.get(one), one in self._columns)
                for one in self._sources
            ]
            self._step = StepTables(keys, tuple(sources), self._values, self._mixed_factors)
        return self._step

    def _tabulated(self, rotation: Rotation, prediction: Tensor | None) -> KeyTables:
        latents, up, heads = self._tables[0, "key"], self._scaled_up(), self._grouping.heads
        return KeyTables.of(latents, up, self._key_mean, heads, rotation, prediction)


class _CompiledTokens(NewTokens):
    """New tokens, a few of which are encoded by a kernel."""

    def _append(self, store: Store, x: Tensor, expected: Tensor) -> Tensor:
        if x.shape[0] * x.shape[1] > FEW_TOKENS:
            return super()._append(store, x, expected)
        assert isinstance(store, WidthStore)
        return store.append_projected(x, expected, self._down)


def _packed(layers: Sequence[CompressedLayer], one: Input, seen: Seen) -> Packed:
    """Return the visible latents of a site."""
    store, first, stop = store_and_range(layers, one, seen)
    return store.packed(first, stop)

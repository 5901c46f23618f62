"""Attention over packed latents by compiled kernels: nothing of tokens × features is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from manifoldkv.models.interface import AttentionSettings
from manifoldkv.models.rotary import Angles
from manifoldkv.models.rotation import Rotation
from manifoldkv.plan.composition import Composer
from manifoldkv.plan.predictor import Input, PredictorContext
from manifoldkv.serve.cache.backend import (
    AttentionBackend,
    Seen,
    attend_by_scores,
    split_queries,
)
from manifoldkv.serve.cache.layers import CompressedLayer
from manifoldkv.serve.cache.maps import LayerMaps, latent_tables
from manifoldkv.serve.cache.storage import split_tiles
from manifoldkv.serve.cache.torch_backend import TorchBackend
from manifoldkv.serve.kernels.decode import mix, project, scores
from manifoldkv.serve.kernels.step import Source, StepTables, attend, most_sources
from manifoldkv.serve.kernels.tables import KeyTables, LatentTables
from manifoldkv.serve.kernels.views import Array, Packed

FEW_TOKENS = 16
"""Most new tokens that a kernel projects; torch is faster with more."""
TOKENS_AT_A_TIME = 2048
"""Tokens whose predictions are held at a time."""


class NumbaBackend(AttentionBackend):
    """Attention by compiled kernels, on a CPU.

    Rotations other than in pairs of features, and many queries at once, are left to torch.

    Parameters
    ----------
    maps : LayerMaps
        Of the layer, in float32.
    latents : dict of Input to LatentTables
        Of keys, and of all sources.
    """

    def __init__(self, maps: LayerMaps, latents: dict[Input, LatentTables]) -> None:
        self._maps, self._latents = maps, latents
        self._torch = TorchBackend(maps)
        self._sources = list(maps.sources)
        self._mixed_factors = maps.mixed_factors
        self._tables = maps.by_rotation(self._tabulated)

    @classmethod
    def of(
        cls, composer: Composer, index: int, dtype: torch.dtype, device: torch.device
    ) -> NumbaBackend:
        held = torch.float32  # that of the kernels, at every step
        maps = LayerMaps(composer, index, dtype, device, held, packed=True, few_tokens=FEW_TOKENS)
        return cls(maps, latent_tables(composer.layers, index, maps.factors))

    def store(
        self, layer: CompressedLayer, keys: Tensor, values: Tensor, context: PredictorContext
    ) -> None:
        self._maps.store(layer, keys, values, context)

    def attend(self, queries: Tensor, seen: Seen, settings: AttentionSettings) -> Tensor:
        heads, angles = self._maps.heads, seen.angles
        if angles is None or self._tables.under(angles) is None or not seen.latents:
            return self._torch.attend(queries, seen, settings)
        if seen.mask is not None or not settings.is_plain or not self.attends(angles):
            scores, mix = partial(self.scores, seen), partial(self.mix, seen)
            return attend_by_scores(queries, heads, seen, settings, scores, mix)
        by_head = (split_queries(queries, heads).float() * settings.scaling).contiguous()
        no_tokens = by_head[:, :, :0]
        (keys, values), *others = seen.exact or [(no_tokens, no_tokens)]
        assert not others  # sink tokens alone, or new ones alone
        exact = keys.float().contiguous(), values.float().contiguous()
        output = self.attend_packed(by_head, partial(_packed, seen), angles, exact)
        return output.to(queries.dtype).reshape(queries.shape)

    def reconstruct(self, seen: Seen, size: int) -> tuple[list[Tensor], list[Tensor]]:
        return self._torch.reconstruct(seen, size)

    def attends(self, angles: Angles) -> bool:
        """Return whether `attend_packed` takes a rotation, and the number of the sources."""
        return len(self._sources) <= most_sources() and self._tables.under(angles) is not None

    def attend_packed(
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
            Returns the latents of keys or values of the layer or of one below.
        angles : Angles
            Of the tokens.
        sinks, tiles
            As in `manifoldkv.serve.kernels.step.attend`.
        """
        tables = self._tables.under(angles)
        assert tables is not None
        latents = {one: packed(one) for one in self._latents}
        sources = [latents[one] for one in self._sources]
        cos, sin = angles.cos.float(), angles.sin.float()
        return attend(queries, latents[0, "key"], sources, tables, cos, sin, sinks, tiles)

    def scores(self, seen: Seen, queries: Tensor) -> Iterator[Tensor]:
        """Yield the scores (B, H_kv, R, t) of the visible latents for scaled queries."""
        tables, queries, size = self._tables.under(seen.angles), queries.float(), seen.latents
        assert tables is not None
        assert seen.angles is not None
        of_others = self._maps.key_predicted
        if of_others:
            size = TOKENS_AT_A_TIME
        for start, stop in split_tiles(0, seen.latents, size):
            tile = replace(seen, newest=seen.newest - start, latents=stop - start)
            predicted = None
            if of_others:
                rank = len(next(iter(of_others.values())))
                predicted = queries.new_zeros(len(queries), rank, stop - start)
                for one, part in of_others.items():
                    project(_packed(tile, one), self._latents[one], part, predicted)
            of_tile = seen.angles.of_tokens(start, stop)
            cos, sin = of_tile.cos.float(), of_tile.sin.float()
            out = queries.new_empty(*queries.shape[:3], stop - start)
            packed = _packed(tile, (0, "key"))
            scores(queries, packed, tables.keys, cos, sin, predicted, out.flatten(1, 2))
            yield out

    def mix(self, seen: Seen, weights: Tensor) -> Tensor:
        """Return the values of latents mixed by weights (B, H_kv, R, n), (B, H_kv, R, d)."""
        rows, values = weights[..., : seen.latents].float().flatten(1, 2), self._maps.values
        mixed = rows.new_zeros(*rows.shape[:2], values.shape[1])  # (B, H_q·m, 1 + r)
        mixed[..., 0] = rows.sum(dim=-1)
        for one, columns in self._maps.columns.items():
            mix(rows, _packed(seen, one), self._latents[one], mixed, columns.start)
        mixed *= self._mixed_factors
        return mixed.unflatten(1, weights.shape[1:3]) @ values

    def _tabulated(self, rotation: Rotation) -> StepTables:
        maps, latents = self._maps, self._latents
        given = maps.packed_up, maps.key_mean, maps.heads, rotation, maps.prediction
        sources = [
            Source(latents[one], maps.key_predicted.get(one), one in maps.columns)
            for one in self._sources
        ]
        keys = KeyTables.of(latents[0, "key"], *given)
        return StepTables(keys, tuple(sources), maps.values, self._mixed_factors)


def _packed(seen: Seen, one: Input) -> Packed:
    """Return the visible latents of keys or values."""
    store, first, stop = seen.packed(one)
    return store.packed(first, stop)

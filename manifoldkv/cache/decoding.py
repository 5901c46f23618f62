"""Decode steps on packed latents, common to the kernels of CPUs and of GPUs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from manifoldkv.basis import SITES
from manifoldkv.cache.composed import ComposedSites, Maps, offset_of, store_of
from manifoldkv.cache.layers import CompressedLayer
from manifoldkv.cache.mixed import WidthStore
from manifoldkv.cache.sites import Seen
from manifoldkv.coding.mixed import MixedWidths
from manifoldkv.coding.predictor import Input, PredictorContext
from manifoldkv.models.interface import AttentionSettings, Rotate
from manifoldkv.models.rotary import Angles
from manifoldkv.models.rotation import Rotation
from manifoldkv.plan.composition import Composer

Keys = TypeVar("Keys")
"""Tables of the keys of a layer."""


class DecodingSites(ComposedSites, Generic[Keys]):
    """`ComposedSites` whose kernels attend for a single new token of every sequence.

    Parameters are as in `ComposedSites`.
    """

    def __init__(
        self, composer: Composer, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(composer, index, dtype, device)
        factors = {}
        for below, site in {(0, SITES[0]), *self._key_predicted, *self._columns}:
            quantizer = composer.layers[index - below].of(site).quantizer
            assert isinstance(quantizer, MixedWidths)
            self._add_tables((below, site), quantizer, device)
            of_stored = (quantizer.step * quantizer.gain)[: quantizer.stored]
            factors[below, site] = of_stored.to(device)
        self._factors = factors
        """Latents over what kernels read, which is stored integers less their centres, or codewords
        if they are trellis-coded, (r,) by site, float32."""
        of_values = [factors[one] for one in self._columns]
        self._mixed_factors = torch.cat([of_values[0].new_ones(1), *of_values])  # (1 + r,)
        self._key_predicted = {
            one: part.float() * factors[one] for one, part in self._key_predicted.items()
        }

        self._key_tables: tuple[Rotate, Keys | None] | None = None

    @abstractmethod
    def _add_tables(self, one: Input, quantizer: MixedWidths, device: torch.device) -> None:
        """Hold the tables of a site's latents."""

    def _scaled_up(self) -> Tensor:
        """Return the up-projection of what kernels read of keys, (D, r), float32."""
        return self._key_up.float().mT * self._factors[0, "key"]

    def _prediction(self) -> Maps:
        # Latents of factor 0 are 0.
        return {
            one: torch.where(self._factors[one] == 0, 0, part / self._factors[one])
            for one, part in self._key_predicted.items()
        }

    def _tables_under(self, angles: Angles) -> Keys | None:
        """Return the tables of keys under a rotation; None for one that is not in pairs."""
        if self._key_tables is None or self._key_tables[0] is not angles.rotate:
            features, heads = len(self._key_mean), self._grouping.heads
            rotation = Rotation.of(angles.rotate, features // heads, angles.cos.shape[2])
            tables = None
            if rotation is not None:
                prediction = self._key_expansion
                if prediction is None and self._key_predicted:
                    prediction = torch.eye(features, device=self._key_up.device)
                tables = self._tabulated(rotation, prediction)
            self._key_tables = angles.rotate, tables
        return self._key_tables[1]

    @abstractmethod
    def _tabulated(self, rotation: Rotation, prediction: Tensor | None) -> Keys:
        """Return the tables of keys with a matrix of their prediction, (D, p)."""

    def decodes(self, layer: CompressedLayer, settings: AttentionSettings, angles: Angles) -> bool:
        plain = settings.softcap is None and settings.sinks is None
        begun = layer.tokens_seen > 0 and (not layer.sinks.size or layer.sinks.are_first)
        return plain and begun and self.attends(angles)

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
        layer = layers[0]
        tokens, _ = layer.get_mask_sizes(1)
        skipped = layer.sinks.size
        self.store(layer, keys, values, context)
        seen = Seen(layer.tokens_held - tokens + skipped, tokens - skipped, [], None)
        batch, heads, _, head_dim = queries.shape
        by_head = queries.reshape(batch, self._grouping.heads, -1, head_dim)
        sinks = None
        if skipped:
            sinks = layer.sinks.seen()
            angles = angles.of_tokens(skipped, tokens)
        output = self.attended(layers, by_head, scaling, seen, angles, sinks)
        return output.to(queries.dtype).reshape(batch, heads, 1, head_dim)

    @abstractmethod
    def attends(self, angles: Angles) -> bool:
        """Return whether kernels attend under a rotation."""

    @abstractmethod
    def attended(
        self,
        layers: Sequence[CompressedLayer],
        queries: Tensor,
        scaling: float,
        seen: Seen,
        angles: Angles,
        sinks: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Return the attention output of a token of every sequence, (B, H_kv, R, d).

        Parameters
        ----------
        layers : sequence of CompressedLayer
            The layer and those below.
        queries : Tensor
            Rotated queries, (B, H_kv, R, d).
        scaling : float
            Factor of scores.
        seen : Seen
            Visible latents.
        angles : Angles
            Of the latents.
        sinks : tuple of Tensor or None
            Rotated keys and values of the sink tokens, (B, H_kv, s, d) each.
        """


def store_and_range(
    layers: Sequence[CompressedLayer], one: Input, seen: Seen
) -> tuple[WidthStore, int, int]:
    """Return the store of a site, and the first and the last (exclusive) of its visible tokens."""
    store = store_of(layers, one)
    assert isinstance(store, WidthStore)
    first = offset_of(layers, store, seen)
    return store, first, first + seen.latents

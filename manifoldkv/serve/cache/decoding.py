"""Decode steps on packed latents, common to the kernels of CPUs and of GPUs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from manifoldkv.models.interface import AttentionSettings
from manifoldkv.models.rotary import Angles
from manifoldkv.plan.composition import Composer
from manifoldkv.plan.formats.mixed import MixedWidths
from manifoldkv.plan.predictor import Input, PredictorContext
from manifoldkv.serve.cache.composed import ComposedSites, offset_of, store_of
from manifoldkv.serve.cache.layers import CompressedLayer
from manifoldkv.serve.cache.mixed import WidthStore
from manifoldkv.serve.cache.sites import Seen


class DecodingSites(ComposedSites):
    """`ComposedSites` whose kernels attend for a single new token of every sequence.

    Parameters are as in `ComposedSites`.
    """

    def __init__(
        self, composer: Composer, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(composer, index, dtype, device)
        self._quantizers: dict[Input, MixedWidths] = {}
        for below, site in {(0, "key"), *self._key_predicted, *self._value_maps}:
            quantizer = composer.layers[index - below].of(site).quantizer
            assert isinstance(quantizer, MixedWidths)
            self._quantizers[below, site] = quantizer
        self._integer_up = self._of_integers((0, "key"), self._key_up)
        self._integer_predicted = {
            one: self._of_integers(one, part) for one, part in self._key_predicted.items()
        }
        joined = [self._value_mean.float().unsqueeze(1)]
        joined += [self._of_integers(one, part) for one, part in self._value_maps.items()]
        by_head = torch.cat(joined, dim=1).unflatten(0, (self._grouping.heads, -1))
        self._integer_values = by_head.mT.contiguous()  # (H_kv, 1 + r, d)

    def _of_integers(self, one: Input, part: Tensor) -> Tensor:
        """Return a map of latents (features, r) as one of stored integers, less their centres.

        Those of trellis-coded latents are their codewords.
        """
        quantizer = self._quantizers[one]
        stored = quantizer.stored
        factor = quantizer.step[:stored] * quantizer.gain[:stored]
        return (part[:, :stored].float() * factor.to(part.device)).contiguous()

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

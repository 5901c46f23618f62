"""What attention needs of the stored keys and values of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from manifoldkv.models.interface import AttentionSettings
from manifoldkv.models.rotary import Angles
from manifoldkv.plan.predictor import PredictorContext
from manifoldkv.serve.cache.layers import CompressedLayer

ELEMENTS_AT_A_TIME = 1 << 19
"""Elements of up-projected keys or dequantized latents held at a time, for a processor's cache."""
ELEMENTS_ON_GPU = 1 << 26
"""The same on a GPU, where every tile costs the start of its kernels."""


@dataclass(frozen=True)
class Seen:
    """Tokens that some queries attend to: latents, then uncompressed tokens, then sink tokens.

    Tokens are counted from the first visible one. Sink tokens have latents too: the mask shows each
    of them to a query once.

    Parameters
    ----------
    offset : int
        Index of the first visible token in the stores of latents.
    latents : int
        Number of first tokens that are visible as latents.
    exact : list of tuple of Tensor
        Keys and values of uncompressed tokens, (B, H_kv, t, d) each; keys are rotated.
    mask : Tensor or None
        Visibility of tokens, (B or 1, 1, m, `latents` and all t), bool.
    skipped : int
        Number of first tokens whose latents are not visible: they are sink tokens.
    """

    offset: int
    latents: int
    exact: list[tuple[Tensor, Tensor]]
    mask: Tensor | None
    skipped: int = 0


class Sites(ABC):
    """Storage, scores and mixtures of the latents of one layer.

    Methods take the layer of the cache and those below it, in this order.
    """

    @abstractmethod
    def store(
        self, layer: CompressedLayer, keys: Tensor, values: Tensor, context: PredictorContext
    ) -> None:
        """Store new tokens.

        Parameters
        ----------
        layer : CompressedLayer
            Of the cache.
        keys, values : Tensor
            New ones, (B, H_kv, m, d).
        context : PredictorContext
            Reconstructions of the new tokens in the layers below, (B, m, D) each. Those of this
            layer are added.
        """

    @abstractmethod
    def scores(
        self,
        layers: Sequence[CompressedLayer],
        queries: Tensor,
        angles: Angles | None,
        seen: Seen,
    ) -> Iterator[Tensor]:
        """Yield the scores (B, H_kv, R, t) of the visible latents, by tile.

        Parameters
        ----------
        layers : sequence of CompressedLayer
            The layer and those below.
        queries : Tensor
            Scaled and rotated queries, (B, H_kv, R, d).
        angles : Angles or None
            Of the visible tokens, for keys stored before rotation.
        seen : Seen
            Visible tokens.
        """

    @abstractmethod
    def mix(self, layers: Sequence[CompressedLayer], weights: Tensor, seen: Seen) -> Tensor:
        """Return the values of latents mixed by weights (B, H_kv, R, n), (B, H_kv, R, d)."""

    @abstractmethod
    def keys(
        self, layers: Sequence[CompressedLayer], seen: Seen, size: int
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield reconstructed keys (B, H_kv, t, d) of the visible latents, by tile."""

    @abstractmethod
    def values(self, layers: Sequence[CompressedLayer], seen: Seen, size: int) -> Iterator[Tensor]:
        """Yield reconstructed values (B, H_kv, t, d) of the visible latents, by tile."""

    def decodes(self, layer: CompressedLayer, settings: AttentionSettings, angles: Angles) -> bool:
        """Return whether `decode` can attend for a single new token that sees all tokens."""
        return False

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
        """Store a new token of every sequence, and return its attention output, (B, H_q, 1, d).

        Parameters
        ----------
        layers : sequence of CompressedLayer
            The layer and those below.
        queries : Tensor
            Rotated queries, (B, H_q, 1, d).
        keys, values : Tensor
            Of the new token, (B, H_kv, 1, d); keys before rotation.
        scaling : float
            Factor of scores.
        angles : Angles
            Of all tokens that it sees.
        context : PredictorContext
            As in `store`.
        """
        raise NotImplementedError

    def fits_kernel(self, layer: CompressedLayer, settings: AttentionSettings) -> bool:
        """Return whether torch's attention kernel can run on the latents of both sites."""
        return False

    def attend_to_latents(self, layer: CompressedLayer, queries: Tensor, seen: Seen) -> Tensor:
        """Run torch's kernel on latents, for queries (B, H_kv, R, d) of all heads of a group."""
        raise NotImplementedError


def tile_tokens(x: Tensor) -> int:
    """Return the number of tokens of a tile with the batch, heads and features of x."""
    elements = ELEMENTS_AT_A_TIME if x.device.type == "cpu" else ELEMENTS_ON_GPU
    return max(1, elements // (x.shape[0] * x.shape[1] * x.shape[3]))


def split_tile(latents: Tensor, start: int, first: int, last: int) -> Tensor:
    """Return tokens `first` to `last` of a tile (B, G, t, r) that begins at `start`."""
    return latents[:, :, first - start : last - start]

"""Blocks of tokens of a stored cache: keys and values as payloads, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from transformers import DynamicCache

from manifoldkv.core.basis import SITES
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.interface import Rotate
from manifoldkv.models.rotary import Angles, rotation_of_keys
from manifoldkv.plan.formats.entropy import EntropyCoded
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.serve.codec.blob import least_payload
from manifoldkv.serve.codec.payload import PayloadReader, exact_bytes, write_payload
from manifoldkv.serve.codec.sites import SiteCodec, product_dtype
from manifoldkv.serve.kernels import entropy
from manifoldkv.serve.kernels.entropy import EntropyTables, SymbolReader


class BlockCodec:
    """Encoder and decoder of blocks, which depend on no other block.

    Parameters
    ----------
    decoder : Decoder
        View of the model that fills the caches.
    plan : CompressionPlan
        Of recipe ``"stored"``, for this model.
    """

    def __init__(self, decoder: Decoder, plan: CompressionPlan) -> None:
        planned = [site for layer in plan.layers for _, site in layer.sites]
        dtype = product_dtype(decoder.dtype)
        self._decoder, self._plan, self._dtype = decoder, plan, dtype
        self._sites: list[SiteCodec] = []
        means = torch.empty(0)
        for index, site in enumerate(planned):
            self._sites.append(SiteCodec(site, index, means, dtype))
            means = torch.cat([means, self._sites[-1].mean])
        quantizers = [site.quantizer for site in planned]
        self._tables = EntropyTables.of(q for q in quantizers if isinstance(q, EntropyCoded))
        self._rows = list(accumulate((site.latents for site in self._sites), initial=0))
        self._features, self._head_dim = planned[0].features, planned[0].head_dim
        self._rotations: dict[str, Rotate] = {}
        """Rotations of keys by kind of layer."""

    @property
    def features(self) -> int:
        """Return the features of the keys of a token in a layer, D."""
        return self._features

    def exact(self, start: int, stop: int) -> int:
        """Return how many tokens of a block are stored uncompressed."""
        return max(0, min(self._plan.sinks, stop) - start)

    def stock_bytes(self, sequences: int, tokens: int, dtype: torch.dtype) -> int:
        """Return the bytes of tokens in a stock cache."""
        return sequences * tokens * len(self._sites) * self._features * dtype.itemsize

    @torch.no_grad()
    def encode(self, cache: DynamicCache, ids: Tensor | None, start: int, stop: int) -> bytes:
        """Return the payload of the tokens of a cache from `start` to `stop`.

        Raises
        ------
        CacheError
            If an element is not finite, or too large.
        """
        exact = self.exact(start, stop)
        angles = self._angles(start + exact, stop, back=True)
        sequences = cache.layers[0].keys.shape[0]
        count = sequences * (stop - start - exact)
        reconstructed = torch.empty(len(self._sites) * self._features, count, dtype=self._dtype)
        symbols = torch.empty(self._rows[-1], count, dtype=torch.int32)
        kept: list[bytes] = []
        for index, site in enumerate(self._sites):
            layer = cache.layers[index // len(SITES)]
            x = (layer.values if index % len(SITES) else layer.keys)[:, :, start:stop].cpu()
            kept.append(exact_bytes(x[:, :, :exact]))
            if not count:
                continue
            x, rotation = _tokens_last(x[:, :, exact:]).float(), angles[index]
            if rotation is not None:
                x = _as_cached(x, sequences, self._head_dim)
                x = _tokens_last(rotation.tile(x, 0, x.shape[2]))
            symbols[self._rows[index] : self._rows[index + 1]] = site.encode(x, reconstructed)
        payload = write_payload(ids, kept, entropy.encode(symbols, self._tables))
        stock = self.stock_bytes(sequences, stop - start, cache.layers[0].keys.dtype)
        return payload.ljust(least_payload(stock), b"\0")

    @torch.no_grad()
    def decode(
        self, blocks: Sequence[PayloadReader], dtype: torch.dtype, out: list[Tensor]
    ) -> None:
        """Write keys and values of neighbouring blocks, in one product for each site.

        Parameters
        ----------
        blocks : sequence of PayloadReader
            Payloads, in the order of their tokens.
        dtype : torch.dtype
            Of their uncompressed tokens.
        out : list of Tensor
            Keys and values of all layers, (B, H_kv, n, d), of tokens 0 to n. Tokens of the blocks
            beyond them are decoded and dropped.

        Raises
        ------
        CodecError
            If a payload is damaged.
        """
        sequences, heads, tokens, head_dim = out[0].shape
        coded: list[SymbolReader] = []
        for block in blocks:
            shape = (sequences, heads, block.exact, head_dim)
            for x in out:
                exact = block.raw(shape, dtype)[:, :, : tokens - block.start]
                x[:, :, block.start : block.start + block.exact] = exact
            count = sequences * (block.stop - block.start - block.exact)
            coded.append(SymbolReader(self._tables, *block.coded(count)))
            block.end()
        first = blocks[0].start + sum(block.exact for block in blocks)  # they are the first tokens
        stop = blocks[-1].stop
        size, held = stop - first, min(stop, tokens) - first
        angles = self._angles(first, stop, back=False)
        reconstructed = torch.empty(len(out) * self._features, sequences * size, dtype=self._dtype)
        for index, site in enumerate(self._sites):
            symbols = [part.read(site.latents).unflatten(1, (sequences, -1)) for part in coded]
            if not size:
                continue
            joint = torch.cat(symbols, dim=2).flatten(1)  # (F, B · m)
            x = _as_cached(site.decode(joint, reconstructed), sequences, head_dim)
            rotation = angles[index]
            if rotation is not None:
                x = rotation.tile(x, 0, size)
            if held > 0:
                # Rounded before it is transposed: fewer bytes are moved out of order.
                out[index][:, :, first : first + held] = x.to(out[index].dtype)[:, :, :held]
        for part in coded:
            part.end()

    def _angles(self, start: int, stop: int, back: bool) -> list[Angles | None]:
        """Return by site the rotation of keys at some positions, or the one back."""
        if self._plan.rotary == "post":
            return [None] * len(self._sites)
        decoder = self._decoder
        like = torch.zeros((), device=decoder.devices[0])
        positions = torch.arange(start, stop, device=like.device).unsqueeze(0)
        by_kind: dict[str, Angles] = {}
        for index, kind in enumerate(decoder.kinds):
            if kind not in by_kind:
                cos, sin = (part.cpu() for part in decoder.angles(index, positions, like))
                if kind not in self._rotations:
                    rotate = rotation_of_keys(decoder.layers[index], cos.shape[-1])
                    self._rotations[kind] = rotate
                # Tokens are innermost in memory, as those of the keys.
                cos, sin = (part.mT.contiguous().mT for part in (cos, sin))
                angles = Angles(cos, sin, self._rotations[kind])
                by_kind[kind] = angles.inverse() if back else angles
        return [angles for kind in decoder.kinds for angles in (by_kind[kind], None)]


def _tokens_last(x: Tensor) -> Tensor:
    """Return keys or values (B, H_kv, m, d) with tokens as columns, (D, B · m)."""
    return x.permute(1, 3, 0, 2).flatten(2).flatten(0, 1)


def _as_cached(x: Tensor, sequences: int, head_dim: int) -> Tensor:
    """Return a view of columns (D, B · m) as keys or values of a cache, (B, H_kv, m, d)."""
    return x.unflatten(0, (-1, head_dim)).unflatten(2, (sequences, -1)).permute(2, 0, 3, 1)

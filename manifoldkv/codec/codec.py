"""Stored caches: a stock cache as bytes, an eighth to a sixteenth of its size, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from manifoldkv.codec.blob import (
    EMPTY_NAME,
    Block,
    Header,
    extended,
    least_payload,
    read_blob,
    read_blocks,
    read_header,
    write_blob,
)
from manifoldkv.codec.payload import LENGTHS, PayloadReader, exact_bytes
from manifoldkv.codec.symbols import SiteCodec
from manifoldkv.coding.entropy import BLOCK_TOKENS
from manifoldkv.errors import CacheError, PlanError, RunError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.rotary import Angles, rotation_of_keys
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.uncompressed import check_stock
from manifoldkv.runs.files import write_whole

T = TypeVar("T")


class Codec:
    """Turns the stock cache of a model into bytes, a *blob*, and a blob into a stock cache.

    Keys are rotated back by their positions, 0, 1, … in every sequence; the
    plan's prediction from lower layers is subtracted from keys and values, the residual transformed
    and rounded, and the symbols are entropy-coded with the tables of the plan. A decoded cache is
    a `DynamicCache` with the errors of the rounding, ready for any attention; the plan's sink
    tokens are exact. Tokens lie in blocks of at most 256, each with a checksum.
    Sites are coded on as many threads as torch has; the entropy coder itself runs on one of them at
    a time.

    Parameters
    ----------
    model : PreTrainedModel
        The model that fills the caches and the plan was made for.
    plan : CompressionPlan
        Of recipe ``"stored"``.

    Raises
    ------
    ModelError
        If the attention of the model cannot be handled.
    PlanError
        If the plan is of another recipe, or was made for another model.
    CacheError
        If constriction is not installed (``pip install -c constraints.txt -e ".[codec]"``).
    """

    def __init__(self, model: PreTrainedModel, plan: CompressionPlan) -> None:
        decoder = Decoder.of(model)
        plan.check_model(decoder)
        if plan.attended:
            raise PlanError(
                "the plan holds no tables of symbols: make one with compress(…, recipe='stored')"
            )
        self._decoder, self._plan = decoder, plan
        self._coders = [(SiteCodec(layer.key), SiteCodec(layer.value)) for layer in plan.layers]

    def encode(self, cache: DynamicCache, input_ids: Tensor | None = None) -> bytes:
        """Return the blob of a cache.

        Parameters
        ----------
        cache : DynamicCache
            That the model has filled, tokens at positions 0, 1, … and no padding; it stays as it
            is.
        input_ids : Tensor, optional
            Its tokens, (B, n) or more of them, int64, which the blob then holds too; without them
            the text of the cache is unknown.

        Raises
        ------
        CacheError
            If it is another kind of cache, incomplete, or of another model or dtype.
            If it holds no tokens, or elements that are not finite, or the ids do not fit.
        """
        tokens = self._check(cache)
        header = Header(
            self._decoder.dtype,
            cache.layers[0].keys.shape[0],
            tokens,
            bytes.fromhex(self._plan.digest()),
            self._plan.model_digest(),
        )
        return write_blob(header, self._encoded(header, cache, input_ids, 0))

    def append(self, blob: bytes, cache: DynamicCache, input_ids: Tensor | None = None) -> bytes:
        """Return a blob with the tokens of a cache that come after its own.

        Parameters
        ----------
        blob : bytes
            From `encode` or `append`. Its blocks are not changed.
        cache : DynamicCache
            Of a text that begins with the tokens of the blob, which are not looked at again.
        input_ids : Tensor, optional
            As in `encode`, from the first token of the text; wanted if the blob has ids.

        Raises
        ------
        CacheError
            As `encode` and `decode`; and if the cache has no more tokens or other sequences, or
            the ids begin otherwise.
        """
        header, tokens = self._header(blob), self._check(cache)
        if header.dtype != self._decoder.dtype:
            raise CacheError(f"the stored cache is in {header.dtype}, not in {self._decoder.dtype}")
        if cache.layers[0].keys.shape[0] != header.sequences or tokens <= header.tokens:
            raise CacheError(
                f"a cache of {cache.layers[0].keys.shape[0]} × {tokens} tokens does not go on from "
                f"a stored one of {header.sequences} × {header.tokens}"
            )
        held = self.input_ids(blob)
        if (held is None) != (input_ids is None):
            raise CacheError("token ids are those of all tokens of a stored cache, or of none")
        prompt = None if input_ids is None else input_ids[:, : header.tokens].cpu()
        if held is not None and prompt is not None and not torch.equal(held, prompt):
            raise CacheError("the stored cache is that of other tokens")
        blocks = list(self._blocks(blob, header, header.tokens))
        longer = extended(header, tokens - header.tokens)
        return write_blob(longer, blocks + self._encoded(longer, cache, input_ids, header.tokens))

    def decode(self, blob: bytes, tokens: int | None = None) -> DynamicCache:
        """Return the stock cache of a blob, in the dtype and on the devices of the model.

        Parameters
        ----------
        blob : bytes
            From `encode` or `append`.
        tokens : int, optional
            Number of first tokens to decode, whose blocks alone are read; all if omitted.

        Raises
        ------
        CacheError
            If the blob is damaged, is of another plan, model or format, or holds fewer tokens.
        """
        header = self._header(blob)
        stop = self._stop(header, tokens)
        blocks = self._blocks(blob, header, stop)  # all checked before memory is taken
        cache = DynamicCache(config=self._decoder.config)
        made = [
            [torch.empty(self._shape(header, stop), dtype=self._decoder.dtype) for _ in range(2)]
            for _ in self._coders
        ]
        for block in blocks:
            read = self._reader(block, header)
            kept = slice(block.start, min(block.stop, stop))
            for own, given in zip(made, self._decoded(read, header), strict=True):
                for whole, part in zip(own, given, strict=True):
                    whole[:, :, kept] = part[:, :, : kept.stop - kept.start]
        for index, (keys, values) in enumerate(made):
            device = self._decoder.devices[index]
            cache.update(keys.to(device), values.to(device), index)
        return cache

    def tokens(self, blob: bytes) -> int:
        """Return how many tokens of each sequence a blob holds. Raises `CacheError` as `decode`."""
        return self._header(blob).tokens

    def input_ids(self, blob: bytes) -> Tensor | None:
        """Return the token ids of a blob, (B, n), int64; None if it holds none.

        Raises
        ------
        CacheError
            As `decode`.
        """
        header = self._header(blob)
        blocks = self._blocks(blob, header, header.tokens)
        found = [self._reader(block, header).ids for block in blocks]
        held = [ids for ids in found if ids is not None]
        return torch.cat(held, dim=1) if len(held) == len(found) else None

    def save(self, cache: DynamicCache, path: str | Path, input_ids: Tensor | None = None) -> None:
        """Write the blob of a cache to a file, whole or not at all. Parameters as in `encode`.

        Raises
        ------
        RunError
            If the name is empty, or the file cannot be written.
        CacheError
            As `encode`.
        """
        if not str(path):
            raise RunError(EMPTY_NAME)
        write_whole(Path(path), self.encode(cache, input_ids))

    def load(self, path: str | Path, tokens: int | None = None) -> DynamicCache:
        """Return the stock cache of a file that `save` wrote. `tokens` is as in `decode`.

        Raises
        ------
        CacheError
            If the file cannot be read, or as `decode`.
        """
        return self.decode(read_blob(path), tokens)

    def _header(self, blob: bytes) -> Header:
        """Return the header of a blob of this plan and model."""
        header = read_header(blob)
        if header.model != self._plan.model_digest():
            raise CacheError("the stored cache is that of another model")
        if header.plan != bytes.fromhex(self._plan.digest()):
            raise CacheError("the stored cache was made with another plan for this model")
        return header

    def _blocks(self, blob: bytes, header: Header, stop: int) -> Sequence[Block]:
        return list(read_blocks(blob, header, self._token_bytes(header.dtype), stop))

    def _reader(self, block: Block, header: Header) -> PayloadReader:
        stock = header.sequences * (block.stop - block.start) * self._token_bytes(header.dtype)
        exact = self._exact(block.start, block.stop)
        return PayloadReader(block, header.sequences, exact, least_payload(stock))

    def _stop(self, header: Header, tokens: int | None) -> int:
        if tokens is None:
            return header.tokens
        whole = isinstance(tokens, Integral) and not isinstance(tokens, bool)
        if not whole or not 0 < tokens <= header.tokens:
            raise CacheError(
                f"tokens must be an integer: the stored cache has 1 to {header.tokens} tokens, not "
                f"{tokens!r}"
            )
        return int(tokens)

    def _check(self, cache: DynamicCache) -> int:
        """Return the number of tokens of a cache, or refuse one that the model has not filled."""
        check_stock(cache, self._plan, self._decoder.dtype, self._decoder.devices)
        tokens = int(cache.get_seq_length())
        if not tokens:
            raise CacheError("the cache holds no tokens")
        return tokens

    def _shape(self, header: Header, tokens: int) -> tuple[int, int, int, int]:
        """Return the shape of the keys of a layer."""
        keys = self._plan.layers[0].key
        return header.sequences, keys.grouping.heads, tokens, keys.head_dim

    def _token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token of a sequence in a stock cache."""
        return 2 * len(self._plan.layers) * self._plan.layers[0].key.features * dtype.itemsize

    def _exact(self, start: int, stop: int) -> int:
        """Return how many of some tokens are stored uncompressed."""
        return max(0, min(self._plan.sinks, stop) - start)

    def _angles(self, start: int, stop: int, back: bool) -> list[Angles | None]:
        """Return by layer the rotation of keys at some positions, or the one back."""
        decoder = self._decoder
        if self._plan.rotary == "post":
            return [None] * len(decoder.layers)
        like = torch.zeros((), device=decoder.devices[0])
        positions = torch.arange(start, stop, device=like.device).unsqueeze(0)
        rotations: list[Angles | None] = []
        for index, layer in enumerate(decoder.layers):
            cos, sin = decoder.angles(index, positions, like)
            angles = Angles(cos.cpu(), sin.cpu(), rotation_of_keys(layer, cos.shape[-1]))
            rotations.append(angles.inverse() if back else angles)
        return rotations

    @torch.no_grad()
    def _encoded(
        self, header: Header, cache: DynamicCache, input_ids: Tensor | None, first: int
    ) -> list[Block]:
        """Return the blocks of the tokens of a cache from `first` on."""
        shape = (header.sequences, header.tokens)
        if input_ids is not None and (
            input_ids.ndim != 2
            or (input_ids.shape[0], input_ids[:, : shape[1]].shape[1]) != shape
            or not 0 <= int(input_ids.min()) <= int(input_ids.max()) < 1 << 31
        ):
            raise CacheError(f"token ids are {tuple(input_ids.shape)}, of {shape} tokens")
        blocks = []
        for start in range(first, header.tokens, BLOCK_TOKENS):
            stop = min(start + BLOCK_TOKENS, header.tokens)
            ids = None if input_ids is None else input_ids[:, start:stop]
            payload = self._payload(header, cache, ids, start, stop)
            blocks.append(Block(start, stop, payload))
        return blocks

    def _payload(
        self, header: Header, cache: DynamicCache, ids: Tensor | None, start: int, stop: int
    ) -> bytes:
        """Return token ids, exact tokens and symbols of some tokens."""
        exact = self._exact(start, stop)
        angles = self._angles(start + exact, stop, back=True)
        kept: list[bytes] = []
        symbols: list[tuple[SiteCodec, Tensor]] = []
        context, predicted = self._plan.predictor_context(), self._plan.predictor_depth is not None
        for index, (layer, coders) in enumerate(zip(cache.layers, self._coders, strict=True)):
            context.begin(index)
            for x, coder, rotation in zip(
                (layer.keys, layer.values), coders, (angles[index], None), strict=True
            ):
                x = x[:, :, start:stop].cpu()
                kept.append(exact_bytes(x[:, :, :exact]))
                rest = x[:, :, exact:].float()
                if rotation is not None:
                    rest = rotation.tile(rest, 0, rest.shape[2])
                expected = coder.expected(context)
                of_site = coder.symbols(rest.transpose(1, 2).flatten(2).flatten(0, 1), expected)
                symbols.append((coder, of_site))
                if predicted:
                    context.add(coder.reconstruct(of_site, expected))

        def encoded(index: int) -> bytes:
            coder, of_site = symbols[index]
            return coder.encode(of_site)

        parts = [LENGTHS.pack(ids is not None, 0)]
        if ids is not None:
            parts.append(ids.cpu().numpy().astype("<u4").tobytes())
        parts += kept + _on_threads(encoded, len(symbols))
        payload = b"".join(parts)
        stock = header.sequences * (stop - start) * self._token_bytes(header.dtype)
        return payload.ljust(least_payload(stock), b"\0")

    @torch.no_grad()
    def _decoded(self, read: PayloadReader, header: Header) -> list[tuple[Tensor, ...]]:
        """Return keys and values of all layers, (B, H_kv, m, d), in the dtype of the model."""
        angles = self._angles(read.start + read.exact, read.stop, back=False)
        shape = self._shape(header, read.exact)
        sites = [coder for pair in self._coders for coder in pair]
        kept = [read.raw(shape, header.dtype) for _ in sites]
        # Where each stream begins is known first, so that sites can be decoded side by side.
        streams = [read.stream() for _ in sites]
        read.end()
        size = read.stop - read.start - read.exact

        def decoded(index: int) -> Tensor:
            return sites[index].decode(*streams[index], header.sequences * size)

        symbols = _on_threads(decoded, len(sites))
        context, rebuilt = self._plan.predictor_context(), []
        for index, coder in enumerate(sites):
            if index % 2 == 0:
                context.begin(index // 2)
            flat = coder.reconstruct(symbols[index], coder.expected(context))
            context.add(flat)
            x = flat.unflatten(1, (shape[1], -1)).unflatten(0, (header.sequences, size))
            x = x.transpose(1, 2)
            rotation = None if index % 2 else angles[index // 2]
            if rotation is not None:
                x = rotation.tile(x, 0, size)
            x = torch.cat([kept[index], x.to(header.dtype)], dim=2)
            rebuilt.append(x.to(self._decoder.dtype))
        return list(zip(rebuilt[::2], rebuilt[1::2], strict=True))


def _on_threads(work: Callable[[int], T], count: int) -> list[T]:
    """Return what some work makes of 0, …, count - 1, done on as many threads as torch has."""
    threads = torch.get_num_threads()
    if threads == 1:
        return [work(index) for index in range(count)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, range(count)))

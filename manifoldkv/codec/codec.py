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

from manifoldkv.basis import SITES
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
from manifoldkv.codec.blocks import BlockCodec
from manifoldkv.codec.payload import PayloadReader
from manifoldkv.coding.entropy import BLOCK_TOKENS
from manifoldkv.errors import CacheError, CodecError, PlanError, RunError
from manifoldkv.models.decoder import Decoder
from manifoldkv.modes import in_own_modes
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.uncompressed import check_stock
from manifoldkv.runs.files import write_whole

S = TypeVar("S")
T = TypeVar("T")
BLOCKS_AT_A_TIME = 2
"""Blocks that are decoded together, since products of more tokens are faster."""


class Codec:
    """Turns the stock cache of a model into bytes, a *blob*, and a blob into a stock cache.

    Keys are rotated back by their positions, 0, 1, … in every sequence; the plan's prediction from
    lower layers is subtracted from keys and values, the residual transformed and rounded, and the
    symbols are entropy-coded with the tables of the plan. A decoded cache is a `DynamicCache` with
    the errors of the rounding, ready for any attention; the plan's sink tokens are exact. Tokens
    lie in blocks of at most 256, each with a checksum, which are coded on as many threads as torch
    has. Caches in 16 bits are coded with products in bfloat16 where the CPU has instructions for
    them, all others in float32, several times slower.

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
    """

    @in_own_modes
    def __init__(self, model: PreTrainedModel, plan: CompressionPlan) -> None:
        decoder = Decoder.of(model)
        plan.check_model(decoder)
        if plan.attended:
            raise PlanError(
                "the plan holds no tables of symbols: make one with compress(…, recipe='stored')"
            )
        self._decoder, self._plan = decoder, plan
        self._block_codec = BlockCodec(decoder, plan)

    @in_own_modes
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

    @in_own_modes
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

    @in_own_modes
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
        CodecError
            If the blob is damaged, or of another plan, model or format.
        CacheError
            If it holds fewer tokens.
        """
        header = self._header(blob)
        stop = self._stop(header, tokens)
        blocks = self._blocks(blob, header, stop)  # all checked before memory is taken
        shape, dtype = self._shape(header, stop), self._decoder.dtype
        made = [torch.empty(shape, dtype=dtype) for _ in self._plan.layers for _ in SITES]

        def decode(first: int) -> None:
            together = blocks[first : first + BLOCKS_AT_A_TIME]
            readers = [self._reader(block, header) for block in together]
            self._block_codec.decode(readers, header.dtype, made)

        _on_threads(decode, range(0, len(blocks), BLOCKS_AT_A_TIME))
        cache = DynamicCache(config=self._decoder.config)
        for layer, device, keys, values in zip(
            cache.layers, self._decoder.devices, made[::2], made[1::2], strict=True
        ):
            # `update` would copy all of it once more.
            layer.lazy_initialization(keys.to(device), values.to(device))
            layer.keys, layer.values = keys.to(device), values.to(device)
        return cache

    def tokens(self, blob: bytes) -> int:
        """Return how many tokens of each sequence a blob holds. Raises `CodecError` as `decode`."""
        return self._header(blob).tokens

    @in_own_modes
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
            raise CodecError("the stored cache is that of another model")
        if header.plan != bytes.fromhex(self._plan.digest()):
            raise CodecError("the stored cache was made with another plan for this model")
        return header

    def _blocks(self, blob: bytes, header: Header, stop: int) -> Sequence[Block]:
        token_bytes = self._block_codec.stock_bytes(1, 1, header.dtype)
        return list(read_blocks(blob, header, token_bytes, stop))

    def _reader(self, block: Block, header: Header) -> PayloadReader:
        count = block.stop - block.start
        stock = self._block_codec.stock_bytes(header.sequences, count, header.dtype)
        exact = self._block_codec.exact(block.start, block.stop)
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

        def block(start: int) -> Block:
            stop = min(start + BLOCK_TOKENS, header.tokens)
            ids = None if input_ids is None else input_ids[:, start:stop]
            return Block(start, stop, self._block_codec.encode(cache, ids, start, stop))

        return _on_threads(block, range(first, header.tokens, BLOCK_TOKENS))


def _on_threads(work: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """Return the results of some work for each item, on as many threads as torch has."""
    threads = torch.get_num_threads()
    if min(threads, len(items)) == 1:
        return [work(item) for item in items]
    try:
        # An operation of torch in one of these threads starts no threads of its own.
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, items))
    finally:
        torch.set_num_threads(threads)

"""Attention of a new token over packed latents, in one pass over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from manifoldkv.core.errors import CacheError
from manifoldkv.serve.kernels.decode import check_angles, held_scratch, in_parts, kernels
from manifoldkv.serve.kernels.tables import KeyTables, LatentTables
from manifoldkv.serve.kernels.views import Array, Packed, check_shape, flat_view


@dataclass(frozen=True, eq=False)
class Source:
    """A site whose latents keys or values of a layer depend on.

    Parameters
    ----------
    latents : LatentTables
        Of its r latents.
    matrix : Tensor or None
        Map of the latents to the predictions of keys, (p, r), float32.
    is_mixed : bool
        Whether values depend on the latents.
    """

    latents: LatentTables
    matrix: Tensor | None
    is_mixed: bool


@dataclass(frozen=True, eq=False)
class StepTables:
    """Tables of a layer.

    Parameters
    ----------
    keys : KeyTables
        Of its keys.
    sources : tuple of Source
        At most `most_sources()`.
    maps : Tensor
        Mean of the values, and map of the latents of all mixed sources, by head,
        (H_kv, 1 + r, d), float32.
    factors : Tensor
        1, and the latents of all mixed sources over the numbers read of them, (1 + r,), float32.
    """

    keys: KeyTables
    sources: tuple[Source, ...]
    maps: Tensor
    factors: Tensor

    @cached_property
    def uses(self) -> tuple[Array, ...]:
        """Return the tables of the sources as NumPy arrays, as `cpu.attend` takes them."""
        rows: list[list[int]] = []
        matrices = [np.empty(0, np.float32)]
        latent, element, column = 0, 0, 1
        for one in self.sources:
            count = len(one.latents.fields)
            row = [latent, count, -1, -1]
            if one.matrix is not None:
                row[2] = element
                matrices.append(one.matrix.flatten().numpy())
                element += one.matrix.numel()
            if one.is_mixed:
                row[3] = column
                column += count
            rows.append(row)
            latent += count
        tables = [one.latents for one in self.sources]
        return (
            np.array(rows, np.int64).reshape(-1, 4),
            np.concatenate([one.fields.numpy() for one in tables]),
            np.concatenate([one.centres.numpy() for one in tables]),
            np.concatenate(matrices),
        )

    @cached_property
    def scratch_rows(self) -> int:
        """Return the rows of a tile that do not depend on the number of queries."""
        most = max(len(one.latents.fields) for one in self.sources) + 1
        return self.keys.predictor.shape[1] + max(self.keys.scratch_rows, most)

    def multiplications(self, rows: int) -> int:
        """Return the multiplications per token of `attend` with some query rows per KV head."""
        heads = len(self.maps)
        total = self.keys.multiplications(rows)
        for one in self.sources:
            if one.matrix is not None:
                total += one.latents.projection_multiplications(len(one.matrix))
            if one.is_mixed:
                total += one.latents.multiplications(heads * rows)
        return total


def most_sources() -> int:
    """Return the largest number of sources."""
    return int(kernels().SOURCES)


@lru_cache(maxsize=8)
def _tiles_of(batch: int, tokens: int) -> Array:
    """Return the tiles of texts in a batch of latents."""
    size = kernels().TILE
    return np.array(
        [
            (text, text, start, min(size, tokens - start), start)
            for text in range(batch)
            for start in range(0, tokens, size)
        ],
        np.int64,
    ).reshape(-1, 5)


def attend(
    queries: Tensor,
    packed: Packed,
    sources: Sequence[Packed],
    tables: StepTables,
    cos: Tensor,
    sin: Tensor,
    sinks: tuple[Tensor, Tensor],
    tiles: Array | None = None,
) -> Tensor:
    """Return the attention output, (B, H_kv, R, d), float32.

    Parameters
    ----------
    queries : Tensor
        Scaled and rotated queries, (B, H_kv, R, d), float32, contiguous.
    packed : Packed
        Key latents of n tokens.
    sources : sequence of Packed
        Latents of the sources of `tables`.
    tables : StepTables
        Of the layer.
    cos, sin : Tensor
        Angles of the tokens, (1 or B, n, rotary dimension), float32.
    sinks : tuple of Tensor
        Rotated keys and values of further tokens, (B, H_kv, s, d) each, float32, contiguous.
    tiles : ndarray, optional
        Tokens of every text, as in `cpu.attend`; all those of `packed`, whose batch is that of
        the queries, if omitted.
    """
    batch, heads, rows, head_dim = queries.shape
    count, keys = heads * rows, tables.keys
    _check(queries, packed, sources, tables, sinks)
    if tiles is None:
        packed.check(batch, 0)
        check_angles(cos, sin, keys, batch, packed.tokens)
        tiles = _tiles_of(batch, packed.tokens)
    else:
        check_angles(cos, sin, keys, batch, _check_tiles(tiles, batch, packed))
    views = [one[:2] for one in sources]
    views += [packed[:2]] * (most_sources() - len(views))
    of_queries = queries.numpy()
    arguments = (
        of_queries,
        (*packed[:2], *keys.latents.arrays),
        keys.arrays,
        tuple(views),
        tables.uses,
        flat_view(cos.mT),
        flat_view(sin.mT),
        np.arange(max(len(keys.mean), count)),
        tiles,
    )
    scratch_rows = 2 * count + 5 + tables.scratch_rows
    parts: list[tuple[Array, Array]] = []

    def add(first: int, stop: int) -> None:
        mixed = np.zeros((batch, count, tables.maps.shape[1]), np.float32)
        largest = np.full((batch, count), -np.inf, np.float32)
        scratch = held_scratch(scratch_rows, count * head_dim)
        kernels().attend(*arguments, scratch, mixed, largest, first, stop)
        parts.append((mixed, largest))

    in_parts(len(tiles), add, int(tiles[:, 3].sum()))
    out = torch.empty_like(queries)
    mixed, largest = (np.stack(x) for x in zip(*parts, strict=True))
    mixed *= tables.factors.numpy()
    kernels().finish(
        mixed, largest, of_queries, *(x.numpy() for x in sinks), tables.maps.numpy(), out.numpy()
    )
    return out


def _check(
    queries: Tensor,
    packed: Packed,
    sources: Sequence[Packed],
    tables: StepTables,
    sinks: tuple[Tensor, Tensor],
) -> None:
    """Raise `CacheError` unless the operands of `attend` fit each other."""
    batch, heads, _, head_dim = queries.shape
    check_shape("queries", queries.shape[1::2], *tables.keys.order.shape)
    for x in sinks:
        check_shape("sink tokens", x.shape, batch, heads, sinks[0].shape[2], head_dim)
    packed.check(packed.batch, tables.keys.latents.nbytes)
    if len(sources) != len(tables.sources):
        raise CacheError(f"{len(sources)} sources of latents, must be {len(tables.sources)}")
    for one, source in zip(sources, tables.sources, strict=True):
        one.check(packed.batch, source.latents.nbytes)
        if one.tokens != packed.tokens:
            raise CacheError(f"keys of {packed.tokens} tokens, a source of {one.tokens}")


def _check_tiles(tiles: Array, batch: int, packed: Packed) -> int:
    """Return the tokens that angles are needed of.

    Raises
    ------
    CacheError
        If a tile is not one of the texts and of the packed latents.
    """
    if not len(tiles):
        return 0
    text, index, _, tokens, _ = tiles.max(axis=0).tolist()
    end, place = (tiles[:, 2::2] + tiles[:, 3:4]).max(axis=0).tolist()
    limits = batch - 1, packed.batch - 1, kernels().TILE, packed.tokens
    beyond = [x > y for x, y in zip((text, index, tokens, end), limits, strict=True)]
    if tiles.min() < 0 or any(beyond):
        raise CacheError(
            f"tiles of {text + 1} texts in {index + 1} rows of {end} packed tokens, where there "
            f"are {batch} texts and {packed.batch} rows of {packed.tokens}"
        )
    return int(place)

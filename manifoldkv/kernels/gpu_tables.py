"""Tables of a site, prepared once for the Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import block_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn import functional

from manifoldkv.coding.trellis import STATES
from manifoldkv.kernels.tables import LatentTables
from manifoldkv.kernels.views import check_shape

FEATURES = 32
"""Features of a tile of keys."""


@dataclass(frozen=True)
class Latents:
    """Tables of the stored latents of a site.

    Parameters
    ----------
    fields : Tensor
        Byte, right shift, left shift and mask of every bit field, in 16, 3, 3 and 8 bits from the
        lowest on, (r, fields), int32. Missing fields have mask 0. Of trellis-coded latents first
        byte, right shift and bits beyond the end of the stream, in 16, 4 and 4 bits, then
        multiplier and offset (`coding.trellis.Code`), (r, 3).
    centres : Tensor
        Codes whose latent is 0, (r,), float32; of trellis-coded latents the units of their codes.
    depth : int
        Number of fields; 0 for trellis-coded latents.
    last : int
        Last byte of a stream of trellis-coded latents.
    nbytes : int
        Number of first bytes of a token that latents are read from.
    """

    fields: Tensor
    centres: Tensor
    depth: int
    last: int
    nbytes: int

    def check(self, codes: Tensor, batch: int, tokens: int) -> None:
        """Raise `CacheError` unless packed latents are (batch, 1, `nbytes` or more, tokens)."""
        size = max(codes.shape[2], self.nbytes)
        check_shape("packed latents", codes.shape, batch, 1, size, tokens)


def tabulate_latents(tables: LatentTables, device: torch.device) -> Latents:
    """Return the tables of a site on a GPU."""
    fields, last = tables.fields, 0
    if tables.is_trellis:
        last = tables.nbytes - 1
        words = fields[:, 0, 0] | fields[:, 0, 3] << 16 | _beyond(fields[:, 1, 0]) << 20
        flat = torch.stack([words, *fields[:, 1, 1:3].unbind(1)], dim=1)
        unsigned = flat.numpy().astype(np.uint32)  # as multipliers and offsets are
        words, depth = torch.from_numpy(unsigned.view(np.int32)), 0
    else:
        depth = int((fields[..., 2] > 0).any(dim=0).sum())  # without fields that no latent has
        byte, right, mask, left = fields[:, :depth].unbind(2)
        words = (byte | right << 16 | left << 19 | mask << 22).to(torch.int32)
    centres = tables.centres.to(device)
    return Latents(words.to(device).contiguous(), centres, depth, last, tables.nbytes)


def _beyond(masks: Tensor) -> Tensor:
    """Return the number of lowest bits that are 0 in masks of states."""
    return (STATES - masks).float().log2().long()


@dataclass(frozen=True)
class Keys:
    """Tables of the keys of a layer, cut into tiles of features.

    Parameters
    ----------
    latents : Latents
        Stored latents.
    partner, sign : Tensor
        Partners of the features of a head, int32, and the signs of the partners' sines, float32,
        (d,).
    cosines, sines : Tensor
        Angles that multiply the features of a head, (d,), int32; -1 if they are not rotated.
    tiles : Tensor
        First entry in `columns`, number of columns and first entry in `up` of every tile,
        (tiles, 3), int32.
    columns, features : Tensor
        Latents of the tiles, and features, (tiles, size), padded with -1, int32.
    up, mean, prediction : Tensor
        Rows of the features, (size, columns) for each tile, (tiles, size) and (tiles, size, p),
        float32.
    width, angles : int
        Number of features, D, and of first angles that they are rotated by.
    """

    latents: Latents
    partner: Tensor
    sign: Tensor
    cosines: Tensor
    sines: Tensor
    tiles: Tensor
    columns: Tensor
    features: Tensor
    up: Tensor
    mean: Tensor
    prediction: Tensor
    width: int
    angles: int


def tabulate_keys(
    latents: Latents,
    up: Tensor,
    mean: Tensor,
    partner: Tensor,
    sign: Tensor,
    angle: Tensor,
    prediction: Tensor | None = None,
) -> Keys:
    """Return the tables of keys ``up z + mean + prediction p``.

    Parameters
    ----------
    latents : Latents
        The r stored latents.
    up : Tensor
        Up-projection times the factors of the latents, (D, r), float32. Blocks that share no
        latent are multiplied without the zeros between them.
    mean : Tensor
        (D,), float32.
    partner, sign, angle : Tensor
        Feature f of a head is rotated to ``x[f] cos[angle[f]] + sign[f] x[partner[f]]
        sin[angle[f]]``, (d,) each; partners are each other's, and features of sign 0 are not
        rotated.
    prediction : Tensor, optional
        (D, p), float32.
    """
    partner, sign = partner.to(up.device), sign.to(up)
    angle = angle.to(up.device, torch.int32).where(sign != 0, -1)
    parts = list(_tiles(up.ne(0).cpu(), FEATURES))
    features = torch.full((len(parts), FEATURES), -1, device=up.device)  # the zeros below
    for tile, (rows, _) in zip(features, parts, strict=True):
        tile[: len(rows)] = rows
    padded = functional.pad(up, (0, 0, 0, 1))
    blocks = [padded[row][:, c].flatten() for row, (_, c) in zip(features, parts, strict=True)]
    widths = torch.tensor([len(columns) for _, columns in parts])
    starts = widths.cumsum(0) - widths
    prediction = up[:, :0] if prediction is None else prediction
    return Keys(
        latents,
        partner.to(torch.int32),
        sign[partner],
        angle,
        angle[partner],
        torch.stack([starts, widths, FEATURES * starts], dim=1).to(up.device, torch.int32),
        torch.cat([columns for _, columns in parts]).to(up.device, torch.int32),
        features.to(torch.int32),
        torch.cat(blocks),
        functional.pad(mean, (0, 1))[features],
        functional.pad(prediction, (0, 0, 0, 1))[features],
        len(up),
        int(angle.max()) + 1,
    )


def _tiles(pattern: Tensor, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows, at most `most`, and columns of blocks of a pattern (D, r); small ones share."""
    entries = pattern.int().numpy()
    graph = block_array([[None, entries], [entries.T, None]])
    labels = torch.from_numpy(connected_components(graph)[1])
    row_labels, column_labels = labels.split(pattern.shape)
    rows, columns = labels[:0].long(), labels[:0].long()
    for label in row_labels.unique():
        block = (column_labels == label).nonzero().flatten()
        for part in (row_labels == label).nonzero().flatten().split(most):
            if len(rows) + len(part) > most:
                yield rows, columns
                rows, columns = rows[:0], columns[:0]
            rows, columns = torch.cat([rows, part]), torch.cat([columns, block])
    yield rows, columns

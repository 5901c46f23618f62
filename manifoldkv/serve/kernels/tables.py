"""Tables of a site, prepared once: positions of bits, and its matrices in the order of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from manifoldkv.models.rotation import Rotation
from manifoldkv.plan.formats.mixed import MixedWidths
from manifoldkv.serve.kernels.views import Array

GROUP_ROWS = 64
"""Features that are rebuilt and scored together, at least: loops over fewer are slow."""


@dataclass(frozen=True, eq=False)
class LatentTables:
    """Positions and centres of the integers of a site's stored latents.

    A latent is its token's scale times the difference of its integer and its centre, or times its
    codeword if it is trellis-coded.

    Parameters
    ----------
    fields : Tensor
        `BitPlanes.fields`, (r, 4, 4), int64. Of a trellis-coded latent three bytes and a shift,
        then a mask (`state_fields`), a multiplier and an offset (`Code`); the first of the last
        four is 1.
    centres : Tensor
        Half the range of every integer less 1/2, (r,), float32; of a trellis-coded latent the unit
        of its code.
    """

    fields: Tensor
    centres: Tensor

    @classmethod
    def of_quantizer(cls, quantizer: MixedWidths) -> LatentTables:
        """Return the tables of the stored latents of a site, made once for every quantizer."""
        tables = _OF_QUANTIZERS.get(quantizer)
        if tables is None:
            tables = _OF_QUANTIZERS[quantizer] = cls(*quantizer.layout())
        return tables

    @property
    def is_trellis(self) -> bool:
        """Return whether the latents are trellis-coded."""
        return bool(self.fields[:, 3, 0].any())

    @cached_property
    def nbytes(self) -> int:
        """Return the number of first bytes of a token that latents are read from."""
        places = self.fields[:, 0, :3] if self.is_trellis else self.fields[..., 0]
        return int(places.max()) + 1 if len(places) else 0

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """Return the tensors as NumPy arrays."""
        return self.fields.numpy(), self.centres.numpy()

    def multiplications(self, rows: int) -> int:
        """Return the multiplications per token of `mix` with some rows of weights."""
        return rows * (1 + len(self.fields))  # weights are multiplied by scales

    def projection_multiplications(self, rows: int) -> int:
        """Return the multiplications per token of `project` with a matrix of some rows."""
        return (rows + 1) * len(self.fields)


_OF_QUANTIZERS = WeakIdKeyDictionary()
"""`LatentTables` by quantizer, as long as it exists."""


@dataclass(frozen=True, eq=False)
class KeyTables:
    """Tables of a site whose keys are rebuilt, rotated and scored.

    Keys are rebuilt by group: features of all heads that no latent and no rotation links to others.
    A slot is the index of a feature in its group. `mean` and `predictor` are by group and slot,
    `latents` by block.

    Parameters
    ----------
    latents : LatentTables
        Of the latents that some key depends on.
    groups : Tensor
        First block, feature, segment and pair of every group, and their numbers in a last row,
        (groups + 1, 4), int64.
    blocks : Tensor
        First of `slots`, number of features, first latent, number of latents and first of
        `weights`, (blocks, 5), int64.
    slots : Tensor
        Slots of the features of every block, int64.
    weights : Tensor
        Entries of every block, feature by feature, float32.
    segments : Tensor
        Features of one head in a group: head, first in its `order`, first slot and number,
        (segments, 4), int64.
    pairs : Tensor
        Two slots that are rotated together and their angles, (pairs, 4), int64.
    mean : Tensor
        Of the keys, (D,), float32.
    predictor : Tensor
        Matrix of the prediction, (D, p), float32.
    order : Tensor
        Features of every head by group, (H_kv, d), int64.
    """

    latents: LatentTables
    groups: Tensor
    blocks: Tensor
    slots: Tensor
    weights: Tensor
    segments: Tensor
    pairs: Tensor
    mean: Tensor
    predictor: Tensor
    order: Tensor

    @classmethod
    def of(
        cls,
        latents: LatentTables,
        up: Tensor,
        mean: Tensor,
        heads: int,
        rotation: Rotation,
        predictor: Tensor | None = None,
    ) -> KeyTables:
        """Return the tables of a site.

        Parameters
        ----------
        latents : LatentTables
            Of the r stored latents.
        up : Tensor
            Up-projection times steps and gains, (D, r). Blocks are the connected components of its
            nonzero entries.
        mean : Tensor
            Of the keys, (D,).
        heads : int
            KV heads.
        rotation : Rotation
            Of the features of a head.
        predictor : Tensor or None
            Matrix of the prediction, (D, p).
        """
        up, mean = up.detach().cpu().float(), mean.detach().cpu().float()
        predictor = up[:, :0] if predictor is None else predictor.detach().cpu().float()
        head_dim = len(mean) // heads
        shift = torch.tensor([head_dim, head_dim, 0, 0])
        planes = torch.cat([rotation.pairs() + head * shift for head in range(heads)])
        builder = _Builder(up, planes, head_dim)
        for group in _groups(up, planes):
            builder.append(group)
        return builder.tables(latents, mean, predictor)

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """Return the tensors from `groups` on as NumPy arrays."""
        tensors = (self.groups, self.blocks, self.slots, self.weights, self.segments, self.pairs)
        return tuple(x.numpy() for x in (*tensors, self.mean, self.predictor, self.order))

    @cached_property
    def angles(self) -> int:
        """Return the number of first angles that keys are rotated by."""
        return int(self.pairs[:, 2:].max()) + 1 if len(self.pairs) else 0

    @cached_property
    def scratch_rows(self) -> int:
        """Return the rows of a tile: keys, scales, and latents or predictions."""
        return len(self.mean) + 1 + max(1, self.predictor.shape[1], *self.blocks[:, 3].tolist())

    def multiplications(self, rows: int) -> int:
        """Return the multiplications per token of `scores` with some query rows per KV head."""
        rebuilt = len(self.latents.fields) + len(self.weights) + self.predictor.numel()
        return rebuilt + 4 * len(self.pairs) + rows * len(self.mean)


class _Builder:
    """Tables of keys, group by group."""

    def __init__(self, up: Tensor, planes: Tensor, head_dim: int) -> None:
        self._up = up
        self._planes = planes.tolist()
        self._head_dim = head_dim
        self._scored = [0] * (len(up) // head_dim)  # features of every head so far
        self._features: list[int] = []
        self._latents: list[int] = []
        self._slots: list[int] = []
        self._weights: list[float] = []
        self._starts: list[tuple[int, ...]] = []
        self._blocks: list[tuple[int, ...]] = []
        self._segments: list[tuple[int, ...]] = []
        self._pairs: list[tuple[int, ...]] = []

    def append(self, group: list[int]) -> None:
        """Append a group of features, in ascending order."""
        self._starts.append(self._ends())
        self._features += group
        self._append_blocks(self._up[group])
        slots = {feature: slot for slot, feature in enumerate(group)}
        for head, features in groupby(group, lambda feature: feature // self._head_dim):
            run = list(features)
            self._segments.append((head, self._scored[head], slots[run[0]], len(run)))
            self._scored[head] += len(run)
        for x, y, *angles in self._planes:
            if x in slots:
                self._pairs.append((slots[x], slots[y], *angles))

    def _append_blocks(self, up: Tensor) -> None:
        of_rows, of_columns = _components(up)
        for label in sorted(set(of_rows) & set(of_columns)):
            rows = [slot for slot, other in enumerate(of_rows) if other == label]
            columns = [latent for latent, other in enumerate(of_columns) if other == label]
            row, latent, weight = len(self._slots), len(self._latents), len(self._weights)
            self._blocks.append((row, len(rows), latent, len(columns), weight))
            self._slots += rows
            self._latents += columns
            self._weights += up[rows][:, columns].flatten().tolist()

    def _ends(self) -> tuple[int, ...]:
        return len(self._blocks), len(self._features), len(self._segments), len(self._pairs)

    def tables(self, latents: LatentTables, mean: Tensor, predictor: Tensor) -> KeyTables:
        features, used = _integers(self._features), _integers(self._latents)
        by_head = features[(features // self._head_dim).argsort(stable=True)]
        return KeyTables(
            latents=replace(latents, fields=latents.fields[used], centres=latents.centres[used]),
            groups=_integers([*self._starts, self._ends()], 4),
            blocks=_integers(self._blocks, 5),
            slots=_integers(self._slots),
            weights=torch.tensor(self._weights, dtype=torch.float32),
            segments=_integers(self._segments, 4),
            pairs=_integers(self._pairs, 4),
            mean=mean[features],
            predictor=predictor[features],
            order=by_head.view(-1, self._head_dim) % self._head_dim,
        )


def _integers(rows: Sequence[object], *width: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(-1, *width)


def _components(up: Tensor, planes: Tensor | None = None) -> tuple[list[int], list[int]]:
    """Return labels of features and of latents, equal if linked by an entry or by a rotation."""
    features, latents = up.shape
    row, column = up.nonzero(as_tuple=True)
    column = column + features
    if planes is not None:
        row, column = torch.cat([row, planes[:, 0]]), torch.cat([column, planes[:, 1]])
    size = features + latents
    links = coo_array((torch.ones(len(row)), (row, column)), shape=(size, size))
    labels = connected_components(links, directed=False)[1].tolist()
    return labels[:features], labels[features:]


def _groups(up: Tensor, planes: Tensor) -> list[list[int]]:
    """Return sets of features that neither latents nor rotation link, of `GROUP_ROWS` or more."""
    closed: dict[int, list[int]] = {}
    for feature, label in enumerate(_components(up, planes)[0]):
        closed.setdefault(label, []).append(feature)
    groups: list[list[int]] = []
    for features in closed.values():
        if groups and len(groups[-1]) < GROUP_ROWS:
            groups[-1] = sorted(groups[-1] + features)
        else:
            groups.append(features)
    return groups

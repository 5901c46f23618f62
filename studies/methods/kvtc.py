"""KVTC: one principal basis of all layers and heads, bits by group, DEFLATE (2511.01815)."""

from __future__ import annotations

import zlib
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manifoldkv.coding.integers import integers, offset_and_scale
from manifoldkv.coding.quantizer import SCALE_BYTES
from methods.base import Setting, register_method
from methods.windows import WindowMethod, calibration_of

WIDTHS, SIZES = (2, 4, 8), (1, 16, 64, 256, 1024)
"""Bits of a coordinate beside 0, and coordinates of a group."""
ALIGNED = 16
"""Groups of more than one coordinate begin at multiples of it."""
RANGE_BITS = 16 * SCALE_BYTES
"""Bits of the offset and the scale of a group of a token."""
SAMPLE = 512
"""Calibration tokens that distortions are measured on."""


class Group(NamedTuple):
    """Neighbouring coordinates that share bits, and a range for each token."""

    start: int
    stop: int
    bits: int

    @property
    def cost(self) -> int:
        """Return the bits of a token before DEFLATE."""
        return (self.stop - self.start) * self.bits + RANGE_BITS if self.bits else 0


class Principal(NamedTuple):
    """Principal axes of the keys or values of a token in all layers and heads, p features.

    Mean (p,), axes (p, p) by falling variance, calibration coordinates (tokens, p), and the mean
    squared error of every group that may be chosen.
    """

    mean: Tensor
    axes: Tensor
    coordinates: Tensor
    errors: dict[Group, float]

    @classmethod
    def of(cls, x: Tensor) -> Principal:
        """Return those of features (tokens, p)."""
        mean = x.mean(dim=0)
        axes = torch.linalg.eigh((x - mean).mT @ (x - mean) / len(x)).eigenvectors.flip(1)
        coordinates = (x - mean) @ axes
        sample = coordinates[:: max(1, len(x) // SAMPLE)]
        groups = {
            Group(start, min(start + size, x.shape[1]), bits)
            for size in SIZES
            for start in range(0, x.shape[1], min(size, ALIGNED))
            for bits in (0, *WIDTHS)
        }
        errors = {group: float(error_of(sample, group)) for group in sorted(groups)}
        return cls(mean, axes, coordinates, errors)


def codes_of(coordinates: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (n, size), uint8, and offset and scale (n, 1), float16, of a group."""
    own = coordinates[:, group.start : group.stop].float()
    offset, scale = offset_and_scale(torch.stack(own.aminmax(dim=1), dim=1), group.bits)
    offset, scale = offset.half().unsqueeze(1), scale.half().unsqueeze(1)
    return integers(own, offset, scale, group.bits).to(torch.uint8), offset, scale


def decoded(codes: Tensor, offset: Tensor, scale: Tensor) -> Tensor:
    """Return the coordinates (n, size), float32, of the codes of a group."""
    return codes.float() * scale.float() + offset.float()


def error_of(coordinates: Tensor, group: Group) -> Tensor:
    """Return the mean over tokens of the squared error of a group."""
    own = coordinates[:, group.start : group.stop]
    held = decoded(*codes_of(coordinates, group)) if group.bits else torch.zeros_like(own)
    return (held - own).square().sum(dim=1).mean()


def allocated(errors: dict[Group, float], size: int, bits: int) -> list[Group]:
    """Return the groups of least error that cover all coordinates within the bits of a token.

    Dynamic programming over coordinates and bits: ``least[stop][b]`` is the least error of the
    coordinates before `stop` in at most 2 b bits, since all costs are even.
    """
    budget = bits // 2
    least = np.full((size + 1, budget + 1), np.inf, dtype=np.float32)
    least[0] = 0
    by_stop: dict[int, list[Group]] = {}
    for group in errors:
        by_stop.setdefault(group.stop, []).append(group)
    chosen: NDArray[np.uint16] = np.zeros((size + 1, budget + 1), dtype=np.uint16)
    for stop in range(1, size + 1):
        for index, group in enumerate(by_stop[stop]):
            cost = group.cost // 2
            if cost > budget:
                continue
            error = least[group.start, : budget + 1 - cost] + errors[group]
            better = error < least[stop, cost:]
            least[stop, cost:][better] = error[better]
            chosen[stop, cost:][better] = index
    groups, stop = [], size
    while stop:
        group = by_stop[stop][chosen[stop, budget]]
        groups.append(group)
        stop, budget = group.start, budget - group.cost // 2
    return groups[::-1]


@lru_cache(maxsize=1)
def principal_of(setting: Setting) -> tuple[Principal, Principal]:
    """Return the principal axes of keys before rotation and of values of the calibration text."""
    keys, values = (joined(x).flatten(0, 1).float() for x in calibration_of(setting))
    return Principal.of(keys), Principal.of(values)


def joined(x: Tensor) -> Tensor:
    """Return x (layers, B, n, F) with all features of a token side by side, (B, n, p)."""
    return x.permute(1, 2, 0, 3).flatten(2)


@register_method("kvtc")
class KVTC(WindowMethod):
    """KVTC: one PCA of all layers and heads, bits {0, 2, 4, 8} by group, DEFLATE of the codes.

    Staniszewski and Łańcucki, arXiv:2511.01815, a format of stored caches. Keys before rotation,
    and values, each have one principal basis of all layers and heads. Groups of 1 to 1,024
    neighbouring coordinates have a width, and for every token an offset and a scale in 16 bits; the
    grouping of least squared error within a budget is found by dynamic programming on calibration
    coordinates. Bytes are those of DEFLATE (zlib, level 9) on the packed codes and ranges of as
    many calibration tokens, and widths are chosen so that these meet the ratio. Differs from the
    paper: eight bits are integers, not float8; large groups begin at multiples of `ALIGNED`; the
    basis is found by an eigendecomposition instead of a randomized SVD.
    """

    def coded_bytes(self, tokens: int) -> int:
        return self._deflated(self.groups, tokens)

    def facts(self) -> dict[str, float]:
        elements = sum(x.mean.numel() + x.axes.numel() for x in principal_of(self.setting))
        return super().facts() | {"basis_bytes": 2 * elements}

    @cached_property
    def groups(self) -> list[list[Group]]:
        """The groups of keys and of values, of the most bits whose DEFLATE meets the ratio."""
        tokens, left = self.budget()
        bits = 4 * left / tokens  # of keys, and of values
        spent = self._deflated(self._allocated(bits), tokens)
        while True:
            bits *= left / spent * (1 if spent < left else 0.995)
            groups = self._allocated(bits)
            spent = self._deflated(groups, tokens)
            if spent <= left:
                return groups

    def _allocated(self, bits: float) -> list[list[Group]]:
        size = self.setting.layers * self.setting.features
        sites = principal_of(self.setting)
        return [allocated(site.errors, size, int(bits)) for site in sites]

    def _deflated(self, groups: list[list[Group]], tokens: int) -> int:
        """Return the bytes of as many calibration tokens, in proportion if there are fewer."""
        sites = principal_of(self.setting)
        pairs = zip(sites, groups, strict=True)
        blob = b"".join(stored(site.coordinates[:tokens], own) for site, own in pairs)
        return -(-len(zlib.compress(blob, 9)) * tokens // min(tokens, len(sites[0].coordinates)))

    def reconstruct(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        sites = zip((keys, values), principal_of(self.setting), self.groups, strict=True)
        held = [self._of_site(*site) for site in sites]
        return held[0], held[1]

    def _of_site(self, x: Tensor, site: Principal, groups: list[Group]) -> Tensor:
        layers, batch, tokens, _ = x.shape
        stop = max((group.stop for group in groups if group.bits), default=0)
        axes = site.axes[:, :stop]
        coordinates = (joined(x).flatten(0, 1).float() - site.mean) @ axes
        held = torch.zeros_like(coordinates)
        for group in groups:
            if group.bits:
                held[:, group.start : group.stop] = decoded(*codes_of(coordinates, group))
        features = site.mean + held @ axes.mT
        return features.view(batch, tokens, layers, -1).permute(2, 0, 1, 3).to(x.dtype)


def stored(coordinates: Tensor, groups: list[Group]) -> bytes:
    """Return the ranges and the packed codes of tokens (n, p), group after group."""
    parts = []
    for group in groups:
        if group.bits:
            codes, *ranges = codes_of(coordinates, group)
            parts += [x.numpy().tobytes() for x in ranges]
            bits = np.unpackbits(codes.numpy()[..., None], axis=-1)[..., -group.bits :]
            parts.append(np.packbits(bits.reshape(len(codes), -1), axis=-1).tobytes())
    return b"".join(parts)

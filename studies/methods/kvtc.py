"""KVTC: one principal basis of all layers and heads, bits by group, DEFLATE (2511.01815)."""

from __future__ import annotations

import zlib
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from methods.base import Setting, register_method
from methods.groups import Group, allocated, codes_of, decoded, measured, stored
from methods.windows import WindowMethod, calibration_of

SAMPLE = 512
"""Calibration tokens that distortions are measured on."""


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
        return cls(mean, axes, coordinates, measured(sample))


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
    paper: eight bits are integers, not float8; groups of more than one coordinate begin at
    multiples of 16; the basis is found by an eigendecomposition instead of a randomized SVD.
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

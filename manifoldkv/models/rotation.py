"""Rotations of keys as pairs of features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotation in planes of two features of a head, which kernels compute by themselves.

    Feature f of x is ``x[f] * cos[angle[f]] + sign[f] * x[partner[f]] * sin[angle[f]]``, where cos
    and sin are those of the token, (rotary dimension,).

    Parameters
    ----------
    partner : Tensor
        Other feature of the plane, (d,), int64; the feature itself if it is not rotated.
    sign : Tensor
        1 or -1, (d,), int64; 0 for features that are not rotated.
    angle : Tensor
        Index of the angle, (d,), int64; 0 for features that are not rotated.
    """

    partner: Tensor
    sign: Tensor
    angle: Tensor

    @property
    def rotary_dim(self) -> int:
        """Return the number of features of a head that are rotated."""
        return int(self.sign.count_nonzero())

    def frequencies(self) -> list[int]:
        """Return the index of the frequency of every feature, (d,).

        Features that are not rotated are grouped in twos after all others.
        """
        pairs = {(min(pair), max(pair)) for pair in enumerate(self.partner.tolist())}
        rotated = sorted(pair for pair in pairs if pair[0] < pair[1])
        frequency = {feature: index for index, pair in enumerate(rotated) for feature in pair}
        others = sorted(first for first, second in pairs if first == second)
        frequency |= {x: len(rotated) + place // 2 for place, x in enumerate(others)}
        return [frequency[feature] for feature in range(len(self.partner))]

    def pairs(self) -> Tensor:
        """Return the planes (pairs, 4), int64: features of sign -1 and 1 and their two angles."""
        first = (self.sign < 0).nonzero().squeeze(1)
        second = self.partner[first]
        return torch.stack([first, second, self.angle[first], self.angle[second]], dim=1)

    @classmethod
    def of(
        cls, rotate: Callable[[Tensor, Tensor, Tensor], Tensor], head_dim: int, rotary_dim: int
    ) -> Rotation | None:
        """Return the rotation that a function computes, or None if it has another form.

        Parameters
        ----------
        rotate : callable
            Function of x (B, H, n, d), cos and sin (B, n, rotary dimension).
        head_dim : int
            Features of a head, d.
        rotary_dim : int
            Angles of a token.
        """
        generator = torch.Generator().manual_seed(0)
        # Unit vectors as tokens. Every angle has a cos and a sin of its own.
        units = torch.eye(head_dim, dtype=torch.float64).view(1, 1, head_dim, head_dim)
        cos = 2 + torch.rand(1, 1, rotary_dim, generator=generator, dtype=torch.float64)
        sin = 4 + torch.rand(1, 1, rotary_dim, generator=generator, dtype=torch.float64)
        repeated = cos.expand(-1, head_dim, -1), sin.expand(-1, head_dim, -1)
        try:
            matrix = rotate(units, *repeated)[0, 0].mT  # (d, d): row f has feature f's weights
        except RuntimeError:  # the layer rotates some features that it cuts out itself
            return None
        own, others = matrix.diagonal(), matrix - matrix.diagonal().diag()
        partner = others.abs().argmax(dim=1)
        weight = others.gather(1, partner.unsqueeze(1)).squeeze(1)
        found = cls(
            torch.where(weight == 0, torch.arange(head_dim), partner),
            weight.sign().long(),
            (own.unsqueeze(1) - cos.view(1, -1)).abs().argmin(dim=1) * (weight != 0),
        )
        expected = found.matrix(cos[0, 0], sin[0, 0])
        back = torch.equal(found.partner[found.partner], torch.arange(head_dim))
        opposite = torch.equal(found.sign[found.partner], -found.sign)
        return found if back and opposite and torch.equal(matrix, expected) else None

    def matrix(self, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the rotation of one token, (d, d); cos and sin are (rotary dimension,)."""
        rotated = self.sign != 0
        own = torch.where(rotated, cos[self.angle], 1)
        other = self.sign * sin[self.angle]
        return own.diag() + torch.zeros_like(own.diag()).scatter(
            1, self.partner.unsqueeze(1), other.unsqueeze(1)
        )

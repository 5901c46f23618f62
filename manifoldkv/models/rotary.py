"""Rotation of keys that are stored before rotation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from inspect import signature

import torch
from torch import Tensor, nn

from manifoldkv.errors import ModelError
from manifoldkv.models.interface import Rotate, rotation_of
from manifoldkv.models.support import attention_of


@dataclass(frozen=True)
class Angles:
    """Angles of the tokens of a layer, (B or 1, n, rotary dimension), and the layer's rotation."""

    cos: Tensor
    sin: Tensor
    rotate: Rotate

    def tile(self, keys: Tensor, start: int, stop: int) -> Tensor:
        """Rotate the keys (B, H_kv, stop - start, d) of consecutive tokens."""
        return self.rotate(keys, self.cos[:, start:stop], self.sin[:, start:stop])

    def of_tokens(self, start: int, stop: int) -> Angles:
        """Return the angles of consecutive tokens."""
        return Angles(self.cos[:, start:stop], self.sin[:, start:stop], self.rotate)

    def of_slots(self, keys: Tensor, slots: Tensor) -> Tensor:
        """Rotate keys (B, H_kv, s, d) of the tokens `slots` of each row, (B, s), int64.

        Rotation is in the dtype of the angles, the result in that of the keys.
        """
        cos = self.cos.take_along_dim(slots.unsqueeze(2), dim=1)
        sin = self.sin.take_along_dim(slots.unsqueeze(2), dim=1)
        return self.rotate(keys.to(cos.dtype), cos, sin).to(keys.dtype)

    def inverse(self) -> Angles:
        """Return the inverse rotation, which also inverts any scale of cos and sin."""
        squares = self.cos**2 + self.sin**2
        return Angles(self.cos / squares, -self.sin / squares, self.rotate)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate features j and d/2 + j by one angle, as most models do; a fast `Rotate`."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1)
    out = torch.empty_like(x)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


def rotation_of_keys(layer: nn.Module, rotary_dim: int) -> Rotate:
    """Return the rotation of a layer: `rotate_halves` if the two agree on random keys."""
    rotate = rotation_of(layer)
    head_dim = attention_of(layer).head_dim
    if rotary_dim != head_dim or head_dim % 2:
        return rotate
    return rotate_halves if _rotates_halves(rotate, head_dim) else rotate


@cache
def _rotates_halves(rotate: Rotate, head_dim: int) -> bool:
    """Return whether a rotation and `rotate_halves` agree on random keys."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1, 2, 3, head_dim, generator=generator, dtype=torch.float64)
    angle = torch.rand(1, 3, head_dim // 2, generator=generator, dtype=torch.float64)
    angle = angle.repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    return torch.allclose(rotate(x, cos, sin), rotate_halves(x, cos, sin))


def rotary_embedding_of(decoder: nn.Module) -> nn.Module:
    """Return the module that computes the angles of a decoder; raise `ModelError` if missing."""
    embedding = getattr(decoder, "rotary_emb", None)
    if not isinstance(embedding, nn.Module):
        raise ModelError(
            f"{type(decoder).__name__} has no rotary_emb, which computes the angles of keys: it is "
            "not supported with keys stored before rotation, nor where codes of rotated keys are "
            "fitted"
        )
    return embedding


def angles_at(
    embedding: nn.Module, positions: Tensor, kind: str, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions, (B or 1, n, rotary dimension).

    Parameters
    ----------
    embedding : nn.Module
        Rotary embedding of the decoder.
    positions : Tensor
        Positions of tokens, (B or 1, n), int64.
    kind : str
        Kind of the layer; Gemma 3 has different angles for each.
    like : Tensor
        Tensor of the dtype and the device of the angles.
    """
    by_kind = "layer_type" in signature(embedding.forward).parameters
    # Not the module itself, whose hooks would record a call of the model.
    return embedding.forward(like, positions, *([kind] if by_kind else []))

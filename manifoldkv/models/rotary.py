"""How keys are rotated that are stored before rotation."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature

import torch
from torch import Tensor, nn

from manifoldkv.errors import ModelError
from manifoldkv.models.interface import Rotate, rotation_of
from manifoldkv.models.support import attention_of


@dataclass(frozen=True)
class Angles:
    """Rotation of the keys a layer attends to.

    Parameters
    ----------
    cos, sin : Tensor
        (B or 1, n, rotary dimension)
    rotate : Rotate
        How they are applied.
    """

    cos: Tensor
    sin: Tensor
    rotate: Rotate

    def tile(self, keys: Tensor, start: int, stop: int) -> Tensor:
        """Rotate the keys (B, H_kv, stop - start, d) of some of the tokens."""
        return self.rotate(keys, self.cos[:, start:stop], self.sin[:, start:stop])

    def of_slots(self, keys: Tensor, slots: Tensor) -> Tensor:
        """Rotate keys (B, H_kv, s, d) of tokens that are others in every row, slots (B, s).

        Keys keep their dtype; they are rotated in that of the angles.
        """
        cos, sin = (x.take_along_dim(slots.unsqueeze(2), dim=1) for x in (self.cos, self.sin))
        return self.rotate(keys.to(cos.dtype), cos, sin).to(keys.dtype)

    def inverse(self) -> Angles:
        """Return the rotation that takes rotated keys back, and any scale of cos and sin out."""
        squares = self.cos**2 + self.sin**2
        return Angles(self.cos / squares, -self.sin / squares, self.rotate)


def tokens_last(x: Tensor) -> Tensor:
    """Return angles (B, n, rotary dimension) that lie in memory with their tokens last.

    So lie the keys that `RunningBasis.up_project` returns: rotation then runs over neighbours.
    """
    return x.mT.contiguous().mT


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first half of the features against the second, as most models do, in few passes.

    Parameters as those of `Rotate`, which it may stand in for where the two agree.
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1)
    out = torch.empty_like(x)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


def rotation_of_keys(layer: nn.Module, rotary_dim: int) -> Rotate:
    """Return `rotate_halves` if a layer rotates so, else its own rotation.

    Which of the two is tried out on random elements.
    """
    own = rotation_of(layer)
    head_dim = attention_of(layer).head_dim
    if rotary_dim != head_dim or head_dim % 2:
        return own
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1, 2, 3, head_dim, generator=generator, dtype=torch.float64)
    angle = torch.rand(1, 3, head_dim // 2, generator=generator, dtype=torch.float64)
    angle = angle.repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    halves = torch.allclose(own(x, cos, sin), rotate_halves(x, cos, sin))
    return rotate_halves if halves else own


def rotary_embedding_of(decoder: nn.Module) -> nn.Module:
    """Return the module that makes the angles of a decoder.

    Raises
    ------
    ModelError
        If it has none.
    """
    embedding = getattr(decoder, "rotary_emb", None)
    if not isinstance(embedding, nn.Module):
        raise ModelError(
            f"{type(decoder).__name__} has no rotary_emb, which is asked for the angles of keys: "
            "it is not supported with keys stored before rotation, nor where codes of rotated keys "
            "are to be fitted"
        )
    return embedding


def angles_at(
    embedding: nn.Module, positions: Tensor, kind: str, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (B or 1, n, rotary dimension), that a decoder makes for its layers.

    Parameters
    ----------
    embedding : nn.Module
        `rotary_embedding_of` the decoder.
    positions : Tensor
        (B or 1, n)
    kind : str
        Of the layers, where each has angles of its own (Gemma 3).
    like : Tensor
        In the dtype of the model and on the device of the layers.
    """
    by_kind = "layer_type" in signature(embedding.forward).parameters
    # Not the module itself, whose hooks take a call for one of the model.
    return embedding.forward(like, positions, *([kind] if by_kind else []))

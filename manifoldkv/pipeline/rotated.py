"""Rotated keys and their moments, at all positions that a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from manifoldkv.cache.rotation import angles_at, rotary_embedding_of, rotation_of_keys
from manifoldkv.layers.activations import LayerActivations
from manifoldkv.models.interface import rotation_of
from manifoldkv.models.support import attention_of, decoder_layers
from manifoldkv.ranks.fisher import LayerMoments, SiteMoments

POSITIONS_AT_ONCE = 8192


def rotated_moments(
    model: PreTrainedModel, moments: Sequence[LayerMoments], positions: Tensor
) -> list[LayerMoments]:
    """Return moments of keys rotated by the angles of some positions, averaged over these.

    Before rotation keys are distributed much alike at all positions; after it a sample of short
    texts shows them at its own positions only, and what is fitted to these fails further on. So
    with R_p the rotation at position p,

    - E[k kᵀ] becomes the mean of R_p E[k kᵀ] R_pᵀ, and E[k] that of R_p E[k];
    - E[g gᵀ] of their gradients becomes the mean of R_p⁻ᵀ E[g gᵀ] R_p⁻¹: R_p scales as well where
      a model scales its angles, as with YaRN.

    What is averaged over whole turns of a frequency commutes with its rotation, and so do the
    coordinates found of it; lower frequencies keep what hardly turns at these positions.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with rotary embeddings.
    moments : sequence of LayerMoments
        Of all its layers, keys before rotation. Values stay as they are.
    positions : Tensor
        (positions,), int64.

    Raises
    ------
    UnsupportedModelError
        If the model has no module that makes its angles.
    """
    kinds, _ = get_layer_types_and_kwargs(model.config.get_text_config())
    of_kinds = {
        kind: _Rotations.at(positions, model, layer, kind)
        for kind, layer in dict(zip(kinds, decoder_layers(model), strict=True)).items()
    }
    return [
        replace(of_layer, key=of_kinds[kind].of(of_layer.key))
        for of_layer, kind in zip(moments, kinds, strict=True)
    ]


def rotated_keys(
    model: PreTrainedModel, activations: LayerActivations, positions: Tensor
) -> Tensor:
    """Return the keys of a layer as if its tokens stood elsewhere, (S, H_kv, n, d).

    Parameters
    ----------
    model : PreTrainedModel
        Whose layer it is.
    activations : LayerActivations
        Of S sequences of n tokens.
    positions : Tensor
        Where they are to stand, (S, n), int64.

    Raises
    ------
    UnsupportedModelError
        If the model has no module that makes its angles.
    """
    kinds, _ = get_layer_types_and_kwargs(model.config.get_text_config())
    embedding = rotary_embedding_of(model.get_decoder())
    keys = activations.keys_in("pre")
    angles = angles_at(embedding, positions.to(keys.device), kinds[activations.layer], like=keys)
    return rotation_of(activations.module)(keys, *angles)


@dataclass(frozen=True)
class _Rotations:
    """Averages over rotations of a head: of R = diag(c) + diag(s) J and of R⁻ᵀ.

    Parameters
    ----------
    lift : Tensor
        The identity and J, which turns all frequencies by a right angle, (2, d, d), float64.
    mean : Tensor
        Of v, which is c and s, (2, d), float64.
    products, of_inverse : Tensor
        Of v vᵀ, and of the same for R⁻ᵀ, (2, d, 2, d), float64.
    """

    lift: Tensor
    mean: Tensor
    products: Tensor
    of_inverse: Tensor

    @classmethod
    def at(
        cls, positions: Tensor, model: PreTrainedModel, layer: nn.Module, kind: str
    ) -> _Rotations:
        """Average over the positions (positions,), of a layer that has angles of some kind."""
        head_dim = int(attention_of(layer).head_dim)
        lift = torch.eye(head_dim, dtype=torch.float64).repeat(2, 1, 1)
        mean = lift.new_zeros(2, head_dim)
        products, of_inverse = lift.new_zeros(2, 2, head_dim, 2, head_dim)
        embedding, like = rotary_embedding_of(model.get_decoder()), torch.zeros(1)
        for part in positions.split(POSITIONS_AT_ONCE):
            angles = angles_at(embedding, part[None].to(model.device), kind, like.to(model.device))
            cos, sin = (x.double().cpu() for x in angles)
            lift[1], both = _by_feature(layer, cos, sin, head_dim)
            mean += both.sum(dim=0)
            products += torch.einsum("nai,nbj->aibj", both, both)
            both = both / both.square().sum(dim=1, keepdim=True)
            of_inverse += torch.einsum("nai,nbj->aibj", both, both)
        return cls(lift, *(x / len(positions) for x in (mean, products, of_inverse)))

    def of(self, moments: SiteMoments) -> SiteMoments:
        """Return the moments of keys, those before rotation given."""
        by_head = moments.mean.unflatten(0, (-1, self.lift.shape[-1]))
        mean = torch.einsum("ai,aij,hj->hi", self.mean, self.lift, by_head).flatten()
        covariance = self._form(moments.second, self.products) - torch.outer(mean, mean)
        fisher = self._form(moments.fisher, self.of_inverse)
        return SiteMoments(mean, covariance, fisher, moments.tokens)

    def _form(self, matrix: Tensor, products: Tensor) -> Tensor:
        """Return the mean of R M Rᵀ for a matrix M of all heads, (H·d, H·d)."""
        size = self.lift.shape[-1]
        by_head = matrix.unflatten(1, (-1, size)).unflatten(0, (-1, size))
        lifted = torch.einsum("aij,hjgk,blk->haigbl", self.lift, by_head, self.lift)
        return (lifted * products.unsqueeze(2)).sum(dim=(1, 4)).flatten(0, 1).flatten(1)


def _by_feature(layer: nn.Module, cos: Tensor, sin: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return J (d, d), and c and s of every feature at some positions, (positions, 2, d).

    Where the two features of a frequency stand, how angles are laid out and which features have
    none, a layer knows by itself: it is asked to rotate.
    """
    rotate = rotation_of_keys(layer, cos.shape[-1])

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(x[None, None], cos, sin)[0, 0]  # (rows, d)

    features = torch.eye(head_dim, dtype=cos.dtype)
    zero = cos.new_zeros(1, head_dim, cos.shape[-1])
    kept = rotated(features, zero, zero)  # of features without an angle
    right = (rotated(features, zero, zero + 1) - kept).mT
    count = cos.shape[1]
    of_cos = rotated(cos.new_ones(count, head_dim), cos, 0 * sin)
    # What J makes ones of, but for features without an angle.
    before = right.sum(dim=0).expand(count, -1)
    of_sin = rotated(before, 0 * cos, sin) - before @ kept
    return right, torch.stack([of_cos, of_sin], dim=1)

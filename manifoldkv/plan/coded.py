"""What attention sees of keys and values whose latents are coded, differentiable in all of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldkv.basis import Basis
from manifoldkv.plan.coding import Coding


@dataclass(frozen=True)
class CodedBasis:
    """A basis and the coding of its latents.

    Rounding has no gradient of its own. Here a latent within the range of its codes gets the
    gradient of what is given back, as if it were not rounded, and a step that of its error (Esser
    et al. 2020, Learned step size quantization, arXiv 1902.08153).

    Parameters
    ----------
    basis : Basis
        Of the keys or values of a layer.
    coding : Coding
        Of its latents. Its tensors may carry a gradient.
    """

    basis: Basis
    coding: Coding

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the basis."""
        return self.basis.down.dtype

    def like(self, x: Tensor) -> CodedBasis:
        """Return the same with the basis in the dtype and on the device of a tensor."""
        return CodedBasis(self.basis.like(x), self.coding)

    def project(self, x: Tensor) -> Tensor:
        """Return what the cache gives back for `x`, as if it were added now: (B, H, n, d), same."""
        basis, coding = self.basis.like(x), self.coding
        grouped = basis.grouping.split(x)  # (B, G, n, w·d)
        mean = 0 if coding.mean is None else coding.mean.to(x).unsqueeze(1)
        latents = (grouped - mean) @ basis.down
        stored = int((coding.bits > 0).sum())
        latents = self._given_back(latents[..., :stored], stored)
        return basis.grouping.merge(latents @ basis.up[..., :stored].mT + mean)

    def _given_back(self, latents: Tensor, stored: int) -> Tensor:
        """Return latents (B, G, n, stored) rounded to their codes and back."""
        coding = self.coding
        bits = coding.bits[:stored].to(latents.device, torch.int64)
        half = (2 ** (bits - 1)).to(latents)
        step = coding.step[:, :stored].to(latents).unsqueeze(1)  # (G, 1, stored)
        scale: Tensor | float = 1.0
        if coding.deviation is not None:
            deviation = coding.deviation[:, :stored].to(latents).unsqueeze(1)
            norms = (latents / deviation).square().mean(dim=-1, keepdim=True).sqrt()
            scale = _straight_through(norms, norms.half().to(norms))
            scale = scale.clamp(min=torch.finfo(torch.float16).tiny)
        within = (latents / scale / step).clamp(min=-half, max=half)
        codes = within.floor().clamp(max=half - 1)
        found = _straight_through(within, codes + 0.5) * step * scale
        return found if coding.gain is None else found * coding.gain[:, None, :stored].to(found)


def _straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return what is rounded with the gradient of x."""
    return x + (rounded - x).detach()

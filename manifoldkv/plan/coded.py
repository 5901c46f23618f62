"""What attention sees of keys and values whose latents are coded, differentiable in all of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldkv.basis import Basis
from manifoldkv.errors import PlanError
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

    def project(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        """Return what the cache gives back for `x`, as if it were added now: (B, H, n, d), same.

        Where the coding predicts, `given` is what it predicts from, (B, 1, n, inputs).

        Raises
        ------
        PlanError
            If that is missing.
        """
        basis, coding = self.basis.like(x), self.coding
        grouped = basis.grouping.split(x)  # (B, G, n, w·d)
        expected = self._expected(grouped, given)
        latents = (grouped - expected) @ basis.down
        stored, exact = int((coding.bits > 0).sum()), coding.exact
        coded = self._given_back(latents[..., exact:stored], slice(exact, stored))
        latents = torch.cat([latents[..., :exact], coded], dim=-1)
        return basis.grouping.merge(latents @ basis.up[..., :stored].mT + expected)

    def _expected(self, grouped: Tensor, given: Tensor | None) -> Tensor:
        """Return what is taken from keys or values (B, G, n, w·d) before they are projected."""
        coding = self.coding
        if coding.mean is None:
            return grouped.new_zeros(())
        mean = coding.mean.to(grouped).unsqueeze(1)
        if coding.prediction is None:
            return mean
        if given is None:
            raise PlanError(
                "latents are predicted from what the cache gives back of the layer below, which is "
                "not known here"
            )
        return mean + given.to(grouped) @ coding.prediction.to(grouped)

    def _given_back(self, latents: Tensor, places: slice) -> Tensor:
        """Return the latents (B, G, n, coded) at some places rounded to their codes and back."""
        coding = self.coding
        bits = coding.bits[places].to(latents.device, torch.int64)
        half = (2 ** (bits - 1)).to(latents)
        step = coding.step[:, places].to(latents).unsqueeze(1)  # (G, 1, coded)
        scale: Tensor | float = 1.0
        if coding.deviation is not None:
            deviation = coding.deviation[:, places].to(latents).unsqueeze(1)
            norms = (latents / deviation).square().mean(dim=-1, keepdim=True).sqrt()
            held = torch.finfo(torch.float16)
            norms = norms.clamp(max=held.max)
            scale = _straight_through(norms, norms.half().to(norms)).clamp(min=held.tiny)
        within = (latents / scale / step).clamp(min=-half, max=half)
        codes = within.floor().clamp(max=half - 1)
        found = _straight_through(within, codes + 0.5) * step * scale
        return found if coding.gain is None else found * coding.gain[:, None, places].to(found)


def _straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return what is rounded with the gradient of x."""
    return x + (rounded - x).detach()

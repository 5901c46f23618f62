"""Reconstruction of keys and values whose latents are coded."""

from __future__ import annotations

import torch
from torch import Tensor

from manifoldkv.basis import Basis
from manifoldkv.plan.coding import Coding


def reconstructed(basis: Basis, coding: Coding, x: Tensor, inputs: Tensor | None = None) -> Tensor:
    """Return the reconstruction of keys or values, as the cache stores and reads them.

    Parameters
    ----------
    basis : Basis
        Of all heads together.
    coding : Coding
        Of its latents.
    x : Tensor
        All heads side by side, (tokens, D).
    inputs : Tensor, optional
        What the coding predicts from, (tokens, inputs); only for one with a prediction.

    Returns
    -------
    Tensor
        (tokens, D)
    """
    stored = coding.stored
    down, up = (part[0, :, :stored].to(x) for part in (basis.down, basis.up))
    expected = coding.mean.to(x)
    if coding.prediction is not None:
        assert inputs is not None
        expected = expected + inputs.to(x) @ coding.prediction.to(x)
    latents = (x - expected) @ down
    step, deviation, gain = (
        tensor[:stored].to(x) for tensor in (coding.step, coding.deviation, coding.gain)
    )
    half = (2 ** (coding.bits[:stored].long() - 1)).to(x)
    held = torch.finfo(torch.float16)
    scale = (latents / deviation).square().mean(dim=-1, keepdim=True).sqrt()
    scale = scale.clamp(max=held.max).half().to(x).clamp(min=held.tiny)
    codes = (latents / scale / step).floor().clamp(min=-half).minimum(half - 1)
    return ((codes + 0.5) * step * scale * gain) @ up.mT + expected

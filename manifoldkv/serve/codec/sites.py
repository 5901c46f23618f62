"""Keys or values of a layer as symbols, and back, in the coordinates of a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from manifoldkv.core.basis import SITES
from manifoldkv.core.errors import CacheError
from manifoldkv.plan.formats.entropy import EntropyCoded
from manifoldkv.plan.site import SitePlan
from manifoldkv.serve.kernels.entropy import FARTHEST_PAST


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which keys and values of a dtype are predicted and reconstructed.

    bfloat16 for 16-bit caches where the CPU multiplies it natively, four times as fast as float32
    and far more exact than the quantizer; float32 elsewhere. Reconstructions of machines that
    differ in it differ by rounding errors.
    """
    capabilities = torch.cpu.get_capabilities()
    native = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return torch.bfloat16 if dtype.itemsize == 2 and native else torch.float32


class SiteCodec:
    """Transform of the keys (before rotation) or values of a layer.

    Tokens of a block are columns, so that the symbols of a latent lie side by side, as the entropy
    coder has them. Reconstructions of all sites, less their means, lie below each other in one
    matrix (sites · D, tokens), in the dtype of products. A site is one product of its inputs and
    symbols, which are written into the rows of the site first.

    Parameters
    ----------
    plan : SitePlan
        Plan whose quantizer is `EntropyCoded`.
    index : int
        Index of the site: keys and values of all layers, one after the other.
    means : Tensor
        Means of the sites before this one, (index · D,), float32.
    dtype : torch.dtype
        Dtype of products.
    """

    def __init__(self, plan: SitePlan, index: int, means: Tensor, dtype: torch.dtype) -> None:
        assert isinstance(plan.quantizer, EntropyCoded)  # the codec has checked the plan
        features = plan.features
        self._rows = slice(index * features, (index + 1) * features)
        self._down = plan.basis.down[0].to(dtype).mT.contiguous()  # (F, D)
        mean = torch.zeros(features) if plan.mean is None else plan.mean.float()
        up = (plan.basis.up[0] * plan.quantizer.gain).mT  # (F, D)
        self._inputs, weights = torch.empty(0, dtype=torch.int64), up[:0]
        if plan.predictor is not None:
            layer = index // len(SITES)
            sites = [
                len(SITES) * (layer - below) + SITES.index(site)
                for below, site in plan.predictor.inputs
            ]
            rows = [torch.arange(s * features, (s + 1) * features) for s in sites]
            self._inputs, order = torch.cat(rows).sort()
            weights = plan.predictor.weights
            if plan.predictor.expansion is not None:
                weights = weights @ plan.predictor.expansion
            weights = weights[order]
        self.mean = mean + means[self._inputs] @ weights.float()
        """Reconstruction of the symbols 0, (D,), float32."""
        self._weights = torch.cat([weights, up]).to(dtype).mT.contiguous()  # (D, inputs + F)

    @property
    def latents(self) -> int:
        """Return the number of latents, F."""
        return len(self._down)

    def encode(self, x: Tensor, reconstructed: Tensor) -> Tensor:
        """Return the symbols of keys or values, and write their reconstructions.

        Parameters
        ----------
        x : Tensor
            Keys or values (D, tokens), float32.
        reconstructed : Tensor
            Reconstructions of all sites (sites · D, tokens); those before this one are read.

        Returns
        -------
        Tensor
            Integers (F, tokens), in the dtype of products.

        Raises
        ------
        CacheError
            If x is not finite, or too large.
        """
        own, count = reconstructed[self._rows], len(self._inputs)
        if count:
            torch.mm(self._weights[:, :count], self._read(reconstructed, 0), out=own)
        else:
            own.zero_()
        residuals = (x - self.mean[:, None]).sub_(own).to(own.dtype)
        latents = self._down @ residuals
        least, most = (float(bound) for bound in latents.aminmax())
        if not -FARTHEST_PAST < least <= most < FARTHEST_PAST:  # false of NaN too
            raise CacheError("the cache holds keys or values that are not finite, or far too large")
        symbols = latents.round_()
        own.addmm_(self._weights[:, count:], symbols)
        return symbols

    def decode(self, symbols: Tensor, reconstructed: Tensor) -> Tensor:
        """Return the keys or values (D, tokens), float32, of symbols (F, tokens).

        The rounding may differ from that of `encode`, which has two products.
        """
        own = reconstructed[self._rows]
        own[: self.latents] = symbols
        x = self._weights @ self._read(reconstructed, self.latents)
        own.copy_(x)
        return x.float().add_(self.mean[:, None])

    def _read(self, reconstructed: Tensor, latents: int) -> Tensor:
        """Return the inputs, and the first rows of the site: a view if they are neighbours."""
        first = self._rows.start
        if not len(self._inputs):
            return reconstructed[first : first + latents]
        least = int(self._inputs[0])
        if first - least == len(self._inputs):
            return reconstructed[least : first + latents]
        own = reconstructed[first : first + latents]
        return torch.cat([reconstructed[self._inputs], own])

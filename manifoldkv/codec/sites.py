"""Keys or values of a layer as symbols, and back, in the coordinates of a plan."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from manifoldkv.basis import SITES
from manifoldkv.coding.entropy import EntropyCoded
from manifoldkv.errors import CacheError
from manifoldkv.kernels.entropy import FARTHEST_PAST
from manifoldkv.plan.site import SitePlan


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

    Tokens of a block are rows. Reconstructions of all sites lie side by side in one matrix
    (tokens, sites · D), in the dtype of products. A site is one product of its inputs and symbols,
    which are written into the columns of the site first.

    Parameters
    ----------
    plan : SitePlan
        Plan whose quantizer is `EntropyCoded`.
    index : int
        Index of the site: keys and values of all layers, one after the other.
    dtype : torch.dtype
        Dtype of products.
    """

    def __init__(self, plan: SitePlan, index: int, dtype: torch.dtype) -> None:
        assert isinstance(plan.quantizer, EntropyCoded)  # the codec has checked the plan
        features = plan.features
        self._columns = slice(index * features, (index + 1) * features)
        self._down = plan.basis.down[0].to(dtype).mT.contiguous()  # (F, D)
        mean = torch.zeros(features) if plan.mean is None else plan.mean
        self._mean, up = mean.to(dtype), (plan.basis.up[0] * plan.quantizer.gain).mT  # (F, D)
        self._inputs, weights = torch.empty(0, dtype=torch.int64), up[:0]
        if plan.predictor is not None:
            layer = index // len(SITES)
            sites = [
                len(SITES) * (layer - below) + SITES.index(site)
                for below, site in plan.predictor.inputs
            ]
            columns = [torch.arange(s * features, (s + 1) * features) for s in sites]
            self._inputs, order = torch.cat(columns).sort()
            weights = plan.predictor.weights
            if plan.predictor.expansion is not None:
                weights = weights @ plan.predictor.expansion
            weights = weights[order]
        self._weights = torch.cat([weights, up]).to(dtype).mT.contiguous()  # (D, inputs + F)

    @property
    def latents(self) -> int:
        """Return the number of latents, F."""
        return len(self._down)

    def expected(self, reconstructed: Tensor) -> Tensor:
        """Return the expected keys or values, (D,) or (tokens, D).

        Parameters
        ----------
        reconstructed : Tensor
            Reconstructions of the sites before this one, (tokens, sites · D).
        """
        count = len(self._inputs)
        if not count:
            return self._mean
        return linear(self._read(reconstructed, 0), self._weights[:, :count], self._mean)

    def symbols(self, x: Tensor, expected: Tensor) -> Tensor:
        """Return the symbols of keys or values (tokens, D), float32, as (F, tokens), int32.

        Raises
        ------
        CacheError
            If x is not finite, or too large.
        """
        residuals = (x - expected).to(self._down.dtype)
        latents = (self._down @ residuals.mT).float()
        if not float(latents.abs().amax()) < FARTHEST_PAST:  # false of NaN too
            raise CacheError("the cache holds keys or values that are not finite, or far too large")
        return latents.round_().int()

    def reconstruct(
        self, symbols: Tensor, reconstructed: Tensor, expected: Tensor | None = None
    ) -> Tensor:
        """Return the keys or values of symbols, (tokens, D), and write them into their columns.

        With `expected`, where it is known, it is not computed again; the rounding differs.
        """
        first = self._columns.start
        latents = symbols.to(reconstructed.dtype).mT
        if expected is not None:
            x = torch.addmm(expected, latents, self._weights[:, len(self._inputs) :].mT)
        else:
            reconstructed[:, first : first + self.latents] = latents.contiguous()
            x = linear(self._read(reconstructed, self.latents), self._weights, self._mean)
        reconstructed[:, self._columns] = x
        return x

    def _read(self, reconstructed: Tensor, latents: int) -> Tensor:
        """Return the inputs, and the first columns of the site: a view if they are neighbours."""
        first = self._columns.start
        if not len(self._inputs):
            return reconstructed[:, first : first + latents]
        least = int(self._inputs[0])
        if first - least == len(self._inputs):
            return reconstructed[:, least : first + latents]
        own = reconstructed[:, first : first + latents]
        return torch.cat([reconstructed[:, self._inputs], own], dim=1)

"""EigenAttention's search for ranks, which takes an error budget instead of a ratio."""

from __future__ import annotations

from manifoldkv.core.basis import Basis, HeadGrouping
from manifoldkv.evaluate.diagnostics import layer_errors
from manifoldkv.learn.objectives import EigenAttention
from manifoldkv.learn.objectives.eigen_attention import singular_values
from manifoldkv.learn.ranks import Ranks
from manifoldkv.learn.ranks.threshold import threshold_search
from manifoldkv.statistics.layer import LayerActivations


class ReleaseSearch:
    """EigenAttention's search in one layer, with bases of `fit` and errors on `measured`."""

    def __init__(self, fit: LayerActivations, measured: LayerActivations) -> None:
        self._measured = measured
        shared, apart = HeadGrouping("shared", fit.kv_heads), HeadGrouping(1, fit.kv_heads)
        self._spectra = (singular_values(fit, "key", shared), singular_values(fit, "value", apart))
        self._full = tuple(
            EigenAttention().problem(fit, site, grouping).closed_form(fit.head_dim)  # type: ignore[arg-type]
            for site, grouping in (("key", shared), ("value", apart))
        )
        self._errors: dict[Ranks, float] = {}

    def ranks(self, error_budget: float) -> Ranks:
        """Return the ranks at an error budget."""
        return threshold_search(*self._spectra, self._error, error_budget)

    def _error(self, key: int, value: int) -> float:
        if (key, value) not in self._errors:
            bases = [_leading(b, rank) for b, rank in zip(self._full, (key, value), strict=True)]
            self._errors[key, value] = layer_errors(self._measured, *bases).layer_output_error
        return self._errors[key, value]


def _leading(basis: Basis, rank: int) -> Basis:
    """Return the leading part of an eigenbasis."""
    down = basis.down[..., :rank].contiguous()
    return Basis(down, down, basis.grouping)

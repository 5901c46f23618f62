"""Plan of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manifoldkv.core.basis import Site
from manifoldkv.core.errors import PlanError
from manifoldkv.core.windows import cached_tokens
from manifoldkv.plan.model import ModelView
from manifoldkv.plan.site import SitePlan


@dataclass(frozen=True)
class LayerPlan:
    """Plan of one layer.

    Parameters
    ----------
    key, value : SitePlan
        Of its keys and its values.
    window : int or None
        Sliding window of the layer, in tokens; it caches ``window - 1`` of them.
    """

    key: SitePlan
    value: SitePlan
    window: int | None = None

    @property
    def sites(self) -> tuple[tuple[Site, SitePlan], tuple[Site, SitePlan]]:
        """Return both sites by name."""
        return ("key", self.key), ("value", self.value)

    def of(self, site: Site) -> SitePlan:
        """Return the plan of a site."""
        return self.key if site == "key" else self.value

    @property
    def mean_bits(self) -> dict[Site, float]:
        """Return the mean bits of an element of keys and of values."""
        return {site: planned.mean_bits for site, planned in self.sites}

    def check(self, name: str) -> None:
        """Raise `PlanError` unless all parts fit each other; `name` is that of messages."""
        for site, planned in self.sites:
            planned.check(f"{name} {site}", self.window)
        if self.key.head_dim != self.value.head_dim:
            raise PlanError(f"{name}: keys and values differ in head_dim")
        if self.key.grouping.heads != self.value.grouping.heads:
            raise PlanError(f"{name}: keys and values differ in KV heads")
        if self.window is not None and self.window < 2:
            raise PlanError(f"{name}: a window of {self.window} tokens keeps nothing")

    def cached_tokens(self, tokens: int) -> int:
        """Return how many of `tokens` tokens seen the layer caches."""
        return cached_tokens(tokens, self.window)

    def sink_tokens(self, sinks: int) -> int:
        """Return how many of the `sinks` first tokens of a text are kept beside their latents.

        None of them in a layer with a window, which they leave.
        """
        return sinks if self.window is None else 0

    def elements(self, tokens: int, sinks: int = 0) -> int:
        """Return the elements cached of `tokens` tokens of one sequence."""
        projected = self.cached_tokens(tokens) * (self.key.rank + self.value.rank)
        uncompressed = min(tokens, self.sink_tokens(sinks)) * 2 * self.key.head_dim
        return self.key.grouping.heads * (uncompressed + projected)

    def full_elements(self, tokens: int) -> int:
        """Return the elements that the uncompressed model caches of `tokens` tokens."""
        return self.cached_tokens(tokens) * 2 * self.key.features


def check_layers(layers: Sequence[LayerPlan], model: ModelView) -> None:
    """Raise `PlanError` unless layers have the windows and sizes of those of a model."""
    expected = model.kv_heads, model.head_dim
    for index, (layer, window) in enumerate(zip(layers, model.windows, strict=True)):
        if layer.window != window:
            raise PlanError(
                f"layer {index} has a window of {layer.window} tokens in the plan, {window} in the "
                "model: make the plan again for this model"
            )
        planned = layer.key.grouping.heads, layer.key.head_dim
        if planned != expected:
            raise PlanError(
                f"layer {index} has {planned[0]} KV heads of {planned[1]} in the plan, "
                f"{expected[0]} of {expected[1]} in the model: make the plan again for this model"
            )

"""Products of keys, values, queries and attention weights with bases and latents."""

from __future__ import annotations

import torch
from torch import Tensor

from manifoldkv.basis import Basis, HeadGrouping
from manifoldkv.cache.storage import constant_dtype, working_dtype


class RunningBasis:
    """A basis in the dtype and on the device of a layer, split by head.

    Parameters
    ----------
    basis : Basis
        Basis of a plan.
    dtype : torch.dtype
        Dtype of the model.
    device : torch.device
        Device of the layer.
    mean : Tensor, optional
        Mean of keys or values with concatenated heads, (D,), subtracted before projection; only for
        a basis of all heads.
    """

    def __init__(
        self,
        basis: Basis,
        dtype: torch.dtype,
        device: torch.device,
        mean: Tensor | None = None,
    ) -> None:
        self.grouping: HeadGrouping = basis.grouping
        self._stored = dtype
        self.working = working_dtype(dtype, device)
        held = constant_dtype(dtype)
        self._held_down = basis.down.to(device, held)  # (groups, w·d, w·r)
        self._held_up = self._held_down if basis.orthonormal else basis.up.to(device, held)
        self._mean = None if mean is None else mean.to(device, self.working).view(1, 1, -1)
        identity = torch.eye(*basis.down.shape[1:], dtype=basis.down.dtype)
        # The identity is not multiplied by: comparisons with lower ranks are fair.
        keeps_all = self.grouping.width == 1 and bool((basis.down == identity).all())
        self._keeps_all = keeps_all and mean is None

    @property
    def features(self) -> int:
        """Return the number of latents per head group and token."""
        return self._held_down.shape[2]

    @property
    def _down(self) -> Tensor:
        return self._held_down.to(self.working)

    @property
    def _up(self) -> Tensor:
        return self._held_up.to(self.working)

    @property
    def up_by_head(self) -> Tensor:
        """Return the up-projection of every head, (H_kv or 1, d, w·r)."""
        return self._up.unflatten(1, (self.grouping.width, -1)).flatten(0, 1)

    def latents(self, x: Tensor) -> Tensor:
        """Return the latents (B, G, m, w·r) of keys or values (B, H_kv, m, d)."""
        return self.latents_of_groups(self.grouping.split(x))

    def latents_of_groups(self, x: Tensor) -> Tensor:
        """Return the latents of keys or values of head groups, (B, G, m, w·d)."""
        if self._keeps_all:
            return x
        x = x.to(self.working)
        if self._mean is not None:
            x = x - self._mean
        return (x @ self._down).to(self._stored)

    def up_project(self, latents: Tensor) -> Tensor:
        """Up-project latents (B, G, m, w·r) to (B, H_kv, m, d) in the working dtype."""
        return self.grouping.merge(self.up_project_groups(latents))

    def up_project_groups(self, latents: Tensor) -> Tensor:
        """Up-project latents to keys or values of head groups, (B, G, m, w·d).

        Tokens are last in memory, so that operations on a feature run over neighbours.
        """
        x = latents.to(self.working)
        if self._keeps_all:
            return x
        x = self._up @ x.mT  # (B, G, w·d, m)
        return (x if self._mean is None else x + self._mean.mT).mT

    def queries(self, queries: Tensor) -> Tensor:
        """Project queries for scores against latents: (B, H_kv, R, d) to (B, G, w·R, w·r)."""
        if self._keeps_all:
            return queries
        return self._by_group((queries.to(self.working) @ self.up_by_head).to(self._stored))

    def mix(self, weights: Tensor, latents: Tensor) -> Tensor:
        """Return weights (B, H_kv, R, n) times latents (B, G, n, w·r), (B, H_kv, R, w·r)."""
        weights = self._by_group(weights).to(latents.dtype)
        mixed = product(weights, latents)  # (B, G, w·R, w·r)
        return self.split_groups(mixed)

    def finish(self, mixed: Tensor, weights: Tensor | None = None) -> Tensor:
        """Up-project mixed latents (B, H_kv, R, w·r) to the model's dtype.

        `weights` are those of the mixture, (B, H_kv, R, n); they sum to 1 if omitted.
        """
        if not self._keeps_all:
            mixed = mixed.to(self.working) @ self.up_by_head.mT
        if self._mean is not None:
            mean = self.grouping.merge(self._mean.unsqueeze(0))  # (1, H_kv, 1, d)
            if weights is not None:
                mean = weights.sum(dim=-1, keepdim=True).to(mean.dtype) * mean
            mixed = mixed + mean
        return mixed.to(self._stored)

    def scores(self, queries: Tensor, latents: Tensor) -> Tensor:
        """Return scores (B, H_kv, R, n) of queries (B, G, w·R, w·r) and latents (B, G, n, w·r)."""
        return self.split_groups(scores_of(queries, latents))

    def _by_group(self, x: Tensor) -> Tensor:
        """Stack the rows of the heads of a group: (B, H_kv, R, f) to (B, G, w·R, f)."""
        if self.grouping.width == 1:
            return x
        return x.unflatten(1, (-1, self.grouping.width)).flatten(2, 3)

    def split_groups(self, x: Tensor) -> Tensor:
        """Separate the heads of a group: (B, G, w·R, f) to (B, H_kv, R, f)."""
        if self.grouping.width == 1:
            return x
        return x.unflatten(2, (self.grouping.width, -1)).flatten(1, 2)


def scores_of(queries: Tensor, keys: Tensor) -> Tensor:
    """Return scores (B, H, R, n) of queries (B, H, R, f) and keys (B, H, n, f), in their dtype."""
    return product(queries.to(keys.dtype), keys.mT)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b without a CPU's copies of batches in 16-bit dtypes."""
    if a.device.type != "cpu" or a.itemsize > 2 or b.is_contiguous():
        return a @ b
    pairs = zip(a.flatten(0, 1), b.flatten(0, 1), strict=True)
    return torch.stack([x @ y for x, y in pairs]).unflatten(0, a.shape[:2])

"""Description of a model's cache, all that plans and statistics need to know of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from manifoldkv.core.basis import HeadGrouping


@dataclass(frozen=True, eq=False)
class ModelDescription:
    """Shape of the cache and the attention of a model, and the identity of its weights.

    Parameters
    ----------
    name : str
        Name or folder of the model, as it was loaded.
    config_hash : str
        `config_hash` of its configuration.
    fingerprint : Tensor
        `fingerprint` of its weights, (matrices, elements), float32.
    windows : tuple of (int or None)
        Sliding window of every layer in tokens; None for full attention.
    query_heads, kv_heads : int
        Numbers of heads of a layer, H_q and H_kv.
    head_dim : int
        Number of features of a head, d.
    rotary_dim : int
        Number of features of a head that are rotated.
    frequencies : tuple of int
        Index of the RoPE frequency of every feature of a head, (d,).
    itemsize : int
        Bytes of an element of the weights.
    """

    name: str
    config_hash: str
    fingerprint: Tensor = field(repr=False)
    windows: tuple[int | None, ...]
    query_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    frequencies: tuple[int, ...] = field(repr=False)
    itemsize: int

    @property
    def layers(self) -> int:
        """Return the number of decoder layers."""
        return len(self.windows)

    @property
    def features(self) -> int:
        """Return the number of features of the keys of a token in a layer, D = H_kv · d."""
        return self.kv_heads * self.head_dim

    @property
    def grouping(self) -> HeadGrouping:
        """Return the grouping of all KV heads of a layer together."""
        return HeadGrouping("all", self.kv_heads)

    def fields(self) -> dict[str, Any]:
        """Return all fields but the fingerprint, of JSON's types."""
        named = asdict(self)
        del named["fingerprint"]
        return named

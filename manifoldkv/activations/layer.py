"""Activations of a model, one layer at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manifoldkv.activations.call import LayerCall
from manifoldkv.activations.placement import Placement
from manifoldkv.basis import Rotary
from manifoldkv.models.interface import AttentionSettings
from manifoldkv.modes import in_own_modes

SEQUENCES_PER_FORWARD = 8


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of the calibration set and query rows within each of them.

    Parameters
    ----------
    sequences : Tensor
        Indices of sequences, (b,), int64, on the CPU.
    rows : Tensor or None
        Positions of queries, (m,), int64, on the CPU; None for all. Keys and values are always
        those of every position.
    """

    sequences: Tensor
    rows: Tensor | None = None


class Projections(NamedTuple):
    """Queries (b, H_q, m, d), keys and values (b, H_kv, m, d) of a layer after their norms."""

    queries: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class LayerActivations:
    """Activations of one decoder layer for S sequences of n tokens.

    `inputs` and `outputs` are in the dtype of the model; all other tensors are float32, or float64
    for a float64 model. `cos`, `sin` and `mask` are on the device where the layer runs; large
    tensors too if they fit there, else in memory, else in memory-mapped files. Methods return
    tensors on the device.

    Only inputs and outputs are held: `projections` runs the layer at each call. The properties
    `keys` and `values` are computed once and held.

    Parameters
    ----------
    layer : int
        Index of the layer.
    inputs : Tensor
        Layer inputs, (S, n, hidden).
    query_heads, kv_heads : int
        Numbers of heads, H_q and H_kv.
    head_dim : int
        Number of features of a head, d.
    cos, sin : Tensor
        Angles of the rotary embedding, (1, n, rotary dimension).
    mask : Tensor
        Boolean, True where a query (row) sees a key (column), (1, 1, n, n); causal, with the
        layer's sliding window if it has one.
    outputs : Tensor
        Outputs of the uncompressed layer, (S, n, hidden).
    settings : AttentionSettings
        Scaling, soft cap and sink logits of the layer's attention.
    call : LayerCall
        Decoder layer and the arguments of its call.
    folder : Path or None
        Folder of tensors that do not fit into memory.
    """

    layer: int
    inputs: Tensor
    query_heads: int
    kv_heads: int
    head_dim: int
    cos: Tensor
    sin: Tensor
    mask: Tensor
    outputs: Tensor
    settings: AttentionSettings
    call: LayerCall
    folder: Path | None = None

    def __repr__(self) -> str:
        return (
            f"LayerActivations(layer {self.layer}, {self.sequences} sequences of {self.length} "
            f"tokens, {self.query_heads} query heads and {self.kv_heads} KV heads of "
            f"{self.head_dim})"
        )

    @property
    def device(self) -> torch.device:
        """Return the device where the layer runs."""
        return self.cos.device

    @property
    def module(self) -> nn.Module:
        """Return the decoder layer."""
        return self.call.module

    @property
    def sequences(self) -> int:
        """Return the number of sequences, S."""
        return self.inputs.shape[0]

    @property
    def length(self) -> int:
        """Return the number of tokens of a sequence, n."""
        return self.inputs.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of all tensors but inputs and outputs."""
        return self.cos.dtype

    @property
    def keys(self) -> Tensor:
        """Return the keys before rotation, (S, H_kv, n, d), computed at the first access."""
        return self._kept[0]

    @property
    def values(self) -> Tensor:
        """Return the values, (S, H_kv, n, d), computed at the first access."""
        return self._kept[1]

    @cached_property
    @in_own_modes
    def _kept(self) -> tuple[Tensor, Tensor]:
        shape = (self.sequences, self.kv_heads, self.length, self.head_dim)
        nbytes = 2 * math.prod(shape) * self.dtype.itemsize
        placement = Placement(nbytes, self.device, self.folder)
        keys, values = placement.empty(shape, self.dtype), placement.empty(shape, self.dtype)
        for chunk in torch.arange(self.sequences).split(SEQUENCES_PER_FORWARD):
            _, keys_of_chunk, values_of_chunk = self.projections("pre", Batch(chunk))
            keys[chunk] = keys_of_chunk.to(keys.device)
            values[chunk] = values_of_chunk.to(values.device)
        return keys, values

    @in_own_modes
    @torch.no_grad()
    def projections(self, rotary: Rotary, batch: Batch | None = None) -> Projections:
        """Return queries, keys and values of a batch (all rows have keys and values here).

        Parameters
        ----------
        rotary : {"pre", "post"}
            Space of queries and keys: before or after rotation.
        batch : Batch, optional
            Sequences and rows; all if omitted.
        """
        batch = batch or Batch(torch.arange(self.sequences))
        inputs = select_rows(self.inputs, batch).to(self.device)
        queries, keys, values = [x.to(self.dtype) for x in self.call.projections(inputs)]
        if rotary == "pre":
            return Projections(queries, keys, values)
        return Projections(self.rotate(queries, batch.rows), self.rotate(keys, batch.rows), values)

    def rotate(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Rotate x (B, H, tokens, d) at the positions `rows`, (tokens,); None for all n."""
        cos, sin = (self.cos, self.sin) if rows is None else (self.cos[:, rows], self.sin[:, rows])
        return self.call.rotate(x, cos, sin)

    def keys_in(self, rotary: Rotary, sequences: Tensor | None = None) -> Tensor:
        """Return keys before or after rotation, (s, H_kv, n, d), of `sequences`; None for all."""
        keys = self._selected(self.keys, sequences)
        return keys if rotary == "pre" else self.rotate(keys)

    def values_of(self, sequences: Tensor | None = None) -> Tensor:
        """Return the values (s, H_kv, n, d) of `sequences`; None for all."""
        return self._selected(self.values, sequences)

    def _selected(self, x: Tensor, sequences: Tensor | None) -> Tensor:
        return (x if sequences is None else x[sequences]).to(self.device)

    def outputs_of(self, batch: Batch) -> Tensor:
        """Return the outputs (b, m, hidden) of a batch."""
        return select_rows(self.outputs, batch).to(self.device, self.dtype)

    def output_weight(self) -> Tensor:
        """Return the output projection W_O by query head, (H_q, d, hidden)."""
        return (
            self.call.output_weight().to(self.dtype).mT.reshape(self.query_heads, self.head_dim, -1)
        )


def select_rows(x: Tensor, batch: Batch) -> Tensor:
    """Return the sequences and rows of a batch, of x (S, n, features): (b, m, features)."""
    if batch.rows is None:
        return x[batch.sequences]
    return x[batch.sequences.unsqueeze(1), batch.rows]

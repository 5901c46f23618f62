"""Outputs of a decoder layer as differentiable functions of its bases, for a batch of query rows.

Only attention is computed here. Output projection, residual connections, norms and MLP are those of
the model's layer, called with a precomputed attention output: no family's code is repeated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from manifoldkv.core.basis import Basis, HeadGrouping, Rotary
from manifoldkv.models.interface import attend, attention_weights
from manifoldkv.statistics.layer import Batch, LayerActivations, select_rows


def every_sequence(activations: LayerActivations) -> Batch:
    """Return the batch of all sequences and query rows."""
    return Batch(torch.arange(activations.sequences))


def attention_output(
    activations: LayerActivations,
    key_basis: Basis | None = None,
    value_basis: Basis | None = None,
    *,
    rotary: Rotary = "pre",
    batch: Batch | None = None,
) -> Tensor:
    """Return the attention output by head, before W_O, with projected keys and values.

    Parameters
    ----------
    activations : LayerActivations
        Activations of the layer.
    key_basis, value_basis : Basis or None
        Bases; None for uncompressed keys or values.
    rotary : {"pre", "post"}
        Whether keys are projected before or after rotation.
    batch : Batch, optional
        Sequences and query rows; all if omitted.

    Returns
    -------
    Tensor
        Attention output, (b, H_q, m, d).
    """
    batch = batch or every_sequence(activations)
    queries = activations.projections("post", batch).queries
    keys = rotated_keys(activations, key_basis, rotary, batch)
    values = activations.values_of(batch.sequences)
    if value_basis is not None:
        values = value_basis.project(values)
    return attend(queries, keys, values, mask_rows(activations, batch), activations.settings)


def mixed_values(
    activations: LayerActivations,
    grouping: HeadGrouping,
    batch: Batch,
    key_basis: Basis | None = None,
    *,
    rotary: Rotary = "pre",
) -> Tensor:
    """Return attention weights times grouped values, (b, H_q, m, width·d).

    A value basis acts on features and the weights on tokens: the two commute, so that a new value
    basis costs two small products (see `project_mixed_values`).
    """
    weights = attention_weights(
        activations.projections("post", batch).queries,
        rotated_keys(activations, key_basis, rotary, batch),
        mask_rows(activations, batch),
        activations.settings,
    )  # (b, H_kv, H_q/H_kv, m, n)
    values = grouping.split(activations.values_of(batch.sequences))  # (b, head groups, n, width·d)
    values = values.repeat_interleave(grouping.width, dim=1)  # (b, H_kv, n, width·d)
    return (weights @ values.unsqueeze(2)).flatten(1, 2)


def project_mixed_values(mixed: Tensor, basis: Basis) -> Tensor:
    """Return the attention output (b, H_q, m, d) from `mixed_values` and a value basis."""
    grouping = basis.grouping
    batch, heads, rows, features = mixed.shape
    share = heads // grouping.heads
    by_head = mixed.view(batch, -1, grouping.width, share * rows, features)  # (b, G, width, …)
    latents = by_head @ basis.down.unsqueeze(-3)  # (b, G, width, share·m, width·r)
    up = basis.up.unflatten(-2, (grouping.width, -1))  # (groups, width, d, width·r)
    return (latents @ up.mT).reshape(batch, heads, rows, -1)


def layer_output(
    activations: LayerActivations, attention: Tensor, batch: Batch | None = None
) -> Tensor:
    """Return the layer's output (b, m, hidden) for an attention output.

    Parameters
    ----------
    activations : LayerActivations
        Activations of the layer.
    attention : Tensor
        Attention output of the batch by head, (b, H_q, m, d).
    batch : Batch, optional
        Sequences and query rows; all if omitted.
    """
    batch = batch or every_sequence(activations)
    inputs = select_rows(activations.inputs, batch).to(activations.device)

    def already_computed(module: nn.Module, *ignored: Any) -> Tensor:
        return attention.transpose(1, 2).to(activations.call.dtype)  # (b, m, H_q, d)

    return activations.call.output(inputs, already_computed).to(activations.dtype)


def compressed_output(
    activations: LayerActivations,
    key_basis: Basis | None,
    value_basis: Basis | None,
    *,
    rotary: Rotary = "pre",
) -> Tensor:
    """Return the layer's output with projected keys and values, (S, n, hidden)."""
    outputs = []
    for sequences in every_sequence(activations).sequences.split(1):
        batch = Batch(sequences)
        attention = attention_output(
            activations, key_basis, value_basis, rotary=rotary, batch=batch
        )
        outputs.append(layer_output(activations, attention, batch))
    return torch.cat(outputs)


def select_head_rows(x: Tensor, batch: Batch) -> Tensor:
    """Return the sequences and rows of a batch, of x (S, H, n, features): (b, H, m, features)."""
    if batch.rows is None:
        return x[batch.sequences]
    heads = torch.arange(x.shape[1])
    return x[batch.sequences[:, None, None], heads[:, None], batch.rows]


def rotated_keys(
    activations: LayerActivations, basis: Basis | None, rotary: Rotary, batch: Batch
) -> Tensor:
    """Return rotated keys (b, H_kv, n, d), projected before or after rotation."""
    if rotary == "post" and basis is not None:
        return basis.project(activations.keys_in("post", batch.sequences))
    keys = activations.keys_in("pre", batch.sequences)
    return activations.rotate(keys if basis is None else basis.project(keys))


def mask_rows(activations: LayerActivations, batch: Batch) -> Tensor:
    """Return the mask of the batch's query rows, (1, 1, m, n), boolean."""
    return activations.mask if batch.rows is None else activations.mask[:, :, batch.rows]

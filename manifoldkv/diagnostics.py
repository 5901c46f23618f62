"""How far a compressed layer is from the uncompressed one. Every error column comes from here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import pandas as pd
import torch
from torch import Tensor

from manifoldkv.basis import Basis, Projection, Rotary
from manifoldkv.layers.activations import Batch, LayerActivations
from manifoldkv.layers.decoder import attention_output, layer_output


@dataclass(frozen=True)
class LayerErrors:
    """Errors of one layer, each a mean over sequences.

    Parameters
    ----------
    attention_output_error : float
        ``||A - Ã||_F / ||A||_F`` of the attention output, all heads, before W_O.
    layer_output_error : float
        The same ratio at the layer output: Δ, Eq. (dkv_delta).
    cosine_similarity : float
        Between layer outputs, token by token, mean over tokens.
    """

    attention_output_error: float
    layer_output_error: float
    cosine_similarity: float


@torch.no_grad()
def layer_errors(
    activations: LayerActivations,
    key_basis: Projection | None = None,
    value_basis: Projection | None = None,
    *,
    rotary: Rotary = "pre",
) -> LayerErrors:
    """Return the errors of one layer with the bases given; None leaves keys or values exact.

    To quote an error, pass activations of text that was not used for solving.
    """
    key_basis, value_basis = (
        None if basis is None else basis.like(activations.cos) for basis in (key_basis, value_basis)
    )
    columns: list[Tensor] = []
    for sequences in torch.arange(activations.sequences).split(1):
        batch = Batch(sequences)
        exact = attention_output(activations, batch=batch)
        attention = attention_output(
            activations, key_basis, value_basis, rotary=rotary, batch=batch
        )
        output = layer_output(activations, attention, batch)
        expected = activations.outputs_of(batch)
        cosine = torch.nn.functional.cosine_similarity(output, expected, dim=-1).mean()
        columns.append(
            torch.stack([_ratio(attention, exact), _ratio(output, expected), cosine]).double()
        )
    return LayerErrors(*torch.stack(columns).mean(dim=0).tolist())


def diagnose(
    layers: Iterable[LayerActivations],
    bases: Mapping[int, tuple[Basis | None, Basis | None]],
    *,
    rotary: Rotary = "pre",
) -> pd.DataFrame:
    """Return the errors of many layers, each with its (key basis, value basis).

    Parameters
    ----------
    layers : iterable of LayerActivations
        As `capture` yields them.
    bases : mapping
        Layer index to bases; a layer that is missing is passed over.

    Returns
    -------
    DataFrame
        One row per layer: ``layer`` and the fields of `LayerErrors`.
    """
    rows = [
        {"layer": a.layer} | asdict(layer_errors(a, *bases[a.layer], rotary=rotary))
        for a in layers
        if a.layer in bases
    ]
    return pd.DataFrame(rows)


def _ratio(approximate: Tensor, exact: Tensor) -> Tensor:
    return torch.linalg.vector_norm(approximate - exact) / torch.linalg.vector_norm(exact)

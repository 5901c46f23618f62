"""Forward and backward passes through a model, layer by layer, for `collect`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manifoldkv.core.errors import RunError
from manifoldkv.core.progress import follow
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.interface import attend
from manifoldkv.models.offloading import resident
from manifoldkv.statistics.capture import capture
from manifoldkv.statistics.head import log_probabilities_from, tokens_at_once
from manifoldkv.statistics.layer import SEQUENCES_PER_FORWARD, Batch, LayerActivations
from manifoldkv.statistics.moments import Moments
from manifoldkv.statistics.placement import Placement

TOKENS_AT_ONCE = 1024
"""Number of tokens of a backward pass through a layer, at least one sequence."""

Samples = tuple[Tensor, Tensor]
"""Readers (H_kv, d, d) and samples (sequences, tokens, D), as in `TensorStatistics`."""


@dataclass(frozen=True)
class Counted:
    """Tokens of a sequence that averages are over.

    Parameters
    ----------
    first : int
        Number of first tokens that are left out.
    prompt : int or None
        Number of first tokens that form a prompt; those after it are left out.
    """

    first: int
    prompt: int | None

    @property
    def tokens(self) -> slice:
        """Return the tokens as a slice."""
        return slice(self.first, self.prompt)


def run_forwards(
    decoder: Decoder, tokens: Tensor, sampled: Tensor, counted: Counted, folder: Path | None
) -> tuple[list[LayerActivations], Tensor, list[tuple[Samples, Samples]]]:
    """Return activations of all layers, an empty gradient (S, n, hidden) of outputs, and samples.

    The outputs of a layer and the inputs of the next one are the same tensor.

    Parameters
    ----------
    decoder : Decoder
        View of the model.
    tokens : Tensor
        Token ids, (S, n), int64.
    sampled : Tensor
        Sequences whose keys and values are kept, int64.
    counted : Counted
        Tokens that are counted.
    folder : Path or None
        Folder of tensors that do not fit into memory.
    """
    layers = len(decoder.layers)
    dtype, shape = decoder.dtype, torch.Size((*tokens.shape, decoder.config.hidden_size))
    placement = Placement((layers + 2) * shape.numel() * dtype.itemsize, decoder.device, folder)
    held: list[LayerActivations] = []
    samples = []
    captured = capture(decoder.model, tokens, folder=folder)
    for activations in follow(captured, layers, "layers forwards"):
        samples.append(_samples(activations, sampled, counted))
        if held:
            inputs = held[-1].outputs
        else:
            inputs = placement.empty(shape, dtype).copy_(activations.inputs)
        outputs = placement.empty(shape, dtype).copy_(activations.outputs)
        held.append(replace(activations, inputs=inputs, outputs=outputs))
    return held, placement.empty(shape, dtype), samples


def _samples(
    activations: LayerActivations, sampled: Tensor, counted: Counted
) -> tuple[Samples, Samples]:
    """Return the readers and the samples of the keys and of the values of a layer."""
    dtype, heads = activations.call.dtype, activations.kv_heads
    kept: tuple[list[Tensor], list[Tensor]] = ([], [])
    queries = torch.zeros((), dtype=torch.float64)
    for chunk in torch.arange(activations.sequences).split(SEQUENCES_PER_FORWARD):
        projections = activations.projections("pre", Batch(chunk))
        rows = projections.queries[:, :, counted.first :].double()  # (b, H_q, n, d)
        queries = queries + torch.einsum("bhnd,bhne->hde", rows, rows).cpu()
        of_chunk = torch.isin(chunk, sampled)
        for held, x in zip(kept, (projections.keys, projections.values), strict=True):
            rows = x[of_chunk.to(x.device)][:, :, counted.first :]
            held.append(rows.transpose(1, 2).flatten(2).to("cpu", dtype))  # (b, n, D)
    tokens = activations.sequences * (activations.length - counted.first)
    outputs = activations.output_weight().double().cpu()  # (H_q, d, hidden)
    by_query_head = (queries / tokens, outputs @ outputs.mT)  # (H_q, d, d) each
    readers = [x.unflatten(0, (heads, -1)).sum(dim=1) for x in by_query_head]
    keys, values = (torch.cat(held) for held in kept)
    return (readers[0], keys), (readers[1], values)


def differentiate_logits(
    model: PreTrainedModel,
    tokens: Tensor,
    states: Tensor,
    seed: int,
    start: int,
    gradient: Tensor,
) -> None:
    """Write the gradient of Σ_t log p(y_t) with respect to the last layer's outputs.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    tokens : Tensor
        Token ids, (S, n), int64, on the device of the model.
    states : Tensor
        Outputs of the last layer, (S, n, hidden).
    seed : int
        Seed of the sampled y.
    start : int
        Number of sequences of the same length whose random numbers come before.
    gradient : Tensor
        Destination, (S, n, hidden).
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(start):
        torch.rand(tokens.shape[1], generator=generator, dtype=torch.float64)
    for index, text in enumerate(tokens):
        uniform = torch.rand(len(text), generator=generator, dtype=torch.float64)
        for rows in torch.arange(len(text)).split(tokens_at_once(model)):
            part = states[index, rows].unsqueeze(0).to(text.device).requires_grad_()
            with torch.enable_grad():
                log_p = log_probabilities_from(model, text[rows].unsqueeze(0), part)
                drawn = draw(log_p.detach(), uniform[rows].unsqueeze(0))
                likelihood = log_p.gather(-1, drawn.unsqueeze(-1)).sum()
            gradient[index, rows] = torch.autograd.grad(likelihood, part)[0][0].to(gradient.device)


def draw(log_p: Tensor, uniform: Tensor) -> Tensor:
    """Return a token id for every position by inverse transform sampling, (B, m), int64.

    A sample depends on its own random number alone, neither on the device nor on other samples.

    Parameters
    ----------
    log_p : Tensor
        Log-probabilities, (B, m, vocabulary).
    uniform : Tensor
        Random numbers in [0, 1), (B, m), float64.
    """
    cumulative = log_p.double().exp().cumsum(dim=-1)
    thresholds = uniform.to(cumulative).unsqueeze(-1) * cumulative[..., -1:]
    ids = torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1)
    # NaN puts samples past the end; the moments are then refused.
    return ids.clamp(max=log_p.shape[-1] - 1)


def differentiate_layer(
    activations: LayerActivations,
    counted: Counted,
    gradient: Tensor,
    probes: tuple[int, int] | None,
) -> list[Moments]:
    """Return the moments of keys and values, and backpropagate from outputs to inputs.

    Parameters
    ----------
    activations : LayerActivations
        Of the layer.
    counted : Counted
        Tokens that are counted.
    gradient : Tensor
        Gradient with respect to the outputs, (S, n, hidden), which is replaced by the one with
        respect to the inputs, 0 at the tokens of a prompt: these are read without errors.
    probes : tuple of int, optional
        Seed and index of the first sequence, of random signs for the Gauss-Newton matrix of the
        layer's output; it is not computed if omitted.
    """
    features = activations.kv_heads * activations.head_dim
    sums = [Moments(features, activations.device, probes is not None) for _ in ("key", "value")]
    at_once = max(1, TOKENS_AT_ONCE // activations.length)
    with resident(activations.module):
        for chunk in torch.arange(activations.sequences).split(at_once):
            inputs = activations.inputs[chunk].to(activations.device).requires_grad_()
            with torch.enable_grad():
                output, *sites = _run_layer(activations, inputs)
            of_outputs: list[Tensor | None] = [None, None]
            if probes is not None:
                signs = _relative_signs(activations, chunk, output, counted, probes)
                of_outputs = [*torch.autograd.grad(output, sites, signs, retain_graph=True)]
            of_inputs, *of_sites = torch.autograd.grad(
                output, (inputs, *sites), gradient[chunk].to(output)
            )
            of_inputs[:, : counted.prompt or 0] = 0
            gradient[chunk] = of_inputs.to(gradient)
            rows = ..., counted.tokens, slice(None)
            for moments, x, of_x, of_output in zip(sums, sites, of_sites, of_outputs, strict=True):
                of_output = None if of_output is None else of_output[rows]
                moments.add(x.detach()[rows], of_x[rows], of_output)
    if not all(moments.finite for moments in sums):
        raise RunError(
            f"keys, values or gradients of layer {activations.layer} are not finite: load the "
            "model in float32 or bfloat16, and look at its weights"
        )
    return sums


def _relative_signs(
    activations: LayerActivations,
    sequences: Tensor,
    output: Tensor,
    counted: Counted,
    probes: tuple[int, int],
) -> Tensor:
    """Return random signs over the norm of the layer's output, (b, n, hidden).

    For signs u of mean 0 and variance 1, E[(Jᵀu)(Jᵀu)ᵀ] = JᵀJ (Hutchinson 1990). Every sequence
    has its own signs, independent of the sequences computed with it.
    """
    seed, start = probes
    signs = []
    for sequence in sequences.tolist():
        number = (seed * 1_000_003 + activations.layer) * 1_000_003 + start + sequence
        generator = torch.Generator().manual_seed(number % 2**63)
        signs.append(torch.randint(0, 2, output.shape[1:], generator=generator) * 2 - 1)
    detached = output.detach()
    norms = torch.linalg.vector_norm(detached, dim=(1, 2), keepdim=True)
    count = len(range(output.shape[1])[counted.tokens])
    # The error of a sequence is a sum over its tokens, statistics are averages over them.
    return torch.stack(signs).to(output) * count**0.5 / norms


def _run_layer(activations: LayerActivations, inputs: Tensor) -> tuple[Tensor, ...]:
    """Return outputs (b, n, hidden), keys and values (b, H_kv, n, d) of a layer.

    Gradients of the outputs reach keys and values through these tensors alone.
    """
    sites: list[Tensor] = []

    def attend_and_keep(
        module: nn.Module, queries: Tensor, keys: Tensor, values: Tensor, *ignored: Any
    ) -> Tensor:
        keys, values = keys.to(activations.dtype), values.to(activations.dtype)
        sites.extend((keys, values))
        queries = activations.rotate(queries.to(activations.dtype))
        rotated = activations.rotate(keys)
        mixed = attend(queries, rotated, values, activations.mask, activations.settings)
        return mixed.transpose(1, 2).to(activations.call.dtype)

    output = activations.call.output(inputs, attend_and_keep)
    return output, *sites

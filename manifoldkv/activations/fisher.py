"""Fisher information of keys and values: the cost of their errors in nats, layer by layer."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manifoldkv.activations.capture import capture
from manifoldkv.activations.layer import LayerActivations
from manifoldkv.activations.moments import LayerMoments, MomentSums
from manifoldkv.activations.placement import Placement
from manifoldkv.basis import Rotary, check_rotary
from manifoldkv.errors import ArgumentError, RunError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.head import log_probabilities_from, tokens_at_once
from manifoldkv.models.interface import attend
from manifoldkv.models.offloading import resident
from manifoldkv.models.support import evaluating
from manifoldkv.models.weights import differentiable
from manifoldkv.modes import in_own_modes
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_model, digest_of_tokens
from manifoldkv.runs.executors import on_threads
from manifoldkv.runs.files import only_run
from manifoldkv.runs.progress import follow
from manifoldkv.seeds import check_seed
from manifoldkv.text.tokens import checked_tokens

TOKENS_AT_ONCE = 1024
"""Number of tokens of a backward pass through a layer, at least one sequence."""
GRADIENT = "fisher-gradient"


@in_own_modes
def fisher_moments(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    seed: int = 0,
    rotary: Rotary = "pre",
    first: int = 0,
    prompt: int | None = None,
    folder: str | Path | None = None,
) -> list[LayerMoments]:
    """Return the moments and the Fisher information of keys and values, by layer.

    Let x be the keys or the values of one token in one layer, all KV heads side by side, and
    g = ∂/∂x Σ_t log p(y_t | tokens up to t), where t runs over the positions of the sequence and
    y_t is sampled from the model's next-token distribution p at t; the context is always the text.
    With F = E[g gᵀ], an error δ in x changes the distributions of the sequence by a
    Kullback-Leibler divergence of ½ δᵀ F δ nats, to second order. This is the Fisher information
    and not the empirical one, whose y is the text (Kunstner, Balles and Hennig 2019, Limitations of
    the empirical Fisher approximation, arXiv 1905.12558); theirs is of weights, this one of keys
    and values, averaged over all tokens but the `first` of a sequence. Costs of independent errors
    of tokens or sites add up. An error that moves a token to another expert has no gradient, and
    its cost is not included.

    The model runs layer by layer, forwards and then backwards, and each layer runs again for its
    gradients. The inputs of all layers, (layers + 2) · S · n · hidden elements in the dtype of the
    model, are held on the device if they fit there, else in memory, else in files.

    Parameters
    ----------
    model : PreTrainedModel
        Causal language model with rotary embeddings, left unchanged. It runs in evaluation mode,
        with attention in float32 or float64.
    tokens : Tensor
        Token ids, (S, n), int64, no padding.
    seed : int
        Seed of the sampled y. Each sequence takes the next n numbers of one generator.
    rotary : {"pre", "post"}
        Whether keys and their gradients are taken before rotation (after a key norm) or after it.
    first : int
        Number of first tokens of every sequence that are not counted: those that a cache stores
        uncompressed, and whose keys are an order of magnitude larger.
    prompt : int, optional
        Number of first tokens of every sequence that form a prompt, read without errors. Moments
        are those of its tokens, by their effect on the tokens after it. All tokens if omitted.
    folder : str or Path, optional
        Folder in which the moments of every layer are saved once computed. An interrupted run
        resumes from it with equal results, unless code, model, text or seed have changed.

    Raises
    ------
    ModelError
        If the attention of the model is not supported.
    ArgumentError
        If the token ids or the length exceed those of the model, `first` covers all tokens, or
        `prompt` is not between `first` and the length.
        If the seed is not an integer of 64 bits.
    PlanError
        If `rotary` is unknown.
    RunError
        If another run uses the folder, it cannot be written to, a file in it is damaged, the
        activations fit nowhere, or a gradient is not finite.
    """
    decoder = Decoder.of(model)
    check_seed(seed)
    check_rotary(rotary)
    tokens = checked_tokens(decoder.model, tokens)
    length = tokens.shape[1]
    if not 0 <= first < length:
        raise ArgumentError(f"first must be >= 0 and < {length} tokens, got {first}")
    if prompt is not None and not first < prompt < length:
        raise ArgumentError(f"prompt must be > first ({first}) and < {length} tokens, got {prompt}")
    lock = nullcontext() if folder is None else only_run(Path(folder))
    threads = torch.get_num_threads()
    model = decoder.model
    with lock, on_threads(threads), evaluating(model), differentiable(model), torch.no_grad():
        checkpoints = Checkpoints()
        if folder is not None:
            checkpoints = Checkpoints(Path(folder)).made_by(fisher_moments)
            checkpoints = checkpoints.keyed(
                model=digest_of_model(decoder.model),
                tokens=digest_of_tokens(tokens),
                threads=threads,
                seed=seed,
                rotary=rotary,
                first=first,
                prompt=prompt,
            )
        tokens, counted = tokens.to(decoder.device), slice(first, prompt)
        return _moments(decoder, tokens, seed, rotary, counted, checkpoints)


def _moments(
    decoder: Decoder,
    tokens: Tensor,
    seed: int,
    rotary: Rotary,
    counted: slice,
    checkpoints: Checkpoints,
) -> list[LayerMoments]:
    """Return the moments of all layers, of which the last ones may be resumed."""
    layers = len(decoder.layers)
    resumed, moments = _read(checkpoints, layers)
    below = layers - len(moments)
    if below:
        activations, gradient = _run_forwards(decoder, tokens, below, checkpoints.folder)
        if resumed is None:
            _differentiate_logits(decoder.model, tokens, activations[-1].outputs, seed, gradient)
            gradient[:, : counted.stop or 0] = 0
        else:
            gradient.copy_(resumed)
        for layer in follow(reversed(range(below)), below, "layers backwards"):
            moments[layer] = _differentiate_layer(activations.pop(), rotary, counted, gradient)
            _write(checkpoints, layer, moments[layer], gradient)
    return [moments[layer] for layer in range(layers)]


def _run_forwards(
    decoder: Decoder, tokens: Tensor, layers: int, folder: Path | None
) -> tuple[list[LayerActivations], Tensor]:
    """Return activations of the first layers, and an empty gradient (S, n, hidden) of outputs.

    The outputs of a layer and the inputs of the next one are the same tensor.
    """
    dtype, shape = decoder.dtype, torch.Size((*tokens.shape, decoder.config.hidden_size))
    placement = Placement((layers + 2) * shape.numel() * dtype.itemsize, decoder.device, folder)
    held: list[LayerActivations] = []
    captured = capture(decoder.model, tokens, list(range(layers)), folder=folder)
    for activations in follow(captured, layers, "layers forwards"):
        if held:
            inputs = held[-1].outputs
        else:
            inputs = placement.empty(shape, dtype).copy_(activations.inputs)
        outputs = placement.empty(shape, dtype).copy_(activations.outputs)
        held.append(replace(activations, inputs=inputs, outputs=outputs))
    return held, placement.empty(shape, dtype)


def _differentiate_logits(
    model: PreTrainedModel, tokens: Tensor, states: Tensor, seed: int, gradient: Tensor
) -> None:
    """Write the gradient of Σ_t log p(y_t) with respect to the last layer's outputs.

    Outputs `states` and the destination `gradient` are (S, n, hidden); tokens are on the device of
    the model.
    """
    generator = torch.Generator().manual_seed(seed)
    for index, text in enumerate(follow(tokens, len(tokens), "logits")):
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


def _differentiate_layer(
    activations: LayerActivations, rotary: Rotary, counted: slice, gradient: Tensor
) -> LayerMoments:
    """Return the moments of a layer, and backpropagate `gradient` from its outputs to its inputs.

    The gradient (S, n, hidden) is replaced in place and is 0 at the tokens of a prompt, which are
    read without errors. The slice `counted` goes from `first` to the end of the prompt.
    """
    features = activations.kv_heads * activations.head_dim
    sums = [MomentSums(features, activations.device) for _ in ("key", "value")]
    at_once = max(1, TOKENS_AT_ONCE // activations.length)
    with resident(activations.module):
        for chunk in torch.arange(activations.sequences).split(at_once):
            inputs = activations.inputs[chunk].to(activations.device).requires_grad_()
            with torch.enable_grad():
                output, *sites = _run_layer(activations, inputs, rotary)
            of_inputs, *of_sites = torch.autograd.grad(
                output, (inputs, *sites), gradient[chunk].to(output)
            )
            of_inputs[:, : counted.stop or 0] = 0
            gradient[chunk] = of_inputs.to(gradient)
            for site_sums, x, of_x in zip(sums, sites, of_sites, strict=True):
                site_sums.add(x.detach()[:, :, counted], of_x[:, :, counted])
    moments = LayerMoments(*[site_sums.moments() for site_sums in sums])
    if not all(x.isfinite().all() for x in moments.tensors().values()):
        raise RunError(
            f"keys, values or gradients of layer {activations.layer} are not finite: load the "
            "model in float32 or bfloat16, and look at its weights"
        )
    return moments


def _run_layer(activations: LayerActivations, inputs: Tensor, rotary: Rotary) -> tuple[Tensor, ...]:
    """Return outputs (b, n, hidden), keys and values (b, H_kv, n, d) of a layer.

    Gradients of the outputs reach keys and values through these tensors alone.
    """
    sites: list[Tensor] = []

    def attend_and_keep(
        module: nn.Module, queries: Tensor, keys: Tensor, values: Tensor, *ignored: Any
    ) -> Tensor:
        keys, values = keys.to(activations.dtype), values.to(activations.dtype)
        rotated = activations.rotate(keys)
        sites.extend((keys if rotary == "pre" else rotated, values))
        queries = activations.rotate(queries.to(activations.dtype))
        mixed = attend(queries, rotated, values, activations.mask, activations.settings)
        return mixed.transpose(1, 2).to(activations.call.dtype)

    output = activations.call.output(inputs, attend_and_keep)
    return output, *sites


def _read(checkpoints: Checkpoints, layers: int) -> tuple[Tensor | None, dict[int, LayerMoments]]:
    """Return the gradient and the moments of the last layers that an interrupted run saved."""
    last = checkpoints.read_tensors(GRADIENT)
    if last is None:
        return None, {}
    moments = {}
    for layer in range(int(last["layer"]), layers):
        tensors = checkpoints.read_tensors(_name(layer))
        if tensors is None:  # deleted, because it was damaged
            return None, {}
        moments[layer] = LayerMoments.from_tensors(tensors)
    return last["gradient"], moments


def _write(checkpoints: Checkpoints, layer: int, moments: LayerMoments, gradient: Tensor) -> None:
    """Save the moments of a layer, then the gradient with respect to its inputs."""
    checkpoints.write_tensors(_name(layer), moments.tensors())
    needed = gradient if layer else gradient[:0]  # nothing comes before the first layer
    state = {"layer": torch.tensor(layer), "gradient": needed.cpu()}
    checkpoints.write_tensors(GRADIENT, state)


def _name(layer: int) -> str:
    return f"fisher-{layer}"

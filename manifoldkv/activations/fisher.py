"""What an error in keys and values costs in nats: Fisher information, layer by layer."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manifoldkv.activations.call import call_layer
from manifoldkv.activations.capture import capture
from manifoldkv.activations.layer import LayerActivations
from manifoldkv.activations.placement import Placement
from manifoldkv.basis import Rotary, Site, check_rotary
from manifoldkv.errors import ArgumentError, RunError
from manifoldkv.models.head import predictions_from, tokens_at_once
from manifoldkv.models.interface import attend
from manifoldkv.models.offloading import resident
from manifoldkv.models.support import (
    attention_of,
    check_supported,
    decoder_layers,
    evaluating,
    unwrapped,
)
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_model, digest_of_tokens
from manifoldkv.runs.executors import on_threads
from manifoldkv.runs.files import only_run
from manifoldkv.runs.progress import follow
from manifoldkv.seeds import check_seed
from manifoldkv.text.tokens import checked_tokens

TOKENS_AT_ONCE = 1024
"""Tokens that pass through a layer together with their gradients, one sequence at least."""
GRADIENT = "fisher-gradient"
SITES: tuple[Site, ...] = get_args(Site)


@dataclass(frozen=True, eq=False, repr=False)
class SiteMoments:
    """Moments of the keys or values of a layer, and of the gradients with respect to them.

    All KV heads of a token are side by side: D = H_kv · d features. Everything is float64, on the
    CPU.

    Parameters
    ----------
    mean : Tensor
        Over all tokens, (D,).
    covariance : Tensor
        E[(x - mean)(x - mean)ᵀ] over all tokens, (D, D).
    fisher : Tensor
        E[g gᵀ] over all tokens, (D, D), as `fisher_moments` describes it.
    tokens : int
        How many there are.
    """

    mean: Tensor
    covariance: Tensor
    fisher: Tensor
    tokens: int

    @property
    def second(self) -> Tensor:
        """Return E[x xᵀ] over all tokens, (D, D)."""
        return self.covariance + torch.outer(self.mean, self.mean)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SiteMoments):
            return NotImplemented
        pairs = zip(self.tensors().values(), other.tensors().values(), strict=True)
        return all(torch.equal(mine, its) for mine, its in pairs)

    def __hash__(self) -> int:
        return hash((self.tokens, self.mean.shape))

    def __repr__(self) -> str:
        return f"SiteMoments({len(self.mean)} features, {self.tokens} tokens)"

    def tensors(self) -> dict[str, Tensor]:
        """Return all fields by their names, the number of tokens as a scalar, int64."""
        return {
            "mean": self.mean,
            "covariance": self.covariance,
            "fisher": self.fisher,
            "tokens": torch.tensor(self.tokens),
        }


@dataclass(frozen=True)
class LayerMoments:
    """Moments of the two sites of a layer.

    Parameters
    ----------
    key, value : SiteMoments
        Of its keys and of its values.
    """

    key: SiteMoments
    value: SiteMoments

    def of(self, site: Site) -> SiteMoments:
        """Return the moments of a site."""
        return self.key if site == "key" else self.value


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
    """Return, for every layer, the moments of keys and values and their Fisher information.

    Let x be the keys or the values of one token in one layer, all KV heads side by side, and
    g = ∂/∂x Σ_t log p(y_t | tokens up to t), where t runs over the positions of the sequence and
    y_t is drawn from the prediction p of the model itself there: the context stays the text. With
    F = E[g gᵀ], an error δ in x moves the predictions of the sequence by the Kullback-Leibler
    divergence ½ δᵀ F δ nats, to second order. This is the Fisher information and not the empirical
    one, whose y would be the text (Kunstner, Balles and Hennig 2019, Limitations of the empirical
    Fisher approximation, arXiv 1905.12558); theirs is that of weights, this one that of keys and
    values, averaged over all tokens but the `first` of a sequence. Errors of different tokens
    or sites that are independent add up. What an error costs that moves a token to another expert
    is not in it: no gradient sees that.

    The model runs layer by layer, forwards and then backwards, and each layer runs again for its
    gradients. Held are the inputs of all layers, (layers + 2) · S · n · hidden elements in the
    dtype of the model: on the device if they fit there, else in memory, else in files.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with rotary embeddings. It is left as it was; no weight gets a
        gradient, and what is measured is the model in evaluation mode. Attention is computed in
        float32 at least.
    tokens : Tensor
        Token ids, (S, n), int64, no padding.
    seed : int
        Of the y. Each sequence takes the next n numbers of one generator.
    rotary : {"pre", "post"}
        Whether keys and their gradients are those before rotation (and after a key norm) or those
        after it.
    first : int
        Tokens at the beginning of every sequence that do not count: those that a cache keeps as
        they are, and whose keys are an order of magnitude larger.
    prompt : int, optional
        So many tokens at the beginning of every sequence are a prompt, read without errors; what
        errors in its keys and values cost is what they cost the tokens after it. The moments are
        then those of the prompt's tokens alone. Every token counts, and is read, if omitted.
    folder : str or Path, optional
        Where the moments of every layer are stored as soon as they are there. A run that was
        interrupted goes on there when it is started again, and ends in the same moments. Nothing
        is taken from there that other code or another model, text or seed has made.

    Raises
    ------
    ModelError
        If the attention of the model cannot be handled.
    ArgumentError
        If the tokens are not ids and lengths that the model takes, all of them are `first`, or no
        token is left for the prompt or after it.
        If the seed is not an integer of 64 bits.
    PlanError
        If keys cannot be stored as `rotary` says.
    RunError
        If another run is at work in the folder, it cannot be written to, a file in it is damaged,
        or the activations fit nowhere.
        If a gradient is not finite.
    """
    model = unwrapped(model)
    check_supported(model)
    check_seed(seed)
    check_rotary(rotary)
    tokens = checked_tokens(model, tokens)
    if not 0 <= first < tokens.shape[1]:
        raise ArgumentError(f"of sequences of {tokens.shape[1]} tokens, {first} cannot be left out")
    if prompt is not None and not first < prompt < tokens.shape[1]:
        raise ArgumentError(
            f"of sequences of {tokens.shape[1]} tokens, {prompt} cannot be a prompt without its "
            f"first {first}"
        )
    counted = slice(first, prompt)
    alone = nullcontext() if folder is None else only_run(Path(folder))
    threads = torch.get_num_threads()
    with alone, on_threads(threads), evaluating(model), torch.no_grad():
        checkpoints = Checkpoints()
        if folder is not None:
            checkpoints = Checkpoints(Path(folder)).made_by(fisher_moments)
            checkpoints = checkpoints.keyed(
                model=digest_of_model(model),
                tokens=digest_of_tokens(tokens),
                threads=threads,
                seed=seed,
                rotary=rotary,
                first=first,
                prompt=prompt,
            )
        return _moments(model, tokens.to(model.device), seed, rotary, counted, checkpoints)


def _moments(
    model: PreTrainedModel,
    tokens: Tensor,
    seed: int,
    rotary: Rotary,
    counted: slice,
    checkpoints: Checkpoints,
) -> list[LayerMoments]:
    """Return the moments of all layers: those that are stored, and the others below them."""
    layers = len(decoder_layers(model))
    stored, found = _read(checkpoints, layers)
    below = layers - len(found)
    if below:
        activations, gradient = _run_forwards(model, tokens, below, checkpoints.folder)
        if stored is None:
            _differentiate_predictions(model, tokens, activations[-1].outputs, seed, gradient)
            gradient[:, : counted.stop or 0] = 0
        else:
            gradient.copy_(stored)
        for layer in follow(reversed(range(below)), below, "layers backwards"):
            found[layer] = _differentiate_layer(activations.pop(), rotary, counted, gradient)
            _write(checkpoints, layer, found[layer], gradient)
    return [found[layer] for layer in range(layers)]


def _run_forwards(
    model: PreTrainedModel, tokens: Tensor, layers: int, folder: Path | None
) -> tuple[list[LayerActivations], Tensor]:
    """Return activations of the first layers, all held, and room for a gradient of outputs.

    What a layer puts out is what the next one takes in: the same tensor.
    """
    shape = (*tokens.shape, model.config.get_text_config().hidden_size)
    nbytes = (layers + 2) * torch.Size(shape).numel() * model.dtype.itemsize
    placement = Placement(nbytes, model.device, folder)
    held: list[LayerActivations] = []
    captured = capture(model, tokens, list(range(layers)), folder=folder)
    for activations in follow(captured, layers, "layers forwards"):
        if held:
            inputs = held[-1].outputs
        else:
            inputs = placement.empty(shape, model.dtype).copy_(activations.inputs)
        outputs = placement.empty(shape, model.dtype).copy_(activations.outputs)
        held.append(replace(activations, inputs=inputs, outputs=outputs))
    return held, placement.empty(shape, model.dtype)


def _differentiate_predictions(
    model: PreTrainedModel, tokens: Tensor, states: Tensor, seed: int, gradient: Tensor
) -> None:
    """Write the gradient of Σ_t log p(y_t) with respect to the last layer's outputs.

    Parameters
    ----------
    model, tokens, seed
        As in `fisher_moments`; the tokens are on the device of the model.
    states : Tensor
        Outputs of the last layer, (S, n, hidden).
    gradient : Tensor
        Where it is written, likewise.
    """
    generator = torch.Generator().manual_seed(seed)
    for index, text in enumerate(follow(tokens, len(tokens), "predictions")):
        uniform = torch.rand(len(text), generator=generator, dtype=torch.float64)
        for rows in torch.arange(len(text)).split(tokens_at_once(model)):
            part = states[index, rows].unsqueeze(0).to(text.device).requires_grad_()
            with torch.enable_grad():
                predicted = predictions_from(model, text[rows].unsqueeze(0), part)
                drawn = draw(predicted.detach(), uniform[rows].unsqueeze(0))
                likelihood = predicted.gather(-1, drawn.unsqueeze(-1)).sum()
            (found,) = torch.autograd.grad(likelihood, part)
            gradient[index, rows] = found[0].to(gradient.device)


def draw(predicted: Tensor, uniform: Tensor) -> Tensor:
    """Return a token for every position, by the inverse of the distribution function.

    So a draw depends on nothing but its own number: neither on the device nor on what else is
    drawn with it.

    Parameters
    ----------
    predicted : Tensor
        Log-probabilities, (B, m, vocabulary).
    uniform : Tensor
        Numbers from [0, 1), (B, m), float64.

    Returns
    -------
    Tensor
        Token ids, (B, m), int64, on the device of the predictions.
    """
    cumulative = predicted.double().exp().cumsum(dim=-1)
    wanted = uniform.to(cumulative).unsqueeze(-1) * cumulative[..., -1:]
    found = torch.searchsorted(cumulative, wanted, right=True).squeeze(-1)
    # Past the end is a draw only where predictions are no numbers, which the moments will show.
    return found.clamp(max=predicted.shape[-1] - 1)


def _differentiate_layer(
    activations: LayerActivations, rotary: Rotary, counted: slice, gradient: Tensor
) -> LayerMoments:
    """Return the moments of a layer, and take a gradient from its outputs to its inputs.

    Parameters
    ----------
    activations : LayerActivations
        The layer and what enters it.
    rotary
        As in `fisher_moments`.
    counted : slice
        Of the tokens: from `first` to the end of the prompt, if there is one.
    gradient : Tensor
        With respect to its outputs, (S, n, hidden); afterwards with respect to its inputs. It is 0
        at the tokens of a prompt, which are read without errors.
    """
    features = activations.kv_heads * activations.head_dim
    sums = {site: _Sums(features, activations.device) for site in SITES}
    at_once = max(1, TOKENS_AT_ONCE // activations.length)
    with resident(activations.module):
        for chunk in torch.arange(activations.sequences).split(at_once):
            inputs = activations.inputs[chunk].to(activations.device).requires_grad_()
            with torch.enable_grad():
                output, *sites = _run_layer(activations, inputs, rotary)
            into, *gradients = torch.autograd.grad(
                output, (inputs, *sites), gradient[chunk].to(output)
            )
            into[:, : counted.stop or 0] = 0
            gradient[chunk] = into.to(gradient)
            for of_site, x, of_x in zip(sums.values(), sites, gradients, strict=True):
                of_site.add(x.detach()[:, :, counted], of_x[:, :, counted])
    found = LayerMoments(*(of_site.moments() for of_site in sums.values()))
    if not all(x.isfinite().all() for site in SITES for x in found.of(site).tensors().values()):
        raise RunError(
            f"keys, values or gradients of layer {activations.layer} are not finite: load the "
            "model in float32 or bfloat16, and look at its weights"
        )
    return found


def _run_layer(
    activations: LayerActivations, inputs: Tensor, rotary: Rotary
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of a layer for inputs (b, n, hidden), and the keys and values it made.

    The latter are (b, H_kv, n, d), and all that the outputs owe to keys and values they owe to
    these tensors.
    """
    weight = attention_of(activations.module).o_proj.weight
    made: list[Tensor] = []

    def attend_and_keep(
        module: nn.Module, queries: Tensor, keys: Tensor, values: Tensor, *ignored: Any
    ) -> Tensor:
        queries, keys, values = (x.to(activations.dtype) for x in (queries, keys, values))
        rotated = activations.rotate(keys)
        made.extend((keys if rotary == "pre" else rotated, values))
        queries = activations.rotate(queries)
        mixed = attend(queries, rotated, values, activations.mask, activations.settings)
        return mixed.transpose(1, 2).to(weight.dtype)

    output = call_layer(
        activations.module,
        inputs.to(weight.dtype),
        attend_and_keep,
        activations.cos.shape[-1],
        activations.keywords,
    )
    keys, values = made
    return output, keys, values


class _Sums:
    """Sums over tokens of features, and of products of features and of gradients, in float64."""

    def __init__(self, features: int, device: torch.device) -> None:
        self._tokens = 0
        self._features = torch.zeros(features, dtype=torch.float64, device=device)
        self._products = torch.zeros(features, features, dtype=torch.float64, device=device)
        self._gradients = torch.zeros_like(self._products)

    def add(self, x: Tensor, gradient: Tensor) -> None:
        """Add keys or values and the gradients with respect to them, (b, H_kv, n, d) each."""
        x, gradient = (
            each.transpose(1, 2).flatten(2).flatten(0, 1).double() for each in (x, gradient)
        )
        self._tokens += len(x)
        self._features += x.sum(dim=0)
        self._products += x.mT @ x
        self._gradients += gradient.mT @ gradient

    def moments(self) -> SiteMoments:
        """Return the moments of all that was added."""
        mean = self._features / self._tokens
        covariance = self._products / self._tokens - torch.outer(mean, mean)
        fisher = self._gradients / self._tokens
        # A product of matrices need not be symmetric in its last bits.
        covariance, fisher = ((x + x.mT).cpu() / 2 for x in (covariance, fisher))
        return SiteMoments(mean.cpu(), covariance, fisher, self._tokens)


def _read(checkpoints: Checkpoints, layers: int) -> tuple[Tensor | None, dict[int, LayerMoments]]:
    """Return what is stored: moments of the last layers, and the gradient of what enters them."""
    last = checkpoints.read_tensors(GRADIENT)
    if last is None:
        return None, {}
    found = {}
    for layer in range(int(last["layer"]), layers):
        tensors = checkpoints.read_tensors(_name(layer))
        if tensors is None:  # deleted, because it was damaged
            return None, {}
        found[layer] = _from_tensors(tensors)
    return last["gradient"], found


def _write(checkpoints: Checkpoints, layer: int, moments: LayerMoments, gradient: Tensor) -> None:
    """Store the moments of a layer, and then the gradient with respect to its inputs."""
    tensors = {
        f"{site}.{name}": tensor
        for site in SITES
        for name, tensor in moments.of(site).tensors().items()
    }
    checkpoints.write_tensors(_name(layer), tensors)
    needed = gradient if layer else gradient[:0]  # nothing comes before the first layer
    state = {"layer": torch.tensor(layer), "gradient": needed.cpu()}
    checkpoints.write_tensors(GRADIENT, state)


def _from_tensors(tensors: dict[str, Tensor]) -> LayerMoments:
    def of_site(site: Site) -> SiteMoments:
        mean, covariance, fisher = (
            tensors[f"{site}.{name}"] for name in ("mean", "covariance", "fisher")
        )
        return SiteMoments(mean, covariance, fisher, int(tensors[f"{site}.tokens"]))

    return LayerMoments(of_site("key"), of_site("value"))


def _name(layer: int) -> str:
    return f"fisher-{layer}"

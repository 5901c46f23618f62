"""Coded caches without the tokens that a second reading of the prompt needs least."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from math import ceil, inf, nan
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from manifoldkv import CompressionPlan
from manifoldkv.core.errors import ArgumentError
from manifoldkv.evaluate.retrieval import Prompts
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.interface import (
    AttentionSettings,
    attend,
    attention_weights,
    intercepted,
)
from manifoldkv.models.support import linear_weight
from methods.base import Baseline, Setting, register_method
from methods.bits import Best
from methods.plans import PlanMethod
from methods.windows import heads, stacked

SHARE = 1 / 2
"""Share of the bytes that all tokens would take in the plan, down to plans of the ratio `LEAST`."""
LEAST = 1 / 16
"""Ratio below which a smaller share of the tokens loses less than a smaller plan."""
PART, CUE = 128, 8
"""Tokens that are read again at once, and those before them that are read with them."""


@register_method("evicted")
class Evicted(Baseline):
    """The recipe best at a larger ratio, without the tokens that matter least (KVzip).

    A token of a layer matters as much as the largest attention that any query head pays to it while
    the prompt is read a second time, times the norm of its value behind the output projection, over
    that of the hidden state of the reader: KVzip (Kim et al., arXiv:2505.23416) as normalised for
    KVzap (arXiv:2601.07891), without an instruction between the readings. The tokens that matter
    most, of all layers, are kept within one budget of bytes, beside the sink tokens; a bit for each
    layer and token says which. KVzip chooses by head; here the heads of a layer share a basis, and
    so their tokens. Of dropped tokens only what the plan predicts is an input of predictions in the
    layers above. Tokens are dropped once, after a prompt: a text that is read token by token has no
    loss. Simulated: memory holds all tokens, and those after the prompt are uncompressed.
    """

    def __init__(self, setting: Setting, ratio: float) -> None:
        super().__init__(setting, ratio)
        if ratio > SHARE:
            raise ArgumentError(f"ratio must be <= {SHARE:g}, the share of tokens, got {ratio:g}")
        self._of_all = Best(setting, max(ratio / SHARE, LEAST))

    @property
    def plan(self) -> CompressionPlan:
        """The plan of the kept tokens."""
        return self._of_all.plan

    def planned(self) -> Sequence[PlanMethod]:
        return (self._of_all,)

    def nbytes(self, tokens: int) -> int:
        window = self.setting.window
        coded = self.ratio * self.setting.stock_bytes(window) - self._sink_bytes(window)
        return self._sink_bytes(tokens) + int(coded * tokens / window)

    def perplexity(self, tokens: Tensor) -> None:
        """Return None: tokens are dropped once, after a prompt."""

    def facts(self) -> dict[str, float]:
        return {"basis_bytes": self.plan.basis_nbytes(), "attention_work": nan}

    @contextmanager
    def holder(self, model: PreTrainedModel, prompts: Prompts) -> Iterator[Callable[[], Cache]]:
        kept = self.kept(importance(model, prompts))
        coded = heads(model, *reconstructed(self.plan, *stacked(model, prompts.stock, 0), kept), 0)
        sink = (torch.arange(kept.shape[2], device=kept.device) < self.plan.sinks).unsqueeze(1)

        def filled() -> Cache:
            cache = DynamicCache(config=model.config)
            for index, (layer, keys, values) in enumerate(
                zip(prompts.stock.layers, *coded, strict=True)
            ):
                exact = torch.where(sink, layer.keys, keys), torch.where(sink, layer.values, values)
                cache.update(*exact, index)
            return cache

        with hidden(model, kept):
            yield filled

    def kept(self, importance: Tensor) -> Tensor:
        """Return which tokens of prompts are kept, of their `importance`, (layers, B, n), bool."""
        layers, texts, tokens = importance.shape
        worth = importance.transpose(0, 1).clone()  # (B, layers, n)
        worth[..., : self.plan.sinks] = inf
        order = worth.flatten(1).argsort(dim=1, descending=True, stable=True)
        left = self.nbytes(tokens) - self._sink_bytes(tokens) - layers * ceil(tokens / 8)
        fits = self._token_bytes.to(order.device)[order // tokens].cumsum(dim=1) <= left
        kept = torch.zeros_like(fits).scatter_(1, order, fits)
        return kept.view(texts, layers, tokens).transpose(0, 1)

    def _sink_bytes(self, tokens: int) -> int:
        return self.setting.stock_bytes(min(tokens, self.plan.sinks))

    @cached_property
    def _token_bytes(self) -> Tensor:
        """Bytes of the latents of a token, (layers,)."""
        by_layer = [
            sum(site.nbytes(1, torch.bfloat16) for _, site in layer.sites)
            for layer in self.plan.layers
        ]
        return torch.tensor(by_layer)


def reconstructed(
    plan: CompressionPlan, keys: Tensor, values: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Return keys and values from the codes of the kept tokens, and predictions of the others.

    Keys before rotation and values are (layers, B, n, F), `kept` is (layers, B, n).
    """
    context = plan.predictor_context()
    held: tuple[list[Tensor], list[Tensor]] = ([], [])
    for index, (layer, mask) in enumerate(zip(plan.layers, kept.flatten(1), strict=True)):
        context.begin(index)
        for parts, (_, site), exact in zip(
            held, layer.sites, (keys[index], values[index]), strict=True
        ):
            x = exact.flatten(0, 1).float()
            y = site.expected(x, context).expand_as(x).clone()
            latents = (x - y)[mask] @ site.basis.down[0].to(x)
            y[mask] += site.quantizer.reconstruct(latents) @ site.basis.up[0].to(x).mT
            context.add(y)
            parts.append(y.view_as(exact).to(exact.dtype))
    return torch.stack(held[0]), torch.stack(held[1])


@torch.no_grad()
def importance(model: PreTrainedModel, prompts: Prompts) -> Tensor:
    """Return what the tokens of the cache are worth to a second reading, (layers, B, n)."""
    cache, decoder = copy.deepcopy(prompts.stock), Decoder.of(model)
    tokens = cache.get_seq_length()
    best = [layer.values.new_zeros(1) for layer in prompts.stock.layers]
    readers = torch.ones(1)

    def measure(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal readers
        readers = (args[0] if args else kwargs["hidden_states"]).norm(dim=-1)  # (B, m)

    def record(
        module: nn.Module,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        arguments: dict[str, Any],
    ) -> Tensor:
        settings = AttentionSettings.from_arguments(module, arguments)
        weights = attention_weights(queries, keys, mask, settings)[..., :tokens].flatten(1, 2)
        found = (weights / readers[:, None, :, None]).amax(dim=2)  # (B, H_q, n)
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        best[layer] = found.maximum(best[layer])
        return attend(queries, keys, values, mask, settings).transpose(1, 2)

    with ExitStack() as stack, intercepted(model.config):
        for layer in decoder.layers:
            stack.callback(layer.register_forward_pre_hook(measure, with_kwargs=True).remove)
        for start in range(0, tokens, PART):
            part = prompts.ids[:, max(0, start - CUE) : min(tokens, start + PART)]
            model(input_ids=part, past_key_values=cache, logits_to_keep=1, manifoldkv_attend=record)
            cache.crop(-part.shape[1])
    norms = map(output_norms, decoder.attentions, (layer.values for layer in prompts.stock.layers))
    return torch.stack([(x * norm).amax(dim=1) for x, norm in zip(best, norms, strict=True)])


def output_norms(attention: nn.Module, values: Tensor) -> Tensor:
    """Return the norms (B, H_q, n) of values (B, H_kv, n, d) behind the output projection."""
    weight = linear_weight(attention.o_proj).to(values)  # type: ignore[arg-type]
    weight = weight.unflatten(1, (-1, values.shape[-1]))  # (hidden, H_q, d)
    gram = torch.einsum("ohd,ohe->hde", weight, weight)
    values = values.repeat_interleave(len(gram) // values.shape[1], dim=1)
    return (values @ gram * values).sum(dim=-1).clamp(min=0).sqrt()


@contextmanager
def hidden(model: PreTrainedModel, kept: Tensor) -> Iterator[None]:
    """Hide those of the first n tokens that are not kept, (layers, B, n), from all later ones."""

    def hide(
        seen: Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask = kwargs["attention_mask"].expand(len(seen), -1, -1, -1).clone()
        mask[..., : seen.shape[1]] &= seen[:, None, None]
        return args, kwargs | {"attention_mask": mask}

    with ExitStack() as stack, intercepted(model.config):
        for attention, seen in zip(Decoder.of(model).attentions, kept, strict=True):
            hook = attention.register_forward_pre_hook(partial(hide, seen), with_kwargs=True)
            stack.callback(hook.remove)
        yield

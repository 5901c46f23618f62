"""Running a model on a compressed cache, and leaving it as it was."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedModel,
)
from transformers.masking_utils import sdpa_mask

from manifoldkv.cache.attention import CachedAttention
from manifoldkv.cache.calls import (
    boolean_masks,
    check_cache,
    check_one_text_a_row,
    check_unpadded,
    new_tokens,
)
from manifoldkv.cache.forward import ForwardPass
from manifoldkv.cache.held import NewCache, held_nbytes
from manifoldkv.cache.hooks import (
    WithoutGradient,
    give_generate_a_cache,
    refuse_continuous_batching,
    register,
)
from manifoldkv.cache.layers import CompressedCache, CompressedLayer
from manifoldkv.cache.running import running_attentions
from manifoldkv.errors import CacheError, ModelError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.interface import (
    Attend,
    AttentionSettings,
    Rotate,
    attend,
    intercepted,
)
from manifoldkv.models.replacing import replace_attribute
from manifoldkv.models.rotary import Angles, rotation_of_keys
from manifoldkv.models.support import uncompiled
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.plan.uncompressed import check_stock, checked_positions, unpadded
from manifoldkv.windows import cached_tokens

NAME = "manifoldkv-cache"

NOT_COMPILED = "the decoder is not compiled inside a compressed block: do without fullgraph=True"

Prefill = Literal["compressed", "exact"]


@contextmanager
def compressed(
    model: PreTrainedModel,
    plan: CompressionPlan,
    *,
    prefill: Prefill = "compressed",
) -> Iterator[NewCache]:
    """Let a model run on compressed caches inside the block.

    ``model.generate(**inputs, past_key_values=new_cache())`` and ``model(input_ids=…,
    past_key_values=new_cache())`` fill and read a compressed cache. A call without a cache gets a
    fresh one: nothing inside the block sees an uncompressed key or value. The model is the same as
    before when the block is left, also by an error.

    Parameters
    ----------
    model : PreTrainedModel
        The model the plan was made for, in any floating dtype; also inside what `torch.compile` or
        PEFT put around it. Compiled or not, its decoder is not compiled inside the block.
    plan : CompressionPlan
        From `compress` or `CompressionPlan.load`.
    prefill : {"compressed", "exact"}
        With ``"compressed"`` every query attends to stored latents, also of its own prompt and its
        own token: a prompt in chunks and at once give the same output, and a perplexity is that
        of the cache. With ``"exact"`` the tokens of a call of several tokens see each other
        uncompressed; later calls attend to stored latents.

    Yields
    ------
    callable
        ``new_cache(stock=None, position_ids=None)`` makes a `CompressedCache`: an empty one, or one
        that holds the tokens of a `DynamicCache` which the model filled outside of the block, as a
        prompt under ``prefill="exact"`` would have left them. The stock cache is unchanged, for
        the next plan. `position_ids`, (1 or B, n), are those the model was called with, if any;
        for padded texts `generate` takes ``(mask.cumsum(1) - 1).masked_fill(mask == 0, 0)``.
        ``new_cache.constant_nbytes()`` is the size of what attention holds beside tokens: bases,
        predictors and tables. They are prepared by the first block and its first step, and kept
        until the plan is deleted or runs in another dtype or on another device.

    Raises
    ------
    ModelError
        If the attention of the model cannot be handled.
    PlanError
        If the plan was made for another model (see `CompressionPlan.transferred_to`), or for caches
        that are stored and not attended to.
    CacheError
        If the model is inside such a block already, if the options contradict each other, or, from
        a call inside the block, if its arguments are not supported, or a gradient passes through
        it.
    """
    decoder = Decoder.of(model)
    plan.check_model(decoder)
    plan.check_attended()
    if prefill not in ("compressed", "exact"):
        raise CacheError(f"unknown prefill {prefill!r}; known: compressed, exact")
    config = decoder.config
    if config._attn_implementation == NAME:
        raise CacheError("the model is already inside a compressed block")
    run = _Run(decoder, plan, prefill)
    with ExitStack() as stack, intercepted(config, NAME):
        run.enter(stack)
        yield run


class _Run:
    """The hooks of one `compressed` block."""

    def __init__(self, decoder: Decoder, plan: CompressionPlan, prefill: Prefill) -> None:
        self._decoder = decoder
        self._model = decoder.model
        self._plan = plan
        self._exact_prefill = prefill == "exact"
        self._config = decoder.config
        self._parameters = list(inspect.signature(self._model.get_decoder().forward).parameters)
        self._places: list[tuple[torch.dtype, torch.device]] = []
        self._attentions: list[CachedAttention] = []
        self._follow_model()
        self._pass = ForwardPass(type(self._model).__name__)
        self._rotate_keys: dict[int, Rotate] = {}

    def _follow_model(self) -> None:
        """Move bases to where the layers are now, in the dtype of the model."""
        dtype = self._decoder.dtype
        places = [(dtype, device) for device in self._decoder.devices]
        if places != self._places:
            self._attentions = running_attentions(
                self._plan, places, exact_prefill=self._exact_prefill
            )
            self._places = places

    def __call__(
        self, stock: DynamicCache | None = None, position_ids: Tensor | None = None
    ) -> CompressedCache:
        """Return a cache for the current dtype and devices, filled from a stock cache if any.

        Parameters
        ----------
        stock : DynamicCache, optional
            Filled by the model outside of the block, in the dtype and on the devices it has now.
        position_ids : Tensor, optional
            Positions of the n tokens in the calls of the model, int64 or int32 (1 or B, n); 0, …,
            n - 1 if omitted. They are used for keys that are stored before rotation, and tell where
            the texts of a padded batch begin, whose first tokens a plan with `sinks` keeps.

        Returns
        -------
        CompressedCache
            Cache as after a call with the same tokens under ``prefill="exact"``.

        Raises
        ------
        CacheError
            If `stock` is another kind of cache, incomplete, or of another model, dtype or device,
            or if `position_ids` are not those of its tokens.
        """
        dtype, devices = self._decoder.dtype, self._decoder.devices
        cache = CompressedCache(self._plan, dtype, devices)
        if stock is not None:
            check_stock(stock, self._plan, dtype, devices)
        positions = checked_positions(position_ids, stock)
        if stock is not None and positions.shape[1]:
            self._take_over(cache, stock, positions.to(devices[0]))
        return cache

    def constant_nbytes(self) -> int:
        """Return the bytes that attention holds beside the tokens of caches.

        Tensors of the plan itself are left out, `CompressionPlan.basis_nbytes` in float32.
        """
        return held_nbytes(self._attentions)

    @torch.no_grad()
    def _take_over(self, cache: CompressedCache, stock: DynamicCache, positions: Tensor) -> None:
        """Store the tokens of a stock cache, placed at (1 or B, n), in an empty one."""
        self._follow_model()
        tokens = positions.shape[1]
        visible = None if self._plan.rounds_runs else unpadded(positions)
        if self._plan.rotary == "pre":
            cache.append_positions(positions)
        context = self._plan.predictor_context()
        for index, (layer, held) in enumerate(zip(cache.layers, stock.layers, strict=True)):
            count = cached_tokens(tokens, layer.window)
            keys, values = held.keys[:, :, -count:], held.values[:, :, -count:]
            layer.tokens_seen = tokens - count  # and the others now
            layer.sinks.take(keys, values, layer.tokens_seen, visible, None)
            if self._plan.rotary == "pre":
                keys = self._unrotated(index, keys, positions[:, -count:])
            context.begin(index)
            self._attentions[index].store(layer, keys, values, context)
            layer.forget_old()

    def _unrotated(self, index: int, keys: Tensor, positions: Tensor) -> Tensor:
        """Return keys (B, H_kv, n, d) of a layer as they were before they were rotated."""
        cos, sin = self._decoder.angles(index, positions.to(keys.device), like=keys)
        dtype = torch.promote_types(keys.dtype, torch.float32)
        rotation = Angles(cos.to(dtype), sin.to(dtype), self._rotation(index, cos.shape[-1]))
        return rotation.inverse().tile(keys.to(dtype), 0, keys.shape[2]).to(keys.dtype)

    def enter(self, stack: ExitStack) -> None:
        """Change the model until the stack is left."""
        decoder = self._model.get_decoder()
        stack.enter_context(uncompiled(self._model))
        # A compiled model around it goes as far as the decoder.
        leave_out = partial(torch.compiler.disable, reason=NOT_COMPILED)
        replace_attribute(stack, decoder, "forward", leave_out(decoder.forward))
        register(stack, decoder.register_forward_pre_hook, leave_out(self._before_model))
        register(stack, decoder.register_forward_hook, leave_out(self._after_model))
        if self._plan.rotary == "pre":
            embedding = self._decoder.rotary_embedding
            register(stack, embedding.register_forward_hook, self._pass.record_rotary_call)
        for index, attention in enumerate(self._decoder.attentions):
            add = attention.register_forward_pre_hook
            register(stack, add, self._before_attention(index))
        give_generate_a_cache(stack, self._model, self)
        replace_attribute(
            stack, self._model, "init_continuous_batching", refuse_continuous_batching
        )

    def _before_model(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check a call, and give it a cache and a mask that our attention takes."""
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        if self._config._attn_implementation != NAME:
            raise CacheError(
                f"the attention of the model was set to {self._config._attn_implementation!r} "
                "inside a compressed block: leave the block first"
            )
        if given.get("output_attentions") or self._config.output_attentions:
            raise CacheError(
                "a compressed model does not return attention weights: leave output_attentions out"
            )
        self._follow_model()
        mask = given.get("attention_mask")
        if given.get("past_key_values") is None:
            if not self._uses_cache(given):
                check_one_text_a_row(given.get("position_ids"), mask)
            given["past_key_values"] = self()
        cache = given["past_key_values"]
        check_cache(cache, self._plan, self._decoder.dtype)
        given["attention_mask"] = boolean_masks(mask, new_tokens(given), cache, self._decoder.kinds)
        if self._plan.rounds_runs:
            check_unpadded(given["attention_mask"])
        self._pass.begin(cache, self._plan.predictor_context())
        return (), given

    def _uses_cache(self, given: dict[str, Any]) -> bool:
        asked = given.get("use_cache")
        return bool(getattr(self._config, "use_cache", True) if asked is None else asked)

    def _after_model(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Check that all layers attended to the cache, which is returned if it was wanted."""
        attended = self._pass.attended
        self._pass.end()
        if attended == 0:
            raise ModelError(
                f"{type(self._model).__name__} is not supported: its attention does not hand "
                "keywords on to the attention function"
            )
        layers = len(self._plan.layers)
        if attended < layers:
            raise CacheError(
                f"{attended} of {layers} layers ran: a compressed cache needs all of them, so do "
                "without early exit"
            )
        if self._uses_cache(kwargs):
            return output
        # Who wanted no cache gets none back: `generate` would go on with it.
        if isinstance(output, tuple):
            return tuple(part for part in output if not isinstance(part, CompressedCache))
        return replace(output, past_key_values=None)

    def _before_attention(
        self, index: int
    ) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the hook that lets a layer attend to its part of the cache."""

        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            cache = self._pass.cache  # gradient checkpointing takes it out of the keywords
            cos, sin = kwargs["position_embeddings"]
            if self._plan.rotary == "pre":
                kwargs["position_embeddings"] = self._pass.identity(cos)
            kwargs["manifoldkv_attend"] = self._attend(index, cache, cos, sin)
            kwargs["past_key_values"] = None  # what is stored is stored by our attention
            return args, kwargs

        return hook

    def _attend(self, index: int, cache: CompressedCache, cos: Tensor, sin: Tensor) -> Attend:
        """Return the attention of a layer over its part of the cache."""
        reach = self._plan.reach
        layers: list[CompressedLayer] = cache.layers[max(0, index - reach) : index + 1][::-1]

        def attend_to_cache(
            module: nn.Module,
            queries: Tensor,
            keys: Tensor,
            values: Tensor,
            mask: Tensor | None,
            arguments: dict[str, Any],
        ) -> Tensor:
            self._pass.attended += 1
            settings = AttentionSettings.from_arguments(module, arguments)
            with torch.no_grad():
                angles = None
                rotated = queries
                if self._plan.rotary == "pre":
                    tokens, _ = layers[0].get_mask_sizes(queries.shape[2])
                    angles = self._angles(index, tokens, cos)
                    rotated = angles.rotate(queries, cos, sin)
                self._pass.context.begin(index)
                output = self._attentions[index].attend(
                    layers, rotated, keys, values, mask, settings, angles, self._pass.context
                )
            # Later layers depend on as many tokens of the layers below as they see themselves.
            last = index + 1 == len(cache.layers)
            for layer in layers if last else layers[reach:]:
                layer.forget_old()
            if torch.is_grad_enabled():
                inputs = [x for x in (queries, keys, values, settings.sinks) if x is not None]
                output = WithoutGradient.apply(output, *inputs)
            return output.transpose(1, 2)

        return attend_to_cache

    def _angles(self, index: int, tokens: int, cos: Tensor) -> Angles:
        """Return the rotation of the newest tokens in a layer that is given `cos`."""
        rotate = self._rotation(index, cos.shape[-1])
        return Angles(*self._pass.angles_of_newest(tokens, cos), rotate)

    def _rotation(self, index: int, rotary_dim: int) -> Rotate:
        """Return how a layer rotates keys."""
        if index not in self._rotate_keys:  # found out once
            self._rotate_keys[index] = rotation_of_keys(self._decoder.layers[index], rotary_dim)
        return self._rotate_keys[index]


def _attention_function(
    module: nn.Module,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    manifoldkv_attend: Attend | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    if manifoldkv_attend is not None:
        return manifoldkv_attend(module, queries, keys, values, mask, arguments), None
    # Another model that shares its configuration object with a compressed one.
    settings = AttentionSettings.from_arguments(module, arguments)
    rows, tokens = queries.shape[2], keys.shape[2]
    if mask is None:
        mask = torch.ones(1, 1, rows, tokens, dtype=torch.bool, device=keys.device)
        mask = mask.tril(tokens - rows)
    return attend(queries, keys, values, mask, settings).transpose(1, 2), None


AttentionInterface.register(NAME, _attention_function)
# Where causality is all there is to a mask, the stock function returns None and saves building it.
AttentionMaskInterface.register(NAME, sdpa_mask)

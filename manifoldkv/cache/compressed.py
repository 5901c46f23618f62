"""Running a model on a compressed cache, and leaving it as it was."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.masking_utils import sdpa_mask

from manifoldkv.cache.attention import (
    Angles,
    CachedAttention,
    RunningBasis,
    rotate_halves,
)
from manifoldkv.cache.calls import (
    boolean_masks,
    check_one_text_a_row,
    check_unpadded,
    new_tokens,
)
from manifoldkv.cache.hooks import (
    WithoutGradient,
    refuse_continuous_batching,
    refuse_to_save,
    register,
    replace_attribute,
)
from manifoldkv.cache.layers import CompressedCache, CompressedLayer
from manifoldkv.cache.storage import working_dtype
from manifoldkv.errors import CacheError, UnsupportedModelError
from manifoldkv.models.interface import (
    Attend,
    AttentionSettings,
    Rotate,
    attend,
    identity_rotation,
    intercepted,
    rotation_of,
)
from manifoldkv.models.offloading import device_of, is_offloaded
from manifoldkv.models.support import (
    attention_of,
    check_supported,
    decoder_layers,
    linear_weight,
    uncompiled,
    unwrapped,
)
from manifoldkv.plan.plan import CompressionPlan

NAME = "manifoldkv-cache"

NOT_COMPILED = "the decoder is not compiled inside a compressed block: do without fullgraph=True"

Prefill = Literal["compressed", "exact"]


@contextmanager
def compressed(
    model: PreTrainedModel,
    plan: CompressionPlan,
    *,
    prefill: Prefill = "compressed",
    fold_values: bool = False,
) -> Iterator[Callable[[], CompressedCache]]:
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
        With ``"compressed"`` every query sees exactly what the cache stores, of its own prompt and
        its own token too: a prompt in chunks gives what it gives at once, and a perplexity is that
        of the cache. With ``"exact"`` the tokens of a call of several tokens see each other
        unprojected; only what is stored for later is compressed.
    fold_values : bool
        Whether value bases are multiplied into W_O for the time of the block, so that values are
        not up-projected to head_dim at all.

    Yields
    ------
    callable
        Makes an empty `CompressedCache`.

    Raises
    ------
    UnsupportedModelError
        If the attention of the model cannot be handled.
    PlanError
        If the plan was made for another model (see `CompressionPlan.transferred_to`).
    CacheError
        If the model is inside such a block already, if the options contradict each other, or, from
        a call inside the block, if it is given what a compressed cache cannot do, or a gradient is
        wanted of it.
    """
    model = unwrapped(model)
    check_supported(model)
    plan.check_model(model)
    if prefill not in ("compressed", "exact"):
        raise CacheError(f"unknown prefill {prefill!r}; known: compressed, exact")
    if fold_values and prefill == "exact":
        raise CacheError("exact prefill needs the original W_O: do not fold values into it")
    if fold_values and is_offloaded(model):
        raise CacheError(
            "the weights of the model are read as it runs: do not fold values into W_O"
        )
    if fold_values and plan.recent:
        raise CacheError(
            f"the plan keeps the newest {plan.recent} tokens exact, which needs the original W_O: "
            "do not fold values into it"
        )
    config = model.config.get_text_config()
    if config._attn_implementation == NAME:
        raise CacheError("the model is already inside a compressed block")
    run = _Run(model, plan, prefill, fold_values)
    with ExitStack() as stack, intercepted(config, NAME):
        run.enter(stack)
        yield run.new_cache


@dataclass
class _Rotation:
    """One call of the model's rotary embedding during the current forward pass."""

    module: nn.Module
    inputs: Tensor
    rest: tuple[Any, ...]
    cos: Tensor

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        # Not the module itself, whose hook would record this as a call of the model.
        return self.module.forward(self.inputs, positions, *self.rest)


class _Pass(threading.local):
    """What the hooks of one forward pass tell each other; every thread has a pass of its own."""

    def __init__(self) -> None:
        self.cache: CompressedCache | None = None
        self.rotations: list[_Rotation] = []
        self.angles: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.attended = 0

    def begin(self, cache: CompressedCache) -> None:
        self.end()  # a call before this one may have ended in an error
        self.cache, self.attended = cache, 0

    def end(self) -> None:
        """Let go of the cache, and of angles, which are large for a long text."""
        self.cache = None
        self.rotations.clear()
        self.angles.clear()

    def the_cache(self) -> CompressedCache:
        if self.cache is None:
            raise CacheError(
                "a layer runs by itself inside a compressed block, as gradient checkpointing lets "
                "it for a gradient: call the model as a whole, and train it outside of the block"
            )
        return self.cache


class _Run:
    """Hooks of one `compressed` block and what they pass to each other."""

    def __init__(
        self, model: PreTrainedModel, plan: CompressionPlan, prefill: Prefill, fold_values: bool
    ) -> None:
        self._model = model
        self._plan = plan
        self._exact_prefill = prefill == "exact"
        self._fold_values = fold_values
        self._config = model.config.get_text_config()
        self._kinds, _ = get_layer_types_and_kwargs(self._config)
        self._layers = decoder_layers(model)
        self._parameters = list(inspect.signature(model.get_decoder().forward).parameters)
        self._places: list[tuple[torch.dtype, torch.device]] = []
        self._attentions: list[CachedAttention] = []
        self._follow_model()
        self._pass = _Pass()
        self._rotate_keys: dict[int, Rotate] = {}

    def _follow_model(self) -> None:
        """Bring bases where the layers are now, and into the dtype of the model."""
        dtype = self._model.dtype
        places = [(dtype, device_of(layer)) for layer in self._layers]
        if places != self._places:
            self._attentions = [
                CachedAttention(
                    RunningBasis(planned.key, *place),
                    RunningBasis(planned.value, *place),
                    self._exact_prefill,
                    expand_values=not self._fold_values,
                )
                for planned, place in zip(self._plan.layers, places, strict=True)
            ]
            self._places = places

    def new_cache(self) -> CompressedCache:
        devices = [device_of(layer) for layer in self._layers]
        return CompressedCache(self._plan, self._model.dtype, devices)

    def enter(self, stack: ExitStack) -> None:
        decoder = self._model.get_decoder()
        stack.enter_context(uncompiled(self._model))
        # A compiled model around it goes as far as the decoder.
        leave_out = partial(torch.compiler.disable, reason=NOT_COMPILED)
        replace_attribute(stack, decoder, "forward", leave_out(decoder.forward))
        register(stack, decoder.register_forward_pre_hook, leave_out(self._before_model))
        register(stack, decoder.register_forward_hook, leave_out(self._after_model))
        if self._plan.rotary == "pre":
            embedding = _rotary_embedding(decoder)
            register(stack, embedding.register_forward_hook, self._after_rotary_embedding)
        for index, layer in enumerate(self._layers):
            add = attention_of(layer).register_forward_pre_hook
            register(stack, add, self._before_attention(index))
        self._give_generate_a_cache(stack)
        replace_attribute(
            stack, self._model, "init_continuous_batching", refuse_continuous_batching
        )
        if self._fold_values:
            for name in ("save_pretrained", "push_to_hub"):  # they begin before they ask for W_O
                replace_attribute(stack, self._model, name, refuse_to_save)
            for index, layer in enumerate(self._layers):
                self._fold(stack, attention_of(layer), self._attentions[index])

    def _give_generate_a_cache(self, stack: ExitStack) -> None:
        """`generate` makes a stock cache where it is given none; let it make one of ours."""
        model = self._model
        prepare = model._prepare_cache_for_generation

        def prepare_compressed(
            generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
        ) -> None:
            if generation_config.use_cache is not False:
                # Some models ask for a kind of cache by default, which gives way.
                asked = generation_config.cache_implementation
                if asked not in (None, model.generation_config.cache_implementation):
                    raise CacheError(
                        f"a compressed model has a cache of its own kind: call generate without "
                        f"cache_implementation={asked!r}"
                    )
                generation_config.cache_implementation = None
                if model_kwargs.get("past_key_values") is None:
                    model_kwargs["past_key_values"] = self.new_cache()
                    if generation_config.is_assistant:
                        model_kwargs["past_key_values"].activate_past_recording()
            prepare(generation_config, model_kwargs, *args, **kwargs)

        replace_attribute(stack, model, "_prepare_cache_for_generation", prepare_compressed)

    def _fold(self, stack: ExitStack, attention: Any, cached: CachedAttention) -> None:
        stock = attention.o_proj
        weight = linear_weight(stock)
        weight = cached.folded_output_weight(weight, weight.shape[1] // attention.head_dim)
        folded = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        folded.weight = nn.Parameter(weight, requires_grad=False)
        folded.bias = stock.bias
        folded.register_state_dict_pre_hook(refuse_to_save)
        attention.o_proj = folded

        def unfold() -> None:
            # The model may have been converted in between.
            attention.o_proj = stock.to(folded.weight.device, folded.weight.dtype)

        stack.callback(unfold)

    def _before_model(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
            given["past_key_values"] = self.new_cache()
        cache = self._checked(given["past_key_values"])
        given["attention_mask"] = boolean_masks(mask, new_tokens(given), cache, self._kinds)
        if self._plan.quantization is not None and self._plan.quantization.layout == "kivi":
            check_unpadded(given["attention_mask"])
        self._pass.begin(cache)
        return (), given

    def _uses_cache(self, given: dict[str, Any]) -> bool:
        asked = given.get("use_cache")
        return bool(getattr(self._config, "use_cache", True) if asked is None else asked)

    def _after_model(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        attended = self._pass.attended
        self._pass.end()
        if attended == 0:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} is not supported: its attention does not hand "
                "keywords on to the attention function"
            )
        if attended < len(self._layers):
            raise CacheError(
                f"{attended} of {len(self._layers)} layers ran: a compressed cache needs all of "
                "them, so do without early exit"
            )
        if self._uses_cache(kwargs):
            return output
        # Who wanted no cache gets none back: `generate` would go on with it.
        if isinstance(output, tuple):
            return tuple(part for part in output if not isinstance(part, CompressedCache))
        return replace(output, past_key_values=None)

    def _checked(self, cache: Any) -> CompressedCache:
        if not isinstance(cache, CompressedCache):
            raise CacheError(
                f"the model is compressed, and {type(cache).__name__} is not a compressed cache: "
                "pass new_cache(), or no cache at all"
            )
        if cache.plan_digest != self._plan.digest():
            raise CacheError("the cache was made for another plan than this block's")
        if cache.dtype != self._model.dtype:
            raise CacheError(
                f"the cache was made for a model in {cache.dtype}, which is now in "
                f"{self._model.dtype}: make a new one"
            )
        if not cache.is_whole:
            raise CacheError(
                "a call that ended in an error left the cache incomplete: make a new one"
            )
        return cache

    def _after_rotary_embedding(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: tuple[Tensor, Tensor],
    ) -> None:
        if self._pass.cache is None:  # not from inside the model
            return
        given = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
        if not self._pass.rotations:  # a second kind of layer has the same positions
            self._pass.cache.append_positions(given["position_ids"])
        rest = tuple(given[name] for name in ("layer_type",) if name in given)
        self._pass.rotations.append(_Rotation(module, given["x"], rest, output[0]))

    def _before_attention(
        self, index: int
    ) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            cache = self._pass.the_cache()  # gradient checkpointing takes it out of the keywords
            cos, sin = kwargs["position_embeddings"]
            if self._plan.rotary == "pre":
                kwargs["position_embeddings"] = identity_rotation(cos, *cos.shape[-2:])
            kwargs["manifoldkv_attend"] = self._attend(index, cache.layers[index], cos, sin)
            kwargs["past_key_values"] = None  # what is stored is stored by our attention
            return args, kwargs

        return hook

    def _attend(self, index: int, layer: CompressedLayer, cos: Tensor, sin: Tensor) -> Attend:
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
                    rotated = rotation_of(self._layers[index])(queries, cos, sin)
                    tokens, _ = layer.get_mask_sizes(queries.shape[2])
                    rotate_keys = self._rotation_of_keys(index, cos.shape[-1])
                    angles = Angles(*self._angles_of_newest(tokens, cos), rotate_keys)
                output = self._attentions[index].attend(
                    layer, rotated, keys, values, mask, settings, angles
                )
            if torch.is_grad_enabled():
                inputs = [x for x in (queries, keys, values, settings.sinks) if x is not None]
                output = WithoutGradient.apply(output, *inputs)
            return output.transpose(1, 2)

        return attend_to_cache

    def _rotation_of_keys(self, index: int, rotary_dim: int) -> Rotate:
        """`rotate_halves` if the layer rotates so, else its own rotation; found out once."""
        if index not in self._rotate_keys:
            layer = self._layers[index]
            own = rotation_of(layer)
            halves = _rotates_halves(own, attention_of(layer).head_dim, rotary_dim)
            self._rotate_keys[index] = rotate_halves if halves else own
        return self._rotate_keys[index]

    def _angles_of_newest(self, tokens: int, cos: Tensor) -> tuple[Tensor, Tensor]:
        """Angles of the newest tokens as layers that are given `cos` rotate, computed once."""
        calls = [rotation for rotation in self._pass.rotations if rotation.cos is cos]
        if not calls:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} is not supported with keys stored before rotation: "
                "its layers do not receive the angles its rotary embedding made"
            )
        key = (id(cos), tokens)
        angles = self._pass.angles
        if key not in angles:
            cos_sin = calls[0].angles(self._pass.the_cache().positions(tokens))
            dtype = working_dtype(cos.dtype, cos.device)
            angles[key] = (cos_sin[0].to(dtype), cos_sin[1].to(dtype))
        return angles[key]


def _rotary_embedding(decoder: nn.Module) -> nn.Module:
    embedding = getattr(decoder, "rotary_emb", None)
    if not isinstance(embedding, nn.Module):
        raise UnsupportedModelError(
            f"{type(decoder).__name__} is not supported with keys stored before rotation: it has "
            "no rotary_emb"
        )
    return embedding


def _rotates_halves(rotate: Rotate, head_dim: int, rotary_dim: int) -> bool:
    """Whether a rotation is `rotate_halves`, tried on random numbers."""
    if rotary_dim != head_dim or head_dim % 2:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1, 2, 3, head_dim, generator=generator, dtype=torch.float64)
    angle = torch.rand(1, 3, head_dim // 2, generator=generator, dtype=torch.float64).repeat(
        1, 1, 2
    )
    cos, sin = angle.cos(), angle.sin()
    return torch.allclose(rotate(x, cos, sin), rotate_halves(x, cos, sin))


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

"""Attention backend of vLLM whose KV-cache pages hold packed latents, on a CPU.

``vllm serve MODEL --attention-backend CUSTOM --additional-config '{"manifoldkv_plan": "PLAN"}'``.
`register` is the entry point of the group ``vllm.general_plugins`` that makes the backend known.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any, ClassVar

import torch
import vllm
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout

from manifoldkv.core.errors import ArgumentError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.offloading import load_offloaded
from manifoldkv.models.rotary import Angles, rotation_of_keys
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.serve.engines.paged import LARGEST_PAGE, Batch, PagedCache, check_plan
from manifoldkv.serve.engines.pages import PageLayout

OPTION = "manifoldkv_plan"
TRIED = ("0.32.0",)
"""Versions of vLLM that the backend has run with."""
PAGE_MULTIPLE, PAGE_TOKENS = 32, 256
"""Divisor of the tokens of a page, and their number unless ``--block-size`` is given.

The kernel takes a page at a time, and is slower on short ones.
"""
DTYPES = (torch.float32, torch.bfloat16)
CUSTOM = AttentionBackendEnum.CUSTOM


def register() -> None:
    """Make the backend known to vLLM.

    vLLM's CPU platform always returns its own backend (`get_attn_backend_cls` in
    vllm/platforms/cpu.py). That method is replaced by one that returns this backend if it is named,
    and the check of the configuration by one that also checks the plan.
    """
    register_backend(CUSTOM, f"{__name__}.PagesBackend")
    if hasattr(CpuPlatform, OPTION):
        return
    select, check = CpuPlatform.get_attn_backend_cls, CpuPlatform.check_and_update_config

    def get_attn_backend_cls(_: Any, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        if selected_backend is CUSTOM:
            return str(CUSTOM.get_path())
        return str(select(selected_backend, *args, **kwargs))

    def check_and_update_config(_: Any, vllm_config: VllmConfig) -> None:
        check(vllm_config)
        if vllm_config.attention_config.backend is CUSTOM:
            if not vllm_config.cache_config.user_specified_block_size:
                vllm_config.cache_config.block_size = PAGE_TOKENS
            check_config(vllm_config)
            # Threads of OpenMP that wait for work would keep the kernels' threads off the cores.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    setattr(CpuPlatform, OPTION, True)


def check_config(config: VllmConfig) -> None:
    """Refuse a configuration that the backend cannot serve.

    Raises
    ------
    ArgumentError
        If an option of vLLM, its version or the dtype of the model is not supported.
    PlanError
        If pages cannot hold the latents of the plan, or it was made for another model.
    """
    if vllm.__version__.split("+")[0] not in TRIED:
        raise ArgumentError(
            f"packed pages were not tried with vLLM {vllm.__version__}: install one of "
            f"{', '.join(TRIED)}"
        )
    parallel, held = config.parallel_config, config.cache_config
    tensors, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    size, dtype = held.block_size, config.model_config.dtype
    refused = {
        f"tensor parallelism over {tensors}": tensors > 1,
        f"{stages} pipeline stages": stages > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1,
        "speculative decoding": config.speculative_config is not None,
        "a KV connector": config.kv_transfer_config is not None,
        f"--kv-cache-dtype {held.cache_dtype}": held.cache_dtype != "auto",
        f"models in {dtype}": dtype not in DTYPES,
        f"--block-size {size}, which is no multiple of {PAGE_MULTIPLE}": size % PAGE_MULTIPLE > 0,
        f"--block-size {size}, which is above {LARGEST_PAGE}": size > LARGEST_PAGE,
    }
    for what, is_refused in refused.items():
        if is_refused:
            raise ArgumentError(f"packed pages do not support {what}: leave it out")
    _checked(config.model_config.model, plan_folder(config))


def plan_folder(config: VllmConfig) -> str:
    """Return the folder of the plan that a configuration names.

    Raises
    ------
    ArgumentError
        If it names none.
    """
    more = config.additional_config
    folder = more.get(OPTION) if isinstance(more, dict) else None
    folder = folder or os.environ.get(OPTION.upper())
    if not folder:
        raise ArgumentError(
            f"--attention-backend CUSTOM needs a plan: --additional-config "
            f'\'{{"{OPTION}": "FOLDER"}}\''
        )
    return str(folder)


@cache
def _checked(model: str, folder: str) -> tuple[CompressionPlan, Decoder]:
    """Return the plan and the model it was made for, whose weights stay on disk."""
    plan = CompressionPlan.load(folder)
    check_plan(plan)
    decoder = Decoder.of(load_offloaded(model, torch.float32, "cpu")[0])
    plan.check_model(decoder)
    return plan, decoder


def _paged_cache(config: VllmConfig, scaling: float) -> PagedCache:
    """Return the cache of the layers of a model."""
    plan, decoder = _checked(config.model_config.model, plan_folder(config))
    dtype = config.model_config.dtype
    positions = torch.arange(config.model_config.max_model_len).unsqueeze(0)
    cos, sin = decoder.angles(0, positions, like=torch.empty(0, dtype=dtype))
    rotate = rotation_of_keys(decoder.layers[0], cos.shape[-1])
    return PagedCache(plan, dtype, Angles(cos, sin, rotate), scaling)


class PagesBackend(AttentionBackend):
    """Attention to packed latents in pages, on a CPU."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return str(CUSTOM.name)

    @staticmethod
    def get_impl_cls() -> type[PagesImpl]:
        return PagesImpl

    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        return BatchBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[MultipleOf]:
        return [MultipleOf(PAGE_MULTIPLE)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Pages of a layer are neighbours, whose size is the layer's own.
        return (KVCacheLayout.LBHNC,)


class BatchBuilder(AttentionMetadataBuilder):
    """Where the tokens of a step are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, **_: Any
    ) -> Batch:
        texts = common_attn_metadata.num_reqs
        return Batch(
            common_attn_metadata.query_start_loc[: texts + 1].tolist(),
            common_attn_metadata.seq_lens[:texts].tolist(),
            common_attn_metadata.block_table_tensor[:texts].numpy(),
        )


class PagesImpl(AttentionImpl):
    """Attention of one layer; parameters are vLLM's."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **more: Any,
    ) -> None:
        refused = {
            "ALiBi": alibi_slopes,
            "sliding windows": sliding_window,
            "soft caps of scores": logits_soft_cap,
            "layers that share keys and values": kv_sharing_target_layer_name,
            "learnt attention sinks": more.get("sinks"),
            "attention of encoders": attn_type != AttentionType.DECODER,
        }
        for what, found in refused.items():
            if found:
                raise ArgumentError(f"packed pages do not support {what}: serve another model")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale = float(scale)
        self._config = get_current_vllm_config()
        self._index = -1
        self._cache: PagedCache | None = None
        self._memory: Tensor | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Find the layer, whose pages have a size of its own."""
        context = self._config.compilation_config.static_forward_context
        layers = [layer for layer in context.values() if isinstance(layer, Attention)]
        self._index = [layer.impl for layer in layers].index(self)
        layers[self._index].get_kv_cache_spec = self._spec
        first = layers[0].impl
        if first._cache is None:
            first._cache = _paged_cache(self._config, self.scale)
        self._cache = first._cache

    def _layout(self, tokens: int) -> PageLayout:
        plan, _ = _checked(self._config.model_config.model, plan_folder(self._config))
        return PageLayout.of(plan.layers[self._index], tokens)

    def _spec(self, config: VllmConfig) -> FullAttentionSpec:
        """Return vLLM's description of the layer's pages."""
        tokens = config.cache_config.block_size
        return FullAttentionSpec(
            block_size=tokens,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=torch.uint8,
            num_head_slots=1,
            state_content_bytes=self._layout(tokens).bytes_per_token,
        )

    def forward(
        self,
        layer: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Batch | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention output of new tokens, (tokens, H_q, d); tokens may be padded."""
        if attn_metadata is None:  # a run before there are pages
            return output.zero_()
        assert self._cache is not None
        if self._memory is not kv_cache:
            layout = self._layout(kv_cache.shape[2])
            self._cache.bind(self._index, layout, kv_cache.flatten(1))
            self._memory = kv_cache
        if self._index == 0:
            self._cache.begin(attn_metadata)
        new = slice(0, attn_metadata.starts[-1])
        output[new] = self._cache.attend(self._index, query[new], key[new], value[new])
        return output

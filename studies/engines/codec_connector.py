"""A KV connector for vLLM whose store is a codec: caches of prompts on disk, an eighth as large.

vLLM finds it by its arguments, where this folder and manifoldkv can be imported::

    --kv-transfer-config '{"kv_connector": "CodecConnector",
                           "kv_connector_module_path": "codec_connector",
                           "kv_role": "kv_both",
                           "kv_connector_extra_config": {"plan": "PLAN", "folder": "STORE"}}'

The plan is one of recipe "stored" for the model that is served. When the whole blocks of a prompt
are computed their cache is written to the store; a prompt that begins with them is served from
there, after a restart too, and only what follows is computed. The codec's model stays on disk: it
reads no weights of layers.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from manifoldkv import Codec, CompressionPlan, load_model

LOG = logging.getLogger("vllm.codec_connector")
DIGIT = 256
"""Integers below it are exact in every dtype of a cache."""


@dataclass
class Transfer:
    """The first tokens of a request, and the blocks of vLLM's cache that they lie in.

    Those before `start` are there already when a cache is loaded.
    """

    ids: list[int]
    blocks: list[int]
    start: int = 0


@dataclass
class Transfers(KVConnectorMetadata):
    """What is to be loaded before a step, and saved after it."""

    loaded: list[Transfer] = field(default_factory=list)
    saved: list[Transfer] = field(default_factory=list)


class CodecConnector(KVConnectorBase_V1):
    """Keeps the caches of prompts in a folder, one blob for each."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if vllm_config.parallel_config.world_size > 1:
            raise ValueError("a codec stores all heads of all layers: serve the model whole")
        self._config = vllm_config
        self._block = vllm_config.cache_config.block_size
        self._store = Path(self._kv_transfer_config.get_from_extra_config("folder", ""))
        self._found: dict[str, Transfer] = {}  # to be loaded when they are scheduled
        self._computed: dict[str, Transfer] = {}  # to be saved when they are computed
        self._caches: dict[str, Tensor] = {}

    # In the scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        ids = self._longest_stored(request.prompt_token_ids or [])
        return max(0, len(ids) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            ids = self._longest_stored(request.prompt_token_ids)
            start = len(ids) - num_external_tokens
            self._found[request.request_id] = Transfer(ids, [], start)

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        made = Transfers()
        computed = {}
        for new in scheduler_output.scheduled_new_reqs:
            blocks = list(new.block_ids[0])
            loaded = self._found.pop(new.req_id, None)
            if loaded is not None:
                made.loaded.append(Transfer(loaded.ids, blocks, loaded.start))
            ids = self._whole_blocks(new.prompt_token_ids or [])
            if ids and not self._path(ids).exists():
                self._computed[new.req_id] = Transfer(ids, blocks)
            computed[new.req_id] = new.num_computed_tokens
        running = scheduler_output.scheduled_cached_reqs
        for place, name in enumerate(running.req_ids):
            blocks = running.new_block_ids[place]
            if name in running.resumed_req_ids:  # its blocks are others now
                self._computed.pop(name, None)
                loaded = self._found.pop(name, None)
                if loaded is not None:
                    made.loaded.append(Transfer(loaded.ids, list(blocks[0]), loaded.start))
            elif name in self._computed and blocks is not None:
                self._computed[name].blocks += blocks[0]
            computed[name] = running.num_computed_tokens[place]
        for name, before in computed.items():
            waiting = self._computed.get(name)
            after = before + scheduler_output.num_scheduled_tokens[name]
            if waiting is not None and after >= len(waiting.ids):
                made.saved.append(self._computed.pop(name))
        for name in scheduler_output.finished_req_ids:
            self._computed.pop(name, None)
        return made

    def _whole_blocks(self, ids: list[int]) -> list[int]:
        """Return the tokens of a prompt that fill blocks; one token at least is left to compute."""
        return list(ids[: (len(ids) - 1) // self._block * self._block])

    def _longest_stored(self, ids: list[int]) -> list[int]:
        """Return the longest beginning of a prompt that is stored."""
        found = self._whole_blocks(ids)
        while found and not self._path(found).exists():
            found = found[: -self._block]
        return found

    def _path(self, ids: list[int]) -> Path:
        content = torch.tensor(ids).numpy().tobytes()
        return self._store / f"{hashlib.blake2b(content, digest_size=16).hexdigest()}.kv"

    # In the worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._caches = dict(sorted(kv_caches.items(), key=lambda item: number_in(item[0])))

    @cached_property
    def _model(self) -> PreTrainedModel:
        dtype = next(iter(self._caches.values())).dtype
        model, _ = load_model(self._config.model_config.model, dtype=dtype, offload=True)
        return model

    @cached_property
    def _codec(self) -> Codec:
        plan = self._kv_transfer_config.get_from_extra_config("plan", "")
        return Codec(self._model, CompressionPlan.load(plan))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for transfer in self._transfers().loaded:
            self._load(transfer)

    def wait_for_save(self) -> None:
        for transfer in self._transfers().saved:
            self._save(transfer)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are loaded before the first."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        """All layers are saved after the last."""

    def _transfers(self) -> Transfers:
        found = self._get_connector_metadata()
        assert isinstance(found, Transfers)
        return found

    def _load(self, transfer: Transfer) -> None:
        """Write tokens into the blocks, as the engine itself writes what it has computed."""
        tokens = slice(transfer.start, len(transfer.ids))
        cache = self._codec.load(self._path(transfer.ids))
        blocks = torch.tensor(transfer.blocks).unsqueeze(1) * self._block
        slots = (blocks + torch.arange(self._block)).flatten()[tokens]
        for (layer, paged), stored in zip(self._layers(), cache.layers, strict=True):
            keys, values = (
                x[0, :, tokens].transpose(0, 1).contiguous()  # (n, H, d)
                for x in (stored.keys, stored.values)
            )
            layer.impl.do_kv_cache_update(layer, keys, values, paged, slots)
        LOG.warning("%d tokens are read from the store", len(slots))

    def _save(self, transfer: Transfer) -> None:
        cache = DynamicCache(config=self._model.config)
        blocks = torch.tensor(transfer.blocks[: len(transfer.ids) // self._block])
        for index, (layer, paged) in enumerate(self._layers()):
            keys, values = read(layer, paged, blocks)
            cache.update(keys, values, index)
        self._store.mkdir(parents=True, exist_ok=True)
        self._codec.save(cache, self._path(transfer.ids), torch.tensor([transfer.ids]))
        LOG.warning("%d tokens are written to the store", len(transfer.ids))

    def _layers(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield the attention of every layer with its cache (blocks, H, block, 2 d)."""
        known = self._config.compilation_config.static_forward_context
        for name, paged in self._caches.items():
            yield known[name], paged


def read(layer: Any, paged: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of some blocks, (1, H, n, d) each.

    Where a kernel keeps the elements of a block is its own affair: for a processor keys lie as its
    vector unit wants them. A block is written whose elements are numbered, by the engine itself.
    """
    _, heads, size, width = paged.shape
    numbers = torch.arange(size * width).view(2, size, 1, width // 2)
    found = torch.zeros(size * width, dtype=torch.int64)
    for power in (1, DIGIT, DIGIT**2):
        keys, values = (numbers // power % DIGIT).to(paged.dtype).expand(-1, -1, heads, -1)
        block = torch.zeros_like(paged[:1])
        layer.impl.do_kv_cache_update(
            layer, keys.contiguous(), values.contiguous(), block, torch.arange(size)
        )
        found += block[0, 0].flatten().long() * power
    inside = paged[blocks].flatten(2)[..., found.argsort()]  # (blocks, H, 2 · size · d)
    apart = inside.unflatten(2, (2, size, width // 2)).permute(2, 1, 0, 3, 4)
    keys, values = apart.flatten(2, 3).unsqueeze(1)  # (2, 1, H, blocks · size, d)
    return keys.contiguous(), values.contiguous()


def number_in(name: str) -> int:
    """Return the number of a layer by its name, as in ``model.layers.3.self_attn.attn``."""
    return next(int(part) for part in name.split(".") if part.isdigit())

"""A KV connector for vLLM that keeps caches in a folder, encoded by a `Codec`.

vLLM finds it by its arguments::

    --kv-transfer-config '{"kv_connector": "CodecConnector",
                           "kv_connector_module_path": "manifoldkv.serve.engines.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config":
                               {"plan": "PLAN", "folder": "STORE", "bytes": "1GiB"}}'

It is a connector and not an `OffloadingSpec`: the worker of a spec receives pages without the
attention layers that define the order of their elements, and may not fail to load one.
"""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import vllm
from torch import Tensor
from transformers import DynamicCache
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from manifoldkv.core.errors import ArgumentError, ModelError
from manifoldkv.core.quantities import parse_bytes
from manifoldkv.models.loading import load_model
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.serve.codec.codec import Codec
from manifoldkv.serve.engines.blocks import Blocks
from manifoldkv.serve.engines.chunks import CHUNK_TOKENS, Chunks
from manifoldkv.serve.engines.store import Store

LOG = logging.getLogger("vllm.manifoldkv")
TRIED = ("0.32.0",)
"""Versions of vLLM that the connector was run with."""
OPTIONS = ("plan", "folder", "bytes")
LEAST_GAIN = 4
"""Stored chunks are decoded from the first token on if one in this number is not cached by vLLM."""
IDLE_SECONDS = 0.01
"""How long a step without tokens waits for a load or a save to end."""
COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
HELD_FOR_SAVES = 4
"""One in this number of vLLM's blocks may wait to be encoded."""


@dataclass(frozen=True)
class Transfer:
    """The first chunks of a request, and the blocks of vLLM's cache that they lie in.

    Blocks of tokens before `start` are complete when chunks are loaded, and are not among them.
    """

    request: str
    keys: list[str]
    blocks: list[int]
    start: int = 0


@dataclass
class Transfers(KVConnectorMetadata):
    """Chunks to load and to save, from the scheduler to the worker."""

    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)


class CodecConnector(KVConnectorBase_V1):
    """Stores the caches of finished requests, and serves requests that begin with their tokens.

    Loads and saves run beside the model, one of each at a time. A load that fails, as of a file
    that another process has evicted, is reported to vLLM, which computes the tokens. While many
    blocks wait to be saved, further requests are not.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        _check(vllm_config, kv_cache_config, extra)
        model = vllm_config.model_config
        plan = CompressionPlan.load(extra["plan"])
        self._config, self._block = vllm_config, vllm_config.cache_config.block_size
        self._chunks = Chunks(plan, model.dtype)
        self._store = Store(extra["folder"], parse_bytes(extra["bytes"]))
        self._waiting = Transfers()
        self._starts: dict[str, int] = {}  # tokens that vLLM holds of a request to be loaded
        self._saving: dict[str, int] = {}  # blocks of requests that are being saved
        if role == KVConnectorRole.WORKER:
            stored, _ = load_model(model.model, dtype=model.dtype, offload=True)
            self._model_config, self._codec = stored.config, Codec(stored, plan)
            self._loader, self._saver = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
            self._loads: dict[str, Future[list[int]]] = {}
            self._saves: dict[str, Future[None]] = {}
            self._failed: set[int] = set()
            self._idle = False

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache that is not saved is computed again."""
        return False

    # In the scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        held = self._store.held(self._keys(request, request.num_tokens - 1)) * CHUNK_TOKENS
        more = held - num_computed_tokens
        if more <= 0 or more * LEAST_GAIN < held:
            return 0, False
        self._starts[request.request_id] = num_computed_tokens
        return more, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        start = self._starts.pop(request.request_id)
        stop = start + num_external_tokens
        new = blocks.get_block_ids()[0][start // self._block : stop // self._block]
        keys = self._keys(request, stop)
        self._waiting.loads.append(Transfer(request.request_id, keys, list(new), start))

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        made, self._waiting = self._waiting, Transfers()
        return made

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._starts.pop(request.request_id, None)
        if request.status not in COMPLETE:
            return False, None
        # The last token has been sampled and not read.
        keys = self._keys(request, min(request.num_computed_tokens, request.num_tokens - 1))
        if self._store.held(keys) == len(keys):
            self._store.touch(keys)
            return False, None
        used = list(block_ids[: len(keys) * CHUNK_TOKENS // self._block])
        most = self._kv_cache_config.num_blocks // HELD_FOR_SAVES
        if self._saving and sum(self._saving.values()) + len(used) > most:
            return False, None
        self._saving[request.request_id] = len(used)
        self._waiting.saves.append(Transfer(request.request_id, keys, used))
        return True, None

    def update_connector_output(self, connector_output: Any) -> None:
        for name in connector_output.finished_sending or ():
            self._saving.pop(name, None)

    def _keys(self, request: Any, tokens: int) -> list[str]:
        """Return the keys of the first tokens of a request, none if more than tokens define it."""
        embedded = request.prompt_token_ids is None or request.prompt_embeds is not None
        if embedded or request.lora_request or request.mm_features:
            return []
        return self._chunks.keys(request.all_token_ids[:tokens], request.cache_salt or "")

    # In the worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        known = self._config.compilation_config.static_forward_context
        names = sorted(kv_caches, key=_layer_number)
        self._blocks = Blocks([(known[name], kv_caches[name]) for name in names])

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        found = self._get_connector_metadata()
        assert isinstance(found, Transfers)
        self._idle = forward_context.attn_metadata is None
        for load in found.loads:
            self._loads[load.request] = self._loader.submit(self._load, load)
        for save in found.saves:
            self._saves[save.request] = self._saver.submit(self._save, save)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        if self._idle:  # vLLM would take the next empty step at once, and the processor with it
            running: list[Future[Any]] = [*self._loads.values(), *self._saves.values()]
            wait(running, IDLE_SECONDS, FIRST_COMPLETED)
        sent = {name for name, future in self._saves.items() if future.done()}
        received = {name for name, future in self._loads.items() if future.done()}
        for name in sent:
            del self._saves[name]
        for name in received:
            self._failed.update(self._loads.pop(name).result())
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests run when all their layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        """All layers are saved after a request."""

    def wait_for_save(self) -> None:
        """Blocks are held until they are saved."""

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.WORKER:
            for pool in (self._loader, self._saver):
                pool.shutdown(wait=False, cancel_futures=True)

    def _load(self, transfer: Transfer) -> list[int]:
        """Write stored tokens into blocks, and return the blocks whose tokens are missing."""
        try:
            chunks = self._read(transfer.keys)
            tokens = len(chunks) * CHUNK_TOKENS - transfer.start
            if tokens <= 0:
                return transfer.blocks
            cache = self._codec.decode(self._chunks.joined(chunks))
            used = tokens // self._block
            layers = [
                (layer.keys[:, :, transfer.start :], layer.values[:, :, transfer.start :])
                for layer in cache.layers
            ]
            self._blocks.write(transfer.blocks[:used], layers)
            self._store.touch(transfer.keys)
            LOG.info("%d tokens read from the store", tokens)
            return transfer.blocks[used:]
        except Exception as error:  # vLLM waits for the request, and computes it
            LOG.warning("stored tokens are computed: %s", error)
            for key in transfer.keys:
                self._store.delete(key)
            return transfer.blocks

    def _save(self, transfer: Transfer) -> None:
        try:
            before = self._read(transfer.keys)
            new = transfer.keys[len(before) :]
            if new:
                cache = DynamicCache(config=self._model_config)
                for index, (keys, values) in enumerate(self._blocks.read(transfer.blocks)):
                    cache.update(keys, values, index)
                blob = (
                    self._codec.append(self._chunks.joined(before), cache)
                    if before
                    else self._codec.encode(cache)
                )
                chunks = self._chunks.split(blob)[len(before) :]
                self._store.write(dict(zip(new, chunks, strict=True)))
                LOG.info("%d tokens written to the store", len(new) * CHUNK_TOKENS)
            self._store.touch(transfer.keys)
        except Exception as error:  # vLLM waits for the blocks
            LOG.warning("tokens are not stored: %s", error)

    def _read(self, keys: list[str]) -> list[bytes]:
        """Return the first chunks that the store has."""
        chunks = []
        for key in keys:
            chunk = self._store.read(key)
            if chunk is None:
                break
            chunks.append(chunk)
        return chunks


def _check(config: Any, caches: Any, extra: dict[str, Any]) -> None:
    """Refuse settings of a server that a codec cannot store the caches of.

    Raises
    ------
    ArgumentError
        If an option of the connector is missing or unknown, or loads may not fail.
    ModelError
        If the model is split, has sliding windows, or is not that of its folder.
    """
    if vllm.__version__ not in TRIED:
        LOG.warning("vLLM %s: the connector was tried with %s", vllm.__version__, ", ".join(TRIED))
    if set(extra) != set(OPTIONS):
        raise ArgumentError(
            f"kv_connector_extra_config has {sorted(extra)}: it takes {', '.join(OPTIONS)}, as in "
            '{"plan": "PLAN", "folder": "STORE", "bytes": "1GiB"}'
        )
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ArgumentError(
            'stored chunks may be evicted before they are read: add "kv_load_failure_policy": '
            '"recompute" to --kv-transfer-config'
        )
    size = config.cache_config.block_size
    if CHUNK_TOKENS % size:
        raise ArgumentError(
            f"--block-size {size} does not divide {CHUNK_TOKENS}, the tokens of a chunk"
        )
    _check_model(config, caches)


def _check_model(config: Any, caches: Any) -> None:
    if config.parallel_config.world_size > 1:
        raise ModelError(
            f"the model is split over {config.parallel_config.world_size} workers: a codec stores "
            "all heads of all layers, serve the model in one"
        )
    model, dtype = config.model_config, config.cache_config.cache_dtype
    if model.quantization or model.hf_overrides or dtype not in ("auto", str(model.dtype)[6:]):
        raise ModelError(
            "the plan is for the model as its folder describes it: serve it without "
            "--quantization, --hf-overrides and --kv-cache-dtype"
        )
    specs = [group.kv_cache_spec for group in caches.kv_cache_groups]
    windows = [getattr(spec, "sliding_window", None) for spec in specs]
    if len(specs) != 1 or type(specs[0]) is not FullAttentionSpec or any(windows):
        names = ", ".join(type(spec).__name__ for spec in specs)
        raise ModelError(
            f"the layers of the model have caches of {names}, with sliding windows {windows}: a "
            "codec stores equal layers without windows"
        )


def _layer_number(name: str) -> int:
    """Return the number in the name of a layer, as in ``model.layers.3.self_attn.attn``."""
    return next(int(part) for part in name.split(".") if part.isdigit())

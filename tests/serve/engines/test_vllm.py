"""vLLM with stored caches, in this process; skipped where vLLM is not installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from manifoldkv import Codec, CompressionPlan, ManifoldKVError, compress
from manifoldkv.core.errors import PlanError
from manifoldkv.serve.engines.chunks import CHUNK_TOKENS, Chunks
from manifoldkv.serve.engines.store import Store
from tests.families import tiny_model
from tests.stored import some_tokens

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

EMBEDDED = Path(__file__).parents[3] / "studies" / "reference_models" / "reference-llama"
NEW = 6
SHAPE = {"head_dim": 32, "hidden_size": 64, "max_position_embeddings": 2048}
PREFIX = some_tokens(1, 600)[0].tolist()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", torch.float32, **SHAPE)


@pytest.fixture(scope="module")
def plan(model: PreTrainedModel) -> CompressionPlan:
    return compress(model, some_tokens(16, 64, seed=1), recipe="stored", context=600, ratio=0.3)


@pytest.fixture(scope="module")
def arguments(
    model: PreTrainedModel, plan: CompressionPlan, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("vllm")
    model.save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):  # not used
        shutil.copy(EMBEDDED / name, folder / "model")
    plan.save(folder / "plan")
    extra = {"plan": str(folder / "plan"), "folder": str(folder / "store"), "bytes": "10MB"}
    transfer = {
        "kv_connector": "CodecConnector",
        "kv_connector_module_path": "manifoldkv.serve.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return {
        "model": str(folder / "model"),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "kv_transfer_config": transfer,
    }


@pytest.fixture(scope="module")
def engine(arguments: dict[str, Any]) -> Iterator[Any]:
    vllm = pytest.importorskip("vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        yield vllm.LLM(**arguments)


@pytest.fixture
def store(arguments: dict[str, Any]) -> Store:
    """The store of the engine, empty at first."""
    folder = Path(arguments["kv_transfer_config"]["kv_connector_extra_config"]["folder"])
    for path in folder.glob("*.kv"):
        path.unlink()
    return Store(folder, 10**7)


def asked(engine: Any, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    """Greedy tokens of every prompt, and how many of its tokens were not computed.

    The blocks that vLLM holds are dropped first. When all is stored, the engine has stopped.
    """
    from vllm import SamplingParams

    assert engine.reset_prefix_cache()
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = engine.generate(inputs, sampling, use_tqdm=False)
    scheduler = engine.llm_engine.engine_core.engine_core
    while scheduler.scheduler.has_requests():
        scheduler.step()
    return [(list(found.outputs[0].token_ids), found.num_cached_tokens) for found in answers]


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], cache: DynamicCache | None) -> list[int]:
    """Greedy tokens of transformers, from a cache of the first tokens."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    ids, made = torch.tensor([prompt[cache.get_seq_length() :]]), []
    for _ in range(NEW):
        ids = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        made.append(int(ids))
    return made


def decoded(model: PreTrainedModel, plan: CompressionPlan, store: Store, ids: list[int]) -> Any:
    chunks = Chunks(plan, torch.float32)
    read = [store.read(key) for key in chunks.keys(ids)]
    return Codec(model, plan).decode(chunks.joined([chunk for chunk in read if chunk]))


def test_a_stored_prompt_is_served_as_decoded(
    engine: Any, model: PreTrainedModel, plan: CompressionPlan, store: Store
) -> None:
    ((computed, cached),) = asked(engine, [PREFIX])
    assert cached == 0
    assert computed == greedy(model, PREFIX, None)
    ((served, cached),) = asked(engine, [PREFIX])
    assert cached == 2 * CHUNK_TOKENS
    assert served == greedy(model, PREFIX, decoded(model, plan, store, PREFIX))


def test_prompts_at_once_share_a_prefix(
    engine: Any, model: PreTrainedModel, plan: CompressionPlan, store: Store
) -> None:
    asked(engine, [PREFIX])
    prompts = [PREFIX + some_tokens(1, 300, seed=seed)[0].tolist() for seed in range(4)]
    cache = decoded(model, plan, store, PREFIX)
    for (served, cached), prompt in zip(asked(engine, prompts), prompts, strict=True):
        assert cached >= 2 * CHUNK_TOKENS
        own = DynamicCache(config=model.config)
        for index, layer in enumerate(cache.layers):
            own.update(layer.keys, layer.values, index)
        assert served == greedy(model, prompt, own)
    keys = {key for prompt in prompts for key in Chunks(plan, torch.float32).keys(prompt)}
    assert len(keys) == 2 + len(prompts)
    assert all(store.read(key) for key in keys)
    assert [cached for _, cached in asked(engine, prompts)] == [3 * CHUNK_TOKENS] * 4


@pytest.mark.parametrize("missing", [0, 1])
def test_a_chunk_that_vanishes_after_the_look_up_is_computed(
    engine: Any,
    model: PreTrainedModel,
    plan: CompressionPlan,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    missing: int,
) -> None:
    asked(engine, [PREFIX])
    key = Chunks(plan, torch.float32).keys(PREFIX)[missing]
    first = decoded(model, plan, store, PREFIX[: missing * CHUNK_TOKENS]) if missing else None
    read, calls = Store.read, []

    def vanished(self: Store, name: str) -> bytes | None:
        if name == key and not calls:
            calls.append(name)
            self.delete(name)
        return read(self, name)

    monkeypatch.setattr(Store, "read", vanished)
    ((served, _),) = asked(engine, [PREFIX])
    assert calls
    assert served == greedy(model, PREFIX, first)
    assert store.held(Chunks(plan, torch.float32).keys(PREFIX)) == 2  # it is stored again


def test_a_chunk_that_the_codec_refuses_is_computed_and_stored_again(
    engine: Any, model: PreTrainedModel, plan: CompressionPlan, store: Store
) -> None:
    asked(engine, [PREFIX])
    keys = Chunks(plan, torch.float32).keys(PREFIX)
    store.delete(keys[1])
    store.write({keys[1]: b"written by another program"})
    ((served, _),) = asked(engine, [PREFIX])
    assert served == greedy(model, PREFIX, None)
    ((served, cached),) = asked(engine, [PREFIX])
    assert cached == 2 * CHUNK_TOKENS
    assert served == greedy(model, PREFIX, decoded(model, plan, store, PREFIX))


WORKS = {
    "kv_transfer_config": {"kv_load_failure_policy": "recompute"},
    "cache_config": {"block_size": 128, "cache_dtype": "auto"},
    "parallel_config": {"world_size": 1},
    "model_config": {"quantization": None, "hf_overrides": {}, "dtype": torch.float32},
}
REFUSED = [
    ("kv_transfer_config", {"kv_load_failure_policy": "fail"}, 'add "kv_load_failure_policy"'),
    ("cache_config", {"block_size": 96, "cache_dtype": "auto"}, "--block-size 96 does not divide"),
    ("cache_config", {"block_size": 128, "cache_dtype": "fp8"}, "without .* --kv-cache-dtype"),
    ("parallel_config", {"world_size": 2}, "the model is split over 2 workers"),
    ("model_config", WORKS["model_config"] | {"quantization": "fp8"}, "without --quantization"),
]


def refused(
    match: str, extra: dict[str, str] | None = None, window: int | None = None, **of: Any
) -> None:
    """Assert that settings of a server are refused in one line."""
    pytest.importorskip("vllm")
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from manifoldkv.serve.engines.vllm import OPTIONS, _check

    shape = {"block_size": 128, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    spec = FullAttentionSpec(**shape, sliding_window=window)
    caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    config = SimpleNamespace(**{k: SimpleNamespace(**v) for k, v in (WORKS | of).items()})
    with pytest.raises(ManifoldKVError, match=match) as refusal:
        _check(config, caches, dict.fromkeys(OPTIONS, "x") if extra is None else extra)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("part", "values", "match"), REFUSED)
def test_servers_that_a_codec_cannot_store_for_are_refused(
    part: str, values: dict[str, Any], match: str
) -> None:
    refused(match, **{part: values})


def test_missing_options_and_windows_are_refused() -> None:
    refused("it takes plan, folder, bytes", {"plan": "x"})
    refused("sliding windows \\[64\\]", window=64)


def test_a_plan_of_another_model_or_recipe_ends_the_start(
    engine: Any, arguments: dict[str, Any], plan: CompressionPlan, tmp_path: Path
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from manifoldkv.serve.engines.vllm import CodecConnector

    core = engine.llm_engine.engine_core.engine_core
    config, caches = core.vllm_config, core.scheduler.kv_cache_config
    other = tiny_model("llama", torch.float32, seed=1, **SHAPE)
    tokens, settings = some_tokens(16, 64, seed=1), {"context": 600, "ratio": 0.3}
    extra = config.kv_transfer_config.kv_connector_extra_config
    own = extra["plan"]
    for name, recipe, match in (
        ("other", "stored", "weights"),
        ("bits", "bits", "no tables of symbols"),
    ):
        made = compress(other, tokens, recipe=recipe, **settings)
        if name == "bits":
            made = replace(made, fingerprint=plan.fingerprint, config_hash=plan.config_hash)
        made.save(tmp_path / name)
        extra["plan"] = str(tmp_path / name)
        with pytest.raises(PlanError, match=match):
            CodecConnector(config, KVConnectorRole.WORKER, caches)
    extra["plan"] = own

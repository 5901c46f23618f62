"""LMCache's own memory, adapter of a folder and threads around the serialiser."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from manifoldkv.core.errors import ArgumentError
from tests.cli.running import MODEL
from tests.serve.engines.test_lmcache_chunks import CHUNK, chunks, codec, error, stored_plan

pytest.importorskip("lmcache")

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
from lmcache.v1.distributed.serde import create_serde_processor


class Server:
    """Main memory and a folder below it, as LMCache's storage manager joins them."""

    def __init__(self, folder: Path, plan: Path) -> None:
        serde = {"type": "manifoldkv", "model": MODEL, "plan": str(plan), "dtype": "float32"}
        adapter = {
            "type": "plugin",
            "module_path": "manifoldkv.serve.engines.lmcache",
            "class_name": "FolderAdapter",
            "adapter_params": {"base_path": str(folder)},
            "serde": serde,
        }
        given = parse_args_to_l2_adapters_config(Namespace(l2_adapter=[json.dumps(adapter)]))
        (config,) = given.adapters
        memory = L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name="")
        self.memory = L1Manager(L1ManagerConfig(memory))
        inner = create_l2_adapter(config, self.memory.get_l1_memory_desc())
        processor = create_serde_processor(config.serde_config)
        self.adapter = SerdeL2AdapterWrapper(inner, processor, self.memory)

    def reserved(self, keys: list[ObjectKey]) -> list[Any]:
        """Objects of main memory for chunks."""
        layout = MemoryLayoutDesc([chunks()[0].shape], [torch.float32])
        made = self.memory.reserve_write(
            keys=keys, is_temporary=[False] * len(keys), layout_desc=layout, tag="test"
        )
        return [made[key][1] for key in keys]

    def store(self, keys: list[ObjectKey], objects: list[Any]) -> Any:
        task = self.adapter.submit_store_task(keys, objects)
        return wait(lambda: self.adapter.pop_completed_store_tasks().get(task))

    def load(self, keys: list[ObjectKey], objects: list[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(keys, objects)
        found = wait(lambda: self.adapter.query_load_result(task))
        return [bool(found.test(index)) for index in range(len(keys))]


def wait(poll: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while (found := poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    stored_plan().save(tmp_path / "plan")
    made = Server(tmp_path / "chunks", tmp_path / "plan")
    yield made
    made.adapter.close()
    made.memory.close()


def key(index: int, model: str = "model") -> ObjectKey:
    return ObjectKey(bytes([index]) * 32, model, 0)


def test_chunks_go_through_a_folder(server: Server, tmp_path: Path) -> None:
    keys = [key(index) for index in range(len(chunks()))]
    objects = server.reserved(keys)
    for held, chunk in zip(objects, chunks(), strict=True):
        held.tensor.copy_(chunk)
    assert server.store(keys, objects).is_successful()
    files = [path for path in (tmp_path / "chunks").rglob("*") if path.is_file()]
    assert [path.stat().st_size for path in files] == [codec().nbytes(CHUNK)] * len(keys)

    found = server.reserved([key(100 + index) for index in range(len(keys))])
    for held in found:
        held.tensor.zero_()
    assert server.load(keys, found) == [True] * len(keys)
    for held, chunk in zip(found, chunks(), strict=True):
        expected = codec().unpack(codec().pack(chunk), CHUNK)
        assert torch.equal(held.tensor, expected)
        assert error(held.tensor, chunk) < 0.1


def test_a_chunk_that_cannot_be_packed_is_not_stored(server: Server, tmp_path: Path) -> None:
    (held,) = server.reserved([key(0)])
    held.tensor.copy_(100 * torch.randn_like(held.tensor))
    assert not server.store([key(0)], [held]).is_successful()
    assert not [path for path in (tmp_path / "chunks").rglob("*") if path.is_file()]


def test_a_damaged_file_is_a_missing_chunk(server: Server, tmp_path: Path) -> None:
    (held,) = server.reserved([key(0)])
    held.tensor.copy_(chunks()[0])
    assert server.store([key(0)], [held]).is_successful()
    (file,) = [path for path in (tmp_path / "chunks").rglob("*") if path.is_file()]
    content = bytearray(file.read_bytes())
    content[200] ^= 1
    file.write_bytes(content)
    assert server.load([key(0)], server.reserved([key(1)])) == [False]


@pytest.mark.parametrize(
    "settings", [{"model": MODEL}, {"model": "a", "plan": "b", "dtype": "int8"}]
)
def test_settings_are_named(settings: dict[str, str]) -> None:
    from manifoldkv.serve.engines.lmcache import processor

    with pytest.raises(ArgumentError, match=r"has the settings dtype, max_workers, model, plan"):
        processor(settings)

"""Serialiser and deserialiser of LMCache, for its stores below main memory.

A server loads this module, which registers the type ``manifoldkv``, as the plug-in adapter of a
folder (an ``--l2-adapter`` of ``lmcache server``)::

    {"type": "plugin", "module_path": "manifoldkv.serve.engines.lmcache",
     "class_name": "FolderAdapter", "adapter_params": {"base_path": "/cache"},
     "serde": {"type": "manifoldkv", "model": "smollm2", "plan": "stored-plan"}}

All chunks take the same bytes, since the adapters of LMCache 0.5.6 load no less than they have
reserved. A chunk holds all heads: those of a server with tensor parallelism, whose ranks hold some,
are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    SerdeProcessor,
    Serializer,
    register_serde_factory,
)
from lmcache.v1.memory_management import MemoryObj

from manifoldkv.core.errors import ArgumentError
from manifoldkv.models.loading import load_model
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.serve.engines.lmcache_chunks import ChunkCodec

DTYPES = ("bfloat16", "float16", "float32")


class FolderAdapter(FSL2Adapter):
    """LMCache's own adapter of a folder, whose loading registers the serialiser."""

    config_class_name = FSL2AdapterConfig.__name__

    def __init__(self, config: FSL2AdapterConfig, l1_memory_desc: object = None) -> None:
        super().__init__(config)


class ChunkSerializer(Serializer):
    """Writes chunks of (2, layers, tokens, features) as packed chunks.

    Parameters
    ----------
    codec : ChunkCodec
        Codec of the model that fills the chunks.
    """

    def __init__(self, codec: ChunkCodec) -> None:
        self._codec = codec

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        """Write a chunk into a buffer, zeros after it, and return the bytes of the buffer.

        Raises
        ------
        CacheError
            As `ChunkCodec.pack`; LMCache then stores nothing.
        """
        packed = self._codec.pack(src.tensor)
        buffer = dst.tensor.flatten()
        padded = packed.ljust(len(buffer), b"\0")
        buffer[:] = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        return len(buffer)

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """Return the bytes of the buffer for a chunk, all of which are stored."""
        return self._codec.nbytes(layout_desc.shapes[0][2])


class ChunkDeserializer(Deserializer):
    """Reads the chunks of `ChunkSerializer`.

    Parameters
    ----------
    codec : ChunkCodec
        As that of the serialiser.
    """

    def __init__(self, codec: ChunkCodec) -> None:
        self._codec = codec

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        """Write the chunk in a buffer into a tensor.

        Raises
        ------
        CacheError
            As `ChunkCodec.unpack`; LMCache then has no such chunk.
        """
        packed = src.tensor.flatten().numpy().tobytes()
        dst.tensor.copy_(self._codec.unpack(packed, dst.tensor.shape[2]))


def processor(settings: dict[str, Any]) -> SerdeProcessor:
    """Return the processor of chunks that LMCache's settings describe.

    Parameters
    ----------
    settings : dict
        ``model`` and ``plan`` as on the command line, and optionally ``dtype`` of the chunks
        (``"bfloat16"``) and ``max_workers`` (1).

    Raises
    ------
    ArgumentError
        If a setting is missing or unknown.
    ModelError, PlanError
        If model or plan cannot be used.
    """
    given: dict[str, Any] = {"dtype": "bfloat16", "max_workers": 1} | settings
    known = {"model", "plan", "dtype", "max_workers"}
    if set(given) != known or given["dtype"] not in DTYPES:
        raise ArgumentError(
            f"serde manifoldkv has the settings {', '.join(sorted(known))}, and dtype is one of "
            f"{', '.join(DTYPES)}; got {settings}"
        )
    dtype = getattr(torch, given["dtype"])
    model, _ = load_model(str(given["model"]), dtype=dtype, offload=True)
    codec = ChunkCodec(model, CompressionPlan.load(str(given["plan"])))
    return AsyncSerdeProcessor(
        ChunkSerializer(codec), ChunkDeserializer(codec), max_workers=int(given["max_workers"])
    )


register_serde_factory("manifoldkv", processor)

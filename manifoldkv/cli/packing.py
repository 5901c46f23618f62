"""The command that packs and unpacks caches of llama.cpp."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedModel

from manifoldkv.cli.answers import Answer, size
from manifoldkv.cli.app import Pack
from manifoldkv.cli.inputs import load, load_plan
from manifoldkv.cli.options import ModelInMemory
from manifoldkv.core.errors import CacheError
from manifoldkv.core.files import write_whole
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.serve.codec.blob import read_blob
from manifoldkv.serve.engines.llama_cpp import pack_slot, read_packed, unpack_slot
from manifoldkv.serve.engines.slots import Slot, read_slot

LOG = logging.getLogger(__name__)

T = TypeVar("T")


def pack(options: Pack) -> Answer:
    """Write the packed file of a slot, or the slot of a packed file."""
    return _unpacked(options) if options.unpack else _packed(options)


def _packed(options: Pack) -> Answer:
    content = read_blob(options.slot)
    slot, _ = _named(options.slot, read_slot, content)
    model, plan = _opened(options)
    LOG.info("packing %d tokens", len(slot.order))
    packed = _named(options.slot, lambda slot: pack_slot(slot, model, plan), content)
    write_whole(options.out, packed)
    return _answer(slot, (options.slot, content), (options.out, packed))


def _unpacked(options: Pack) -> Answer:
    packed = read_blob(options.slot)
    slot, _ = _named(options.slot, read_packed, packed)
    model, plan = _opened(options)
    LOG.info("unpacking %d tokens", len(slot.order))
    content = _named(options.slot, lambda packed: unpack_slot(packed, model, plan), packed)
    write_whole(options.out, content)
    return _answer(slot, (options.out, content), (options.slot, packed))


def _opened(options: Pack) -> tuple[PreTrainedModel, CompressionPlan]:
    """Load the plan, and the model in the dtype of slots, of which no layer runs."""
    model, _ = load(ModelInMemory(model=options.model, dtype="float16", offload=True))
    return model, load_plan(options.plan, model, other_weights=False, attended=False)


def _named(path: Path, work: Callable[[bytes], T], content: bytes) -> T:
    """Return some work on the content of a file, whose name stands in its refusals."""
    try:
        return work(content)
    except CacheError as error:
        raise CacheError(f"{path}: {error}") from error


def _answer(slot: Slot, whole: tuple[Path, bytes], packed: tuple[Path, bytes]) -> Answer:
    tokens, sizes = len(slot.order), [len(whole[1]), len(packed[1])]
    facts = {"tokens": tokens, "slot_bytes": sizes[0], "packed_bytes": sizes[1]}
    line = (
        f"{tokens:,} tokens: {size(sizes[0])} in {whole[0]}, {size(sizes[1])} in {packed[0]}, "
        f"{sizes[0] / sizes[1]:.1f} times smaller"
    )
    return Answer(facts, [line])

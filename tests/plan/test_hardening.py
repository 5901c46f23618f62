"""Thousands of bad inputs: an error of ours or a plan that decodes, and nothing else."""

import hashlib
import json
import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from manifoldkv import (
    CompressionPlan,
    Quantization,
    compressed,
    load_model,
    open_text,
    sample_tokens,
)
from manifoldkv.core.errors import ArgumentError, PlanError
from manifoldkv.plan.files import DESCRIPTION, TENSORS, signed
from manifoldkv.recipes.rounding import quantize
from tests.families import tiny_model, tiny_tokens
from tests.plans import designed_plan, random_plan

MANY = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MOST_BYTES = 64 << 20
"""Python may hold so much while a tiny damaged plan is refused."""

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.sampled_from(["", "../../etc", "/", "shared", "all", "pre", "static", "token", "\0", "NaN"]),
    st.text(max_size=8),
)
VALUES = st.recursive(
    LEAVES, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3)
)


def saved_files(kind: str, folder: Path) -> tuple[dict[str, Any], bytes]:
    """Description and tensors of a plan."""
    model, tokens = tiny_model("llama"), tiny_tokens(2, 12)
    plan = random_plan(model, key_rank=4, value_rank=6, oblique=kind == "oblique")
    if kind == "sinks":
        plan = random_plan(model, sinks=2, rotary="post")
    if kind == "coded":
        plan = designed_plan(model, "low-rank chain", tiny_tokens(3, 24))
    if kind in ("static", "token"):
        plan = quantize(plan, model, tokens, Quantization(4, kind))
    plan.save(folder)
    return json.loads((folder / DESCRIPTION).read_text()), (folder / TENSORS).read_bytes()


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], bytes]]:
    found = {}
    for kind in ("orthonormal", "oblique", "sinks", "static", "token", "coded"):
        found[kind] = saved_files(kind, tmp_path_factory.mktemp(kind))
    return found


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Paths to all values inside a JSON value, itself excepted."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for name, inner in items:
        found.append((*path, name))
        if isinstance(inner, dict | list):
            found += places(inner, (*path, name))
    return found


def replaced(value: Any, path: tuple, new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def loads_or_refuses(folder: Path, description: Any, payload: bytes) -> bool:
    """Whether a plan loads, and decodes if it fits the model; anything but our error fails."""
    (folder / DESCRIPTION).write_text(json.dumps(description))
    (folder / TENSORS).write_bytes(payload)
    tracemalloc.start()
    try:
        plan = CompressionPlan.load(folder)
    except PlanError:
        return False
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MOST_BYTES
        assert {path.name for path in folder.iterdir()} == {DESCRIPTION, TENSORS}
    model = tiny_model("llama")
    try:
        with compressed(model, plan):
            logits = model(input_ids=tiny_tokens(1, 8)).logits
    except PlanError:  # of another model
        return False
    assert logits.isfinite().all()
    return True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "plan"
    made.mkdir()
    return made


@pytest.mark.parametrize("kind", ["orthonormal", "oblique", "sinks", "static", "token", "coded"])
def test_an_untouched_plan_loads(plans, kind: str, folder: Path) -> None:
    assert loads_or_refuses(folder, *plans[kind])


@pytest.mark.parametrize("kind", ["orthonormal", "oblique", "sinks", "static", "token", "coded"])
@MANY
@given(data=st.data())
def test_any_description(plans, kind: str, folder: Path, data: st.DataObject) -> None:
    description, payload = plans[kind]
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(description)))
        description = replaced(description, path, data.draw(VALUES))
    loads_or_refuses(folder, signed(description), payload)


def with_tensors(description: dict[str, Any], payload: bytes) -> dict[str, Any]:
    return signed(description | {"tensors_sha256": hashlib.sha256(payload).hexdigest()})


@pytest.mark.parametrize("kind", ["orthonormal", "static", "coded"])
@MANY
@given(data=st.data())
def test_any_header_of_tensors(plans, kind: str, folder: Path, data: st.DataObject) -> None:
    """Huge shapes, overlapping offsets, unknown dtypes, names of paths, under a right checksum."""
    description, payload = plans[kind]
    size = struct.unpack("<Q", payload[:8])[0]
    header = json.loads(payload[8 : 8 + size])
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(header)))
        likely = st.sampled_from(["F16", "I64", "BF16", "F64", [0, 1 << 62], [1 << 40, 1], [0, 8]])
        header = replaced(header, path, data.draw(likely | VALUES))
    text = json.dumps(header).encode()
    size = data.draw(st.sampled_from([len(text), len(text), 0, 1 << 63, len(text) + 8]))
    payload = struct.pack("<Q", size) + text + payload[8 + struct.unpack("<Q", payload[:8])[0] :]
    loads_or_refuses(folder, with_tensors(description, payload), payload)


@pytest.mark.parametrize("kind", ["orthonormal", "static", "coded"])
@MANY
@given(data=st.data())
def test_any_bytes_of_tensors(plans, kind: str, folder: Path, data: st.DataObject) -> None:
    description, payload = plans[kind]
    changed = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 8))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    changed = changed[: data.draw(st.sampled_from([len(changed), len(changed) // 2, 9, 0]))]
    loads_or_refuses(folder, with_tensors(description, bytes(changed)), bytes(changed))


NUMBERS = (0.0, float("nan"), float("inf"), 1e300, 3e38, -1.0)
PARTS = ("step", "mean", "deviation", "gain", "predictor", "expansion")
OF_A_LAYER = {
    "static": ("key.down", "value.down", "key.ranges"),
    "coded": ("key.down", "value.up", *(f"value.{part}" for part in PARTS)),
}


CHANGES = st.lists(
    st.tuples(st.integers(0, 100), st.integers(0, 1000), st.sampled_from(NUMBERS)), max_size=4
)


@pytest.mark.parametrize("kind", OF_A_LAYER)
@MANY
@given(changes=CHANGES)
def test_any_numbers_in_tensors(
    plans, kind: str, folder: Path, changes: list[tuple[int, int, float]]
) -> None:
    """NaN, infinities and huge numbers, well formed."""
    description, payload = plans[kind]
    tensors = load(payload)
    names = [f"layers.{layer}.{name}" for layer in range(3) for name in OF_A_LAYER[kind]]
    names.append("fingerprint")
    for tensor, place, number in changes:
        flat = tensors[names[tensor % len(names)]].view(-1)
        flat[place % len(flat)] = torch.tensor(number, dtype=torch.float64)
    payload = save(tensors)
    loads_or_refuses(folder, with_tensors(description, payload), payload)


@pytest.fixture(scope="module")
def tokenizer():
    root = Path(__file__).parents[2] / "studies" / "reference_models" / "reference-llama"
    return load_model(str(root))[1]


LINES = st.one_of(
    st.binary(max_size=40),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.text(max_size=20).map(lambda text: json.dumps({"text": text}).encode()),
    VALUES.map(lambda value: json.dumps({"text": value}).encode()),
)


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
@MANY
@given(lines=st.lists(LINES, max_size=6), split=st.sampled_from([None, "calibration", "held-out"]))
def test_any_text(suffix: str, tokenizer, tmp_path: Path, lines: list[bytes], split: Any) -> None:
    path = tmp_path / f"text.{suffix}"
    path.write_bytes(b"\n".join(lines))
    with suppress(ArgumentError):
        found = sample_tokens(open_text(str(path)), tokenizer, sequences=1, length=4, split=split)
        assert found.shape == (1, 4)
    assert list(tmp_path.glob("*")) == [path]


@MANY
@given(name=st.text(max_size=20).filter(lambda name: ":" not in name))
def test_any_name_of_a_text(name: str) -> None:
    """Names that are no files are refused, or data sets of the Hub that nobody has asked yet."""
    with suppress(ArgumentError):
        assert open_text(name).name == name

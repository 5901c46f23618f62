"""``manifoldkv pack``."""

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from manifoldkv import CompressionPlan, load_model
from manifoldkv.cli import inputs
from manifoldkv.serve.engines.llama_cpp import unpack_slot
from manifoldkv.serve.engines.slots import read_slot
from tests.cli.running import MODEL, facts, fail, lines, run
from tests.serve.engines.slot_files import slot_file

TOKENS = 300


@pytest.fixture(scope="module")
def cache() -> DynamicCache:
    model, tokenizer = load_model(MODEL)
    text = "Return the sum of all elements of an array along a given axis. " * 40
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :TOKENS]
    stock = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=stock)
    return stock


@pytest.fixture
def slot(cache: DynamicCache, tmp_path: Path) -> Path:
    path = tmp_path / "slot.bin"
    path.write_bytes(slot_file(cache))
    return path


def test_a_slot_is_packed_and_unpacked(slot: Path, stored: Path, tmp_path: Path) -> None:
    known, packed, out = ("--model", MODEL, "--plan", stored), tmp_path / "s.mkv", tmp_path / "new"
    sizes = facts("pack", slot, *known, "--out", packed)
    assert sizes["tokens"] == TOKENS
    assert sizes["slot_bytes"] == slot.stat().st_size
    assert sizes["packed_bytes"] == packed.stat().st_size < 0.5 * sizes["slot_bytes"]
    said = lines("pack", packed, "--unpack", *known, "--out", out)
    assert said.startswith("300 tokens: ")
    assert f"in {out}, " in said
    model, _ = load_model(MODEL, dtype=torch.float16)
    expected = unpack_slot(packed.read_bytes(), model, CompressionPlan.load(stored))
    assert out.read_bytes() == expected
    assert read_slot(expected)[0].frame == read_slot(slot.read_bytes())[0].frame


@pytest.mark.parametrize(
    ("options", "name", "message"),
    [
        ((), "nothing", "cannot read {path}: No such file"),
        (("--unpack",), "nothing", "cannot read {path}: No such file"),
        ((), "letter.txt", "{path}: not a saved slot or prompt cache of llama.cpp (bad magic)"),
        (("--unpack",), "letter.txt", "{path}: not a packed slot (bad magic)"),
        (("--unpack",), "slot.bin", "{path}: not a packed slot (bad magic)"),
    ],
)
def test_another_file_is_refused_before_a_model_is_loaded(
    options: tuple,
    name: str,
    message: str,
    slot: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inputs, "load_model", fail)
    (tmp_path / "letter.txt").write_text("Dear reader")
    path, out = tmp_path / name, tmp_path / "out"
    done = run("pack", path, *options, "--model", MODEL, "--plan", "plan", "--out", out)
    assert done.code == 2
    assert f"manifoldkv: {message.format(path=path)}" in done.err
    assert not out.exists()


def test_keys_in_another_order_are_refused(
    cache: DynamicCache, stored: Path, tmp_path: Path
) -> None:
    """A trained model's take several times the bytes that the plan expects."""
    path, out = tmp_path / "slot.bin", tmp_path / "out"
    path.write_bytes(slot_file(cache, neighbours=False))
    done = run("pack", path, "--model", MODEL, "--plan", stored, "--out", out)
    assert done.code == 2
    assert f"{path}: the slot would take " in done.err
    assert "save it without --rope-scaling" in done.err
    assert not out.exists()


def test_a_plan_of_another_recipe_is_refused(slot: Path, plan: Path, tmp_path: Path) -> None:
    done = run("pack", slot, "--model", MODEL, "--plan", plan, "--out", tmp_path / "out")
    assert done.code == 2
    assert "the plan holds no tables of symbols" in done.err

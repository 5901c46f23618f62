"""Activations that do not fit into memory go to files, and nothing changes."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from manifoldkv import RECIPES, OutputError, compress, placement
from manifoldkv.layers.capture import capture
from manifoldkv.layers.placement import Placement
from tests.families import tiny_model, tiny_tokens


def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "free_bytes", lambda device: 0)


def test_what_fits_stays_on_the_device(tmp_path: Path) -> None:
    place = Placement(1000, torch.device("cpu"), tmp_path)
    assert not place.in_files
    assert place.empty((2, 3), torch.float64).shape == (2, 3)


def test_a_file_vanishes_with_its_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_memory(monkeypatch)
    place = Placement(1000, torch.device("cpu"), tmp_path / "new")
    tensor = place.empty((2, 3, 5), torch.float32)
    tensor[:] = torch.arange(30.0).view(2, 3, 5)
    assert tensor.sum() == 435
    assert place.in_files
    assert not list((tmp_path / "new").iterdir())


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_memory(monkeypatch)

    def full(*ignored: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutputError, match=f"nor into {tmp_path}: No space left on device; use few"):
        next(capture(tiny_model("llama"), tiny_tokens(2, 8), folder=tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_activations_in_files_are_those_in_memory(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = tiny_model(family), tiny_tokens(11, 12)
    in_memory = list(capture(model, tokens))
    no_memory(monkeypatch)
    for expected, found in zip(in_memory, capture(model, tokens, folder=tmp_path), strict=True):
        for name in ("inputs", "keys", "values", "outputs"):
            assert torch.equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("recipe", ["eigen-attention", "fast", "paper"])
def test_plans_from_files_are_those_from_memory(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(11, 12)
    expected = compress(model, tokens, recipe=RECIPES[recipe]).digest()
    no_memory(monkeypatch)
    plan = compress(model, tokens, recipe=RECIPES[recipe], folder=tmp_path)
    assert plan.digest() == expected


LIMITED = """
import resource, sys, torch
from pathlib import Path
from manifoldkv import Batch, HeadGrouping, OBJECTIVES, capture, load_model, placement

torch.set_num_threads(1)
model, _ = load_model(sys.argv[1])
tokens = torch.randint(1000, (96, 512), generator=torch.Generator().manual_seed(0))
if sys.argv[3] == "files":
    placement.free_bytes = lambda device: 0
held = int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + 190 * 2**20,) * 2)
for activations in capture(model, tokens, [0, 1], folder=Path(sys.argv[2])):
    problem = OBJECTIVES.get("layer-output")().problem(
        activations, "value", HeadGrouping(1, activations.kv_heads)
    )
    print(float(problem.loss(problem.initial(8), Batch(torch.arange(2)))))
    del problem, activations
"""


def test_files_need_less_memory(tmp_path: Path) -> None:
    """Of a layer 168 MiB are kept for 49,152 tokens; 190 are allowed for them and all work."""
    folder = Path(__file__).parents[1] / "studies" / "reference_models" / "reference-llama"

    def run(where: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", LIMITED, str(folder), str(tmp_path), where]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    in_files, in_memory = run("files"), run("memory")
    assert in_files.returncode == 0, in_files.stderr
    assert len(in_files.stdout.splitlines()) == 2
    assert in_memory.returncode != 0
    assert "memory" in in_memory.stderr

"""Activations that do not fit into memory go to files, and nothing changes."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from manifoldkv import compress
from manifoldkv.core.errors import RunError
from manifoldkv.statistics import placement
from manifoldkv.statistics.capture import capture
from manifoldkv.statistics.placement import Placement
from tests.families import tiny_model, tiny_tokens
from tests.short_recipes import short


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
    with pytest.raises(RunError, match=f"nor into {tmp_path}: No space left on device; use few"):
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


@pytest.mark.parametrize("recipe", ["best", "paper", "fast", "stored"])
def test_plans_from_files_are_those_from_memory(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = tiny_model("llama", num_hidden_layers=2), tiny_tokens(11, 12)
    # All that a stored cache takes beside its symbols is too much for a few tokens.
    settings = {"recipe": short(recipe), "context": 512}
    expected = compress(model, tokens, **settings).digest()
    no_memory(monkeypatch)
    plan = compress(model, tokens, **settings, folder=tmp_path)
    assert plan.digest() == expected


LIMITED = """
import os, resource, sys, torch
from pathlib import Path
from manifoldkv import load_model
from manifoldkv.statistics.capture import capture
from manifoldkv.statistics.layer import Batch
from manifoldkv.core.basis import HeadGrouping
from manifoldkv.learn.objectives import OBJECTIVES
from manifoldkv.statistics import placement

torch.set_num_threads(1)
model, _ = load_model(sys.argv[1])
tokens = torch.randint(1000, (128, 128), generator=torch.Generator().manual_seed(0))


def measure():
    held = next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(held) + 64 * 2**20,) * 2)
    for activations in capture(model, tokens, [0, 1], folder=Path(sys.argv[2])):
        problem = OBJECTIVES.get("layer-output")().problem(
            activations, "value", HeadGrouping(1, activations.kv_heads)
        )
        print(float(problem.loss(problem.initial(8), Batch(torch.arange(2)))))
        del problem, activations


child = os.fork()  # both begin alike
if not child:
    try:
        measure()
    except RuntimeError as error:
        print(str(error).splitlines()[0])
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
placement.free_bytes = lambda device: 0
measure()
"""


def test_files_need_less_memory(tmp_path: Path) -> None:
    """Of a layer 56 MiB are kept for 16,384 tokens; 64 are allowed for them and all work."""
    folder = Path(__file__).parents[2] / "studies" / "reference_models" / "reference-llama"
    command = [sys.executable, "-c", LIMITED, str(folder), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    in_memory, *in_files = done.stdout.splitlines()
    assert "memory" in in_memory
    assert len(in_files) == 2
    assert all(0 < float(loss) < 1 for loss in in_files)

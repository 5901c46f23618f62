from pathlib import Path

import pandas as pd
import pytest
import torch

from manifoldkv.basis import HeadGrouping
from manifoldkv.errors import RunError
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_model, digest_of_tokens
from tests.families import tiny_model, tiny_tokens
from tests.plans import any_basis


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def frame(self) -> pd.DataFrame:
        self.calls += 1
        return pd.DataFrame({"a": [self.calls, 0.1], "b": ["x", None]})

    def tensors(self) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"a": torch.tensor([self.calls, 2.5]), "b": torch.arange(3)}


def test_a_table_is_computed_once(tmp_path: Path) -> None:
    counter = Counter()
    first = Checkpoints(tmp_path).keyed(seed=0).frame("a", counter.frame)
    again = Checkpoints(tmp_path, {"seed": 0}).frame("a", counter.frame)
    assert counter.calls == 1
    pd.testing.assert_frame_equal(first, again)
    Checkpoints(tmp_path, {"seed": 1}).frame("a", counter.frame)
    Checkpoints(tmp_path, {"seed": 0}).frame("b", counter.frame)
    assert counter.calls == 3


def test_tensors_are_computed_once(tmp_path: Path) -> None:
    counter = Counter()
    for _ in range(2):
        found = Checkpoints(tmp_path).tensors("a", counter.tensors)
        assert found["a"].tolist() == [1, 2.5]
    assert counter.calls == 1


def test_force_computes_everything_again_but_once(tmp_path: Path) -> None:
    counter = Counter()
    Checkpoints(tmp_path).frame("a", counter.frame)
    checkpoints = Checkpoints(tmp_path, force=True)
    checkpoints.frame("a", counter.frame)
    checkpoints.keyed().frame("a", counter.frame)
    assert counter.calls == 2


def test_nothing_is_stored_without_a_folder() -> None:
    counter = Counter()
    checkpoints = Checkpoints()
    first, second = (checkpoints.frame("a", counter.frame) for _ in range(2))
    assert (first["a"][0], second["a"][0]) == (1, 2)
    assert checkpoints.tensors("a", counter.tensors)["a"][0] == 3
    assert checkpoints.read_tensors("a") is checkpoints.read_basis("a", 2) is None


def test_what_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> pd.DataFrame:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path).frame("a", interrupted)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("oblique", [False, True])
@pytest.mark.parametrize("grouping", ["shared", 1, "all"])
def test_a_basis_comes_back_as_it_was(tmp_path: Path, grouping: str | int, oblique: bool) -> None:
    basis = any_basis(8, 3, HeadGrouping(grouping, 2), oblique=oblique, seed=0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write_basis("layer-0", basis)
    found = checkpoints.read_basis("layer-0", 2)
    assert torch.equal(basis.down, found.down)
    assert torch.equal(basis.up, found.up)
    assert basis.orthonormal == found.orthonormal
    assert basis.grouping == found.grouping


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write_basis("layer-0", any_basis(8, 3, HeadGrouping(1, 2), oblique=True, seed=0))
    path = next(tmp_path.iterdir())
    whole = path.read_bytes()
    flipped = whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]
    for damaged in (whole[:-5], b"", flipped, b"x" * len(whole)):
        path.write_bytes(damaged)
        with pytest.raises(RunError, match=r"layer-0-.*safetensors is damaged.*delete it"):
            checkpoints.read_basis("layer-0", 2)
    path.unlink()
    assert checkpoints.read_basis("layer-0", 2) is None


def test_digests_tell_contents_apart() -> None:
    assert digest_of_model(tiny_model("llama")) == digest_of_model(tiny_model("llama"))
    assert digest_of_model(tiny_model("llama")) != digest_of_model(tiny_model("llama", seed=1))
    yarn = tiny_model("llama-yarn")  # with the same weights
    assert digest_of_model(tiny_model("llama")) != digest_of_model(yarn)
    tokens = tiny_tokens()
    assert digest_of_tokens(tokens) == digest_of_tokens(tokens.clone())
    assert digest_of_tokens(tokens) != digest_of_tokens(tokens.view(2, -1))

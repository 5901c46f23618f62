from pathlib import Path

import pandas as pd
import pytest
import torch

from manifoldkv.core.errors import RunError
from manifoldkv.models.fingerprint import digest_of_model
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_tokens
from tests.families import tiny_model, tiny_tokens


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def frame(self) -> pd.DataFrame:
        self.calls += 1
        return pd.DataFrame({"a": [self.calls, 0.1], "b": ["x", None]})

    def tensors(self) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"a": torch.tensor([self.calls, 2.5]), "b": torch.arange(3)}


@pytest.fixture
def counter() -> Counter:
    return Counter()


def test_a_table_is_computed_once(counter: Counter, tmp_path: Path) -> None:
    first = Checkpoints(tmp_path).keyed(seed=0).frame("a", counter.frame)
    again = Checkpoints(tmp_path, {"seed": 0}).frame("a", counter.frame)
    assert counter.calls == 1
    pd.testing.assert_frame_equal(first, again)
    Checkpoints(tmp_path, {"seed": 1}).frame("a", counter.frame)
    Checkpoints(tmp_path, {"seed": 0}).frame("b", counter.frame)
    assert counter.calls == 3


def test_tensors_are_computed_once_and_the_same_when_read(counter: Counter, tmp_path: Path) -> None:
    first, again = [Checkpoints(tmp_path).tensors("a", counter.tensors) for _ in range(2)]
    assert counter.calls == 1
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_force_computes_everything_again_but_once(counter: Counter, tmp_path: Path) -> None:
    Checkpoints(tmp_path).frame("a", counter.frame)
    checkpoints = Checkpoints(tmp_path, force=True)
    checkpoints.frame("a", counter.frame)
    checkpoints.keyed().frame("a", counter.frame)
    assert counter.calls == 2


def test_nothing_is_stored_without_a_folder(counter: Counter) -> None:
    checkpoints = Checkpoints()
    assert [checkpoints.frame("a", counter.frame)["a"][0] for _ in range(2)] == [1, 2]
    assert checkpoints.tensors("a", counter.tensors)["a"][0] == 3
    assert checkpoints.read_tensors("a") is None


def test_what_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> pd.DataFrame:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path).frame("a", interrupted)
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_named(counter: Counter, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write_tensors("layer-0", counter.tensors())
    path = next(tmp_path.iterdir())
    whole = path.read_bytes()
    flipped = whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]
    for damaged in (whole[:-5], b"", flipped, b"x" * len(whole)):
        path.write_bytes(damaged)
        with pytest.raises(RunError, match=r"layer-0-.*safetensors is damaged.*delete it"):
            checkpoints.read_tensors("layer-0")
    path.unlink()
    assert checkpoints.read_tensors("layer-0") is None


def test_digests_tell_contents_apart() -> None:
    same_weights = ("llama", "llama-yarn")
    digests = [digest_of_model(tiny_model(name)) for name in same_weights]
    digests.append(digest_of_model(tiny_model("llama", seed=1)))
    assert len(set(digests)) == 3
    assert digest_of_model(tiny_model("llama")) == digests[0]
    tokens = tiny_tokens()
    assert digest_of_tokens(tokens) == digest_of_tokens(tokens.clone())
    assert digest_of_tokens(tokens) != digest_of_tokens(tokens.view(2, -1))

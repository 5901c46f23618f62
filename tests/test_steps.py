from pathlib import Path

import pandas as pd
import pytest
import torch

from manifoldkv import Basis, HeadGrouping, OutputError
from manifoldkv.steps import Steps, digest_of_model, digest_of_tokens
from manifoldkv.surfaces import LayerBases
from tests.families import tiny_model, tiny_tokens
from tests.plans import any_basis


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def frame(self) -> pd.DataFrame:
        self.calls += 1
        return pd.DataFrame({"a": [self.calls, 0.1], "b": ["x", None]})

    def bases(self) -> dict[str, Basis]:
        self.calls += 1
        shared, grouped = HeadGrouping("shared", 2), HeadGrouping("all", 2)
        bases = LayerBases(
            {r: any_basis(8, r, shared, oblique=False, seed=r) for r in (3, 8)},
            {r: any_basis(8, r, grouped, oblique=True, seed=r) for r in (2, 5)},
        )
        return bases.named()


def test_a_step_is_computed_once(tmp_path: Path) -> None:
    counter = Counter()
    first = Steps(tmp_path).frame("a", {"seed": 0}, counter.frame)
    again = Steps(tmp_path).frame("a", {"seed": 0}, counter.frame)
    assert counter.calls == 1
    pd.testing.assert_frame_equal(first, again)
    Steps(tmp_path).frame("a", {"seed": 1}, counter.frame)
    Steps(tmp_path).frame("b", {"seed": 0}, counter.frame)
    assert counter.calls == 3


def test_force_computes_every_step_again_but_once(tmp_path: Path) -> None:
    counter = Counter()
    Steps(tmp_path).frame("a", {}, counter.frame)
    steps = Steps(tmp_path, force=True)
    steps.frame("a", {}, counter.frame)
    steps.frame("a", {}, counter.frame)
    assert counter.calls == 2


def test_an_interrupted_step_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> pd.DataFrame:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Steps(tmp_path).frame("a", {}, interrupted)
    assert not list(tmp_path.iterdir())


def test_bases_come_back_as_they_were(tmp_path: Path) -> None:
    counter = Counter()
    expected = LayerBases.from_named(counter.bases())
    for _ in range(2):
        found = LayerBases.from_named(Steps(tmp_path).bases("layer-0", {}, 2, counter.bases))
        for site in ("keys", "values"):
            assert list(getattr(found, site)) == list(getattr(expected, site))
            for rank, basis in getattr(found, site).items():
                other = getattr(expected, site)[rank]
                assert torch.equal(basis.down, other.down)
                assert torch.equal(basis.up, other.up)
                assert basis.orthonormal == other.orthonormal
                assert basis.grouping == other.grouping
    assert counter.calls == 2


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    steps.bases("layer-0", {}, 2, Counter().bases)
    path = next(tmp_path.iterdir())
    whole = path.read_bytes()
    flipped = whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]
    for damaged in (whole[:-5], b"", flipped, b"x" * len(whole)):
        path.write_bytes(damaged)
        with pytest.raises(OutputError, match=r"layer-0-.*safetensors is damaged.*delete it"):
            steps.bases("layer-0", {}, 2, Counter().bases)
    path.unlink()
    steps.bases("layer-0", {}, 2, Counter().bases)
    assert path.read_bytes() == whole


def test_digests_tell_contents_apart() -> None:
    assert digest_of_model(tiny_model("llama")) == digest_of_model(tiny_model("llama"))
    assert digest_of_model(tiny_model("llama")) != digest_of_model(tiny_model("llama", seed=1))
    tokens = tiny_tokens()
    assert digest_of_tokens(tokens) == digest_of_tokens(tokens.clone())
    assert digest_of_tokens(tokens) != digest_of_tokens(tokens.view(2, -1))

"""A run that was killed goes on, and ends in the same bytes."""

import math
import multiprocessing
import random
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from manifoldkv import CompressionPlan, RankRecipe, compress
from manifoldkv.core.errors import RunError
from manifoldkv.core.files import only_run
from manifoldkv.learn.ranks import RANK_RULES
from manifoldkv.learn.solvers import ClosedForm, RiemannianAdam
from manifoldkv.plan.layer import LayerPlan
from tests.families import tiny_model, tiny_tokens

RECIPE = RankRecipe("layer-output", "riemannian-adam", ranks="optimal", tuning_steps=25)
KILLS = 20
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["manifoldkv", "tests.families"])


def compress_and_save(folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    plan = compress(tiny_model("llama"), tiny_tokens(6, 40), recipe=RECIPE, folder=folder)
    plan.save(out)


def run(folder: Path, out: Path, seconds: float | None = None) -> int | None:
    return run_process(compress_and_save, folder, out, seconds=seconds)


def run_process(target: Callable, *arguments: object, seconds: float | None = None) -> int | None:
    """The exit code; after so many seconds the process is killed as no process can prevent."""
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    assert run_process(print) == 0  # the first one waits for imports
    began = time.monotonic()
    assert run(tmp_path / "calm", tmp_path / "calm-plan") == 0
    calm = time.monotonic() - began
    moments = random.Random(0)
    kills, counts = 0, []
    while run(tmp_path / "work", tmp_path / "plan", moments.uniform(0.08, 0.2) * calm) != 0:
        kills += 1
        counts.append(len(list((tmp_path / "work").glob("*.safetensors"))))
        if kills == KILLS:
            assert run(tmp_path / "work", tmp_path / "plan") == 0
            break
    assert kills >= 2
    assert counts == sorted(counts)  # nothing that was finished is lost
    assert contents(tmp_path / "plan") == contents(tmp_path / "calm-plan")
    kept, expected = contents(tmp_path / "work"), contents(tmp_path / "calm")
    assert {name: kept[name] for name in expected} == expected
    print(f"{kills} kills, files kept after each: {counts}, at the end {len(expected)}")


@pytest.fixture
def solved(tmp_path: Path) -> Path:
    """A folder in which all bases of a closed form are kept."""
    compress(tiny_model("llama"), tiny_tokens(), recipe="eigen-attention", folder=tmp_path)
    return tmp_path


def again(folder: Path, **options) -> None:
    compress(
        tiny_model("llama"), tiny_tokens(), folder=folder, **{"recipe": "eigen-attention"} | options
    )


@pytest.mark.parametrize("parts", [("k-svd", "shared", 1), ("kq-svd", 1, "all")])
def test_stored_bases_are_not_solved_again(
    parts: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, keys, values = parts
    recipe = RankRecipe(objective, "closed-form", keys, values)

    def plan(ratio: float = 0.5) -> CompressionPlan:
        model, tokens = tiny_model("llama"), tiny_tokens()
        return compress(model, tokens, recipe=recipe, folder=tmp_path, ratio=ratio)

    expected = plan()
    assert expected.layers[0].key.basis.orthonormal == (objective == "k-svd")
    monkeypatch.setattr(ClosedForm, "solve", None)
    assert plan() == expected
    with pytest.raises(TypeError):  # other ranks are solved
        plan(0.6)


@pytest.mark.parametrize("rule", ["sequential", "threshold", "optimal"])
def test_what_ranks_cost_is_not_measured_again(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: Path | None = tmp_path) -> CompressionPlan:
        ranks = replace(RANK_RULES.get(rule)(), candidates=(0.25, 0.5, 1))
        recipe = RankRecipe("eigen-attention", "closed-form", ranks=ranks)
        return compress(tiny_model("llama"), tiny_tokens(), recipe=recipe, folder=folder)

    module, name, parts = (
        ("divergences", "divergence", 4) if rule == "optimal" else ("surfaces", "layer_output", 3)
    )  # sequences, layers
    measuring = import_module(f"manifoldkv.learn.ranks.{module}")
    measure, calls, last = getattr(measuring, name), [], math.inf

    def counted(*arguments: object) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) == last:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(measuring, name, counted)
    expected, whole = run(None).digest(), len(calls)
    last = whole + whole // 2 + 1
    with pytest.raises(KeyboardInterrupt):
        run()
    calls.clear()
    assert run().digest() == expected
    assert len(calls) == whole - (parts // 2) * whole // parts  # the part begun is done again
    calls.clear()
    assert run().digest() == expected
    assert not calls


MODULE = """
from dataclasses import dataclass

import helper
from manifoldkv import Objective
from manifoldkv.learn.solvers import ClosedForm, RiemannianAdam


@dataclass(frozen=True)
class Mine(Objective):
    power: float = 1.0

    def loss(self, problem, basis, batch=None):
        keys = problem.data(None if batch is None else batch.sequences)
        lost = keys - basis.project(keys)
        return {loss} * lost.square().sum().pow(self.power)


class Walk(RiemannianAdam):
    pass
"""


def test_what_other_code_made_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edited loss, an edited helper, another field: each is computed again."""
    monkeypatch.syspath_prepend(tmp_path)
    sys_modules = import_module("sys").modules

    def bases(loss: str = "1.0", helper: str = "", power: float = 1.0, steps: int = 3) -> set[str]:
        (tmp_path / "mine.py").write_text(MODULE.replace("{loss}", loss))
        (tmp_path / "helper.py").write_text(helper)
        for name in ("mine", "helper"):
            sys_modules.pop(name, None)
        import_module("importlib").invalidate_caches()
        mine = import_module("mine")
        recipe = RankRecipe(mine.Mine(power), mine.Walk(steps=steps))
        compress(tiny_model("llama"), tiny_tokens(), recipe=recipe, folder=tmp_path / "work")
        return {path.name for path in (tmp_path / "work").glob("layer-*")}

    known: set[str] = set()
    for changes in (
        {},
        {"loss": "keys.abs().mean() * 1.0"},
        {"helper": "EXPONENT = 2"},
        {"power": 2.0},
        {"steps": 4},
    ):
        now = bases(**changes)
        assert len(now) == len(known) + 6  # three layers, two sites
        known = now
    assert bases() == known  # what has been is still there


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
        ("gemma2", {"attn_logit_softcapping": 1.0}),
    ],
)
def test_what_another_configuration_made_is_not_taken(
    family: str, options: dict, tmp_path: Path
) -> None:
    """The same weights, with another base of rotation or another soft cap, make other bases."""

    def bases(folder: Path | None = tmp_path, **options: object) -> list[LayerPlan]:
        model = tiny_model(family, **options)
        plan = compress(model, tiny_tokens(), recipe="eigen-attention", folder=folder)
        return list(plan.layers)

    first, expected = bases(), bases(None, **options)
    assert bases(**options) == expected != first
    assert bases() == first


def test_code_without_a_source_is_not_stored(tmp_path: Path) -> None:
    made = type("Nowhere", (RiemannianAdam,), {"__module__": "__main__"})
    main = import_module("__main__")
    file = vars(main).pop("__file__", None)
    try:
        recipe = RankRecipe("layer-output", made(steps=1))
        with pytest.raises(RunError, match="the source of Nowhere cannot be read"):
            compress(tiny_model("llama"), tiny_tokens(), recipe=recipe, folder=tmp_path)
        compress(tiny_model("llama"), tiny_tokens(), recipe=recipe)
    finally:
        if file is not None:
            main.__file__ = file


def test_a_damaged_basis_is_named_and_made_again_on_request(solved: Path) -> None:
    path = sorted(solved.glob("layer-1-key-*"))[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    with pytest.raises(RunError, match=f"{path.name} is damaged .*delete it"):
        again(solved)
    path.unlink()
    again(solved)
    assert path.read_bytes() == whole


def test_the_number_of_threads_is_set_though_nothing_is_solved(
    solved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MKL sums otherwise where nobody has set it, and a tuned plan would get other bytes."""
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    again(solved)
    assert counts[0] == torch.get_num_threads()


def test_a_second_run_is_refused(solved: Path) -> None:
    with only_run(solved), pytest.raises(RunError, match=f"another run is at work in {solved}"):
        again(solved)
    again(solved)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write to .*file"):
        again(tmp_path / "file")


def test_a_full_disk_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = import_module("manifoldkv.core.files")
    write, calls = output._write_new, []

    def full(path: Path, content: bytes) -> None:
        calls.append(path)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(output, "_write_new", full)
    with pytest.raises(RunError, match=r"cannot write .*layer-1-value.*No space left"):
        again(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert not list(tmp_path.glob("*.partial"))
    again(tmp_path)

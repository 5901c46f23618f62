"""``manifoldkv compress`` and ``inspect``."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manifoldkv import CompressionPlan, compress, load_model
from manifoldkv.cli import inputs, planning
from manifoldkv.coding.quantizers import Unquantized
from manifoldkv.recipes.own import own_text
from tests.cli.running import FEW, MODEL, Done, facts, fail, interrupt, lines, run
from tests.families import tiny_model, tiny_tokens
from tests.plans import bits_plan

QUICK = ("compress", MODEL, "--recipe", "eigen-attention", *FEW)


def test_the_plan_is_saved(made: tuple[Path, Done]) -> None:
    folder, done = made
    assert f"plan: {folder}" in done.out
    assert done.phases == ["loading", "reading", "finding", "choosing"]
    plan = CompressionPlan.load(folder)
    provenance = plan.provenance
    assert (plan.ratio, provenance.text) == (0.5, "docstrings")
    assert (provenance.sequences, provenance.length) == (4, 64)


def test_bits_from_one_budget(best: tuple[Path, Done]) -> None:
    folder, done = best
    assert done.phases == ["loading", "reading", *["fitting"] * 3, "predicting"]
    plan = CompressionPlan.load(folder)
    nats = plan.provenance.predicted_nats
    assert f"loss    {nats:.4f} nats per token predicted, on" in done.out
    rows = done.out.partition("layer   key rank")[2].splitlines()[1:]
    for row, layer in zip(rows, plan.layers, strict=False):
        bits = [float(x) for x in row.split()[-2:]]
        assert bits == pytest.approx([*layer.mean_bits.values()], abs=0.01)


def test_fields_of_a_recipe_are_set_and_every_phase_is_a_line(tmp_path: Path) -> None:
    fields = ("objective=kq-svd", "key_grouping=all", "value_grouping=2", "tuning_steps=1")
    ranks = ("ranks=optimal", "ranks.multiple=8", "ranks.candidates=0.25,0.5,1.0")
    settings = [x for field in (*fields, *ranks, "bits=4") for x in ("--set", field)]
    few = ("--sequences", 2, "--length", 32, "--context", 300, "--ratio", 0.6)
    done = run(*QUICK, *few, *settings, "--out", tmp_path)
    assert done.code == 0, done.err
    phases = ["reading", "finding", "choosing", "tuning", "rounding"]
    assert done.phases == ["loading", *phases]
    assert not re.search(r"\d\d:\d\d:\d\d", done.out)
    plan = CompressionPlan.load(tmp_path)
    recipe = plan.provenance.recipe
    assert (recipe["objective"]["name"], recipe["solver"]["name"]) == ("kq-svd", "closed-form")
    assert (recipe["key_grouping"], recipe["value_grouping"]) == ("all", 2)
    assert (recipe["ranks"]["name"], recipe["ranks"]["multiple"]) == ("optimal", 8)
    assert recipe["tuning_steps"] == 1
    assert plan.formats.startswith("4-bit integers")
    assert {basis.rank % 8 for layer in plan.layers for _, basis in layer.sites} == {0}
    assert plan.provenance.context == 300


def test_bytes_of_a_context(tmp_path: Path) -> None:
    ask = (*QUICK, "--bytes", "60KiB", "--context", "0.125k", "--out", tmp_path)
    lines(*ask)
    plan = CompressionPlan.load(tmp_path)
    assert plan.provenance.context == 128
    assert plan.provenance.requested_ratio == 60 * 1024 / (128 * 6 * 2 * 2 * 32 * 4)
    assert 0.9 * 60 * 1024 < plan.nbytes(128, dtype=torch.float32) <= 60 * 1024
    assert facts(*ask, "--dry-run")["cache_bytes"] == 60 * 1024 / 128


def test_a_dry_run_saves_nothing(tmp_path: Path) -> None:
    ask = ("compress", MODEL, "--out", tmp_path / "plan", "--dry-run", *FEW)
    estimated = facts(*ask, "--recipe", "low-rank")
    assert estimated["cache_bytes"] == estimated["stock_bytes"] / 2 == 6 * 2 * 2 * 32 * 4 / 2
    assert set(estimated["seconds"]) == {"capture", "bases", "ranks", "tuning"}
    assert all(seconds > 0 for seconds in estimated["seconds"].values())
    out = lines(*ask, "--text", "own")
    assert "(text " in out  # sampling it takes time too
    assert "Nothing was saved" in out
    assert not (tmp_path / "plan").exists()


def test_a_model_without_a_text_is_calibrated_on_what_it_writes(
    short_model: Path, tmp_path: Path
) -> None:
    few = ("--sequences", 2, "--length", 40, "--recipe", "eigen-attention")
    out, work = tmp_path / "plan", tmp_path / "work"
    ask = ("compress", short_model, *few, "--out", out, "--work", work)
    assert "writing 2 texts to calibrate on" in run(*ask).err
    plan = CompressionPlan.load(out)
    assert plan.provenance.text == "own"
    model, _ = load_model(str(short_model))
    expected = compress(model, own_text(model, 2, 40), recipe="eigen-attention", ratio=0.5)
    assert plan.digest() == expected.digest()
    done = run(*ask, "--force")
    assert (done.code, "writing" in done.err) == (0, False)  # resumed


@pytest.mark.parametrize(
    "more", [("--ratio", 1e-4), ("--length", 100_000)], ids=["ratio", "length"]
)
def test_a_model_writes_nothing_for_a_run_that_is_refused(
    more: tuple, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(planning, "own_text", fail)
    done = run("compress", MODEL, "--text", "own", *more, "--out", tmp_path / "plan")
    assert done.code == 2


def test_work_is_resumed_also_in_the_folder_of_the_plan(tmp_path: Path) -> None:
    work = tmp_path / "work"
    lines(*QUICK, "--work", work, "--set", "bits=4", "--out", tmp_path / "first")
    files = {path: path.stat().st_mtime_ns for path in work.glob("layer-*")}
    assert len(files) == 12
    for _ in range(2):  # the second one replaces its own plan
        lines(*QUICK, "--work", work, "--set", "bits=4", "--out", f"{tmp_path}/./work")
    assert {path: path.stat().st_mtime_ns for path in work.glob("layer-*")} == files
    first, second = CompressionPlan.load(tmp_path / "first"), CompressionPlan.load(work)
    assert first.digest() == second.digest()


def test_a_plan_is_overwritten_by_force_alone(
    plan: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = shutil.copytree(plan, tmp_path / "plan")
    ask = (*QUICK, "--ratio", 0.75, "--out", folder)
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "load_model", fail)
        done = run(*ask, "--work", tmp_path / "work")
    assert done.code == 2
    assert f"{folder} holds a plan already: take another folder as --out, or --force" in done.err
    assert CompressionPlan.load(folder).ratio == 0.5
    lines(*ask, "--force")
    assert CompressionPlan.load(folder).ratio == 0.75
    lines(*ask, "--dry-run")


def test_a_run_that_fails_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("one two three four\n" * 30)
    text = ("--text", tmp_path / "t.txt")
    assert run(*QUICK, *text, "--out", tmp_path / "new" / "plan").code == 2
    (tmp_path / "old").mkdir()
    monkeypatch.setattr(planning, "find_plan", interrupt)
    assert run(*QUICK, "--out", tmp_path / "old" / "plan").code == 130
    assert {path.name for path in tmp_path.rglob("*")} == {"t.txt", "old"}


class TestInspect:
    def test_it_needs_no_model(self, plan: Path) -> None:
        out = lines("inspect", plan)
        assert "ratio 0.5 at 64 tokens, 768 bytes per further token in bfloat16" in out
        layers = facts("inspect", plan)["layers"]
        assert [(x["key_rank"], x["value_rank"]) for x in layers] == [(16, 16)] * 6

    @pytest.mark.parametrize(
        ("sinks", "line"),
        [
            (0, "        keys pre-rotation, latents unquantised"),
            (4, "        first 4 tokens uncompressed, keys pre-rotation, latents unquantised"),
        ],
    )
    def test_sink_tokens(self, sinks: int, line: str, plan: Path, tmp_path: Path) -> None:
        replace(CompressionPlan.load(plan), sinks=sinks).save(tmp_path)
        assert line in lines("inspect", tmp_path)
        assert facts("inspect", tmp_path)["sinks"] == sinks

    def test_bits_for_values_alone(self, tmp_path: Path) -> None:
        plan = bits_plan(tiny_model("llama"), tiny_tokens(), ratio=0.5, sinks=0)
        first = plan.layers[0]
        first = replace(first, key=replace(first.key, quantizer=Unquantized()))
        replace(plan, layers=(first, *plan.layers[1:])).save(tmp_path)
        (row,) = re.findall(r"^ +0 .*", lines("inspect", tmp_path), re.MULTILINE)
        key_bits = 16 * first.key.rank / 8
        assert row.split()[-2:] == [f"{key_bits:.2f}", f"{first.mean_bits['value']:.2f}"]

"""``manifoldkv compress`` and ``inspect``."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manifoldkv import CompressionPlan, compress, load_model
from manifoldkv.cli import inputs, planning
from manifoldkv.plan.formats.quantizers import Unquantized
from manifoldkv.recipes.self_generated import own_text
from tests.cli.running import EIGHT, FEW, MODEL, Done, facts, fail, interrupt, lines, run
from tests.families import tiny_model, tiny_tokens
from tests.plans import bits_plan

QUICK = ("compress", MODEL, "--recipe", "eigen-attention", *FEW)
FIFTH = ("compress", MODEL, *EIGHT, "--ratio", 0.2)


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
    phases = ["loading", "reading", "collecting", "selecting", "fitting", "fitting"]
    phases += ["estimating"]
    assert done.phases == phases
    plan = CompressionPlan.load(folder)
    assert f"compute {plan.compute:.3g} times the multiplications of uncompressed" in done.out
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
    assert estimated["frontier"] == {}  # ranks have no limit of compute
    in_sixteen_bits = facts(*ask)
    assert in_sixteen_bits["cache_bytes"] == in_sixteen_bits["stock_bytes"] / 4
    out = lines(*ask, "--text", "own")
    assert "Nothing was saved" in out
    assert len(re.findall("unlimited +[0-9.]+$", out, re.MULTILINE)) == 1
    assert not (tmp_path / "plan").exists()


def test_a_plan_within_a_limit_of_compute(best: tuple[Path, Done], tmp_path: Path) -> None:
    done = run(*FIFTH, "--compute", 2.5, "--out", tmp_path)
    assert done.code == 0, done.err
    assert "selecting transforms within 2.5 times the multiplications" in done.err
    plan = CompressionPlan.load(tmp_path)
    assert f"compute {plan.compute:.3g} times" in done.out
    assert facts("inspect", tmp_path)["compute"] == plan.compute
    assert plan.compute <= 2.5 < CompressionPlan.load(best[0]).compute
    assert plan.ratio <= 0.2


def test_the_smallest_plan_below_a_loss(tmp_path: Path) -> None:
    limit = 0.055
    few = ("--sequences", 8, "--length", 64)
    done = run("compress", MODEL, *few, "--nats", limit, "--out", tmp_path)
    assert done.code == 0, done.err
    plan = CompressionPlan.load(tmp_path)
    provenance = plan.provenance
    assert provenance.measured_nats <= limit
    assert f"\n        {provenance.measured_nats:.4f} measured on the same tokens\n" in done.out
    assert provenance.measured_error is None  # of one sequence
    provenance = replace(provenance, measured_nats=0.0123, measured_error=0.0045)
    replace(plan, provenance=provenance).save(tmp_path / "four")
    assert "\n        0.0123 ± 0.0045 measured on" in lines("inspect", tmp_path / "four")
    assert f"{provenance.predicted_nats:.4f} nats per token predicted, on 64 held-" in done.out
    tried = {float(r): float(n) for r, n in re.findall(r"ratio (\S+) loses (\S+) nats", done.err)}
    smaller = [nats for ratio, nats in tried.items() if ratio < provenance.requested_ratio - 1e-4]
    assert all(nats > limit for nats in smaller)


def test_a_large_loss_is_that_of_the_smallest_cache(tmp_path: Path) -> None:
    """Short texts, whose sink tokens and scales take more than an eighth of the cache."""
    lines("compress", MODEL, *EIGHT, "--nats", 50, "--out", tmp_path)
    plan = CompressionPlan.load(tmp_path)
    assert plan.ratio == pytest.approx(4 / 32 + 2 / (4 * 64))
    assert plan.provenance.measured_nats <= 50


def test_a_loss_needs_sequences_that_nothing_is_fitted_to(tmp_path: Path) -> None:
    done = run("compress", MODEL, *FEW, "--nats", 0.1, "--out", tmp_path / "plan")
    assert done.code == 2
    assert "manifoldkv: nats must have 8 or more calibration sequences, got 4: the" in done.err
    assert not (tmp_path / "plan").exists()


def test_too_little_work_names_the_least(tmp_path: Path) -> None:
    """The least is a number that the command accepts."""
    ask = (*FIFTH, "--out", tmp_path / "plan", "--compute")
    done = run(*ask, 0.5)
    assert done.code == 2
    (least,) = re.findall(
        r"^manifoldkv: compute must be >= (\S+), got 0.5: ", done.err, re.MULTILINE
    )
    lines(*ask, least)
    assert CompressionPlan.load(tmp_path / "plan").compute <= float(least)


def test_a_dry_run_shows_the_loss_by_compute(tmp_path: Path) -> None:
    ask = (*FIFTH, "--dry-run", "--out", tmp_path / "plan")
    frontier = facts(*ask)["frontier"]
    *limits, last = frontier
    assert set(limits) <= {"2", "4", "8", "16"}
    assert len(limits) >= 3
    assert last == "unlimited"
    assert sorted(frontier.values(), reverse=True) == [*frontier.values()]
    title, *rows = lines(*ask).partition("--compute")[2].splitlines()[: len(frontier) + 1]
    assert title == "  nats per token, at least"
    assert [row.split() for row in rows] == [[k, f"{v:.4f}"] for k, v in frontier.items()]
    assert "--compute" not in lines(*QUICK, "--dry-run")  # ranks have no limit of compute
    assert not (tmp_path / "plan").exists()


def test_fields_of_several_parts_are_set(tmp_path: Path) -> None:
    given = ("bands=8", "depth=none", "compute=9", "trellis=false")
    settings = [part for one in given for part in ("--set", one)]
    lines(*FIFTH, *settings, "--out", tmp_path)
    recipe = CompressionPlan.load(tmp_path).provenance.recipe
    assert (recipe["bands"], recipe["depth"], recipe["compute"]) == ([8], None, 9)
    assert recipe["ranks"]["trellis"] is False


def test_a_model_without_a_text_is_calibrated_on_what_it_writes(
    short_model: Path, tmp_path: Path
) -> None:
    few = ("--sequences", 2, "--length", 40, "--recipe", "eigen-attention")
    out = tmp_path / "plan"
    ask = ("compress", short_model, *few, "--out", out, "--checkpoints", tmp_path / "run")
    assert "writing 2 texts to calibrate on" in run(*ask).err
    plan = CompressionPlan.load(out)
    assert plan.provenance.text == "own"
    model, _ = load_model(str(short_model))
    expected = compress(model, own_text(model, 2, 40), recipe="eigen-attention", ratio=0.5)
    assert plan.digest() == expected.digest()
    done = run(*ask, "--force")
    assert (done.code, "writing" in done.err) == (0, False)  # resumed


@pytest.mark.parametrize(
    "more",
    [("--ratio", 1e-4), ("--length", 100_000), ("--compute", 0.5), ("--nats", 1, "--sequences", 7)],
    ids=["ratio", "length", "work", "nats"],
)
def test_a_model_writes_nothing_for_a_run_that_is_refused(
    more: tuple, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(planning, "own_text", fail)
    done = run("compress", MODEL, "--text", "own", *more, "--out", tmp_path / "plan")
    assert done.code == 2


def test_a_run_resumes_from_checkpoints_also_in_the_folder_of_the_plan(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ask = (*QUICK, "--checkpoints", folder, "--set", "bits=4", "--out")
    lines(*ask, tmp_path / "first")
    files = {path: path.stat().st_mtime_ns for path in folder.glob("layer-*")}
    assert len(files) == 12
    for _ in range(2):  # the second one replaces its own plan
        lines(*ask, f"{tmp_path}/./run")
    assert {path: path.stat().st_mtime_ns for path in folder.glob("layer-*")} == files
    first, second = CompressionPlan.load(tmp_path / "first"), CompressionPlan.load(folder)
    assert first.digest() == second.digest()


def test_a_plan_is_overwritten_by_force_alone(
    plan: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = shutil.copytree(plan, tmp_path / "plan")
    ask = (*QUICK, "--ratio", 0.75, "--out", folder)
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "load_model", fail)
        done = run(*ask, "--checkpoints", tmp_path / "run")
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

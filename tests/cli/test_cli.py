"""The command as a user types it."""

import inspect
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
import torch
import typer

from manifoldkv import RECIPES, CompressionPlan, load_model
from manifoldkv import compress as compress_to_plan
from manifoldkv.cli import inputs, main, measuring, planning
from manifoldkv.cli.app import app
from manifoldkv.cli.generating import NEW_TOKENS
from manifoldkv.cli.measuring import TASK_LENGTH
from manifoldkv.cli.options import Dtype
from manifoldkv.coding.integers import BITS
from manifoldkv.evaluation import Comparison, Perplexity, decode_speed
from manifoldkv.evaluation.questions import TASKS
from manifoldkv.evaluation.speed import PROMPT
from manifoldkv.objectives import OBJECTIVES
from manifoldkv.ranks import RANK_RULES, Optimal
from manifoldkv.recipes.config import CompressionConfig
from manifoldkv.recipes.named import DEFAULT_RECIPE
from manifoldkv.recipes.own import own_text
from manifoldkv.solvers import SOLVERS
from manifoldkv.text import sources
from manifoldkv.text.tokens import LENGTH, SEQUENCES
from tests.families import tiny_model, tiny_tokens
from tests.plans import bits_plan

COMMAND = [sys.executable, "-c", "from manifoldkv.cli import main; main()"]
MODEL = str(Path(__file__).parents[2] / "studies" / "reference_models" / "reference-llama")
FEW = ("--sequences", "4", "--length", "64")
LOW_RANK = ("--recipe", "low-rank")


def run(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["manifoldkv", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "plan"
    arguments = (MODEL, "--recipe", "eigen-attention", "--out", str(folder), *FEW)
    with (
        mock.patch.object(sys, "argv", ["manifoldkv", "compress", *arguments]),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
        pytest.raises(SystemExit) as ended,
    ):
        main()
    assert not ended.value.code, err.getvalue()
    assert f"plan: {folder}" in out.getvalue()
    estimated = ["reading", "rehearsing"]
    assert phases(err.getvalue()) == ["loading", *estimated, "reading", "finding", "choosing"]
    return folder


def phases(said: str) -> list[str]:
    """First words of the lines on standard error, where nobody watches bars."""
    found = [re.fullmatch(r"\d\d:\d\d:\d\d (\w+) .+", line) for line in said.splitlines()]
    assert all(found), said
    return [line[1] for line in found if line]


@pytest.fixture(scope="module")
def short_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model with 512 positions; plans of the one fit the other."""
    folder = tmp_path_factory.mktemp("short")
    for path in Path(MODEL).iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 512}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_the_plan_is_saved(plan: Path) -> None:
    found = CompressionPlan.load(plan)
    assert found.ratio == 0.5
    said = found.provenance
    assert (said.text, said.sequences, said.length) == ("docstrings", 4, 64)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of recipe stored."""
    folder = tmp_path_factory.mktemp("cli") / "stored"
    tokens = torch.randint(1, 4000, (4, 64), generator=torch.Generator().manual_seed(0))
    model, _ = load_model(MODEL)
    compress_to_plan(model, tokens, recipe="stored", ratio=0.25, context=400).save(folder)
    return folder


def test_a_prompt_is_read_once_and_its_cache_from_a_file(
    stored: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    file, known = tmp_path / "prompt.kv", (MODEL, "--max-new-tokens", 8, "--json")
    prompt = "Return the sum of all elements of an array along a given axis."

    def ask(text: str) -> dict:
        given = ("generate", *known, "--plan", stored, "--cache", file, "--prompt", text)
        code, out, err = run(capsys, monkeypatch, *given)
        assert code == 0, err
        return json.loads(out)

    first, content = ask(prompt), file.read_bytes()
    again = ask(prompt)
    assert first.pop("cached_tokens") == 0
    count = again.pop("cached_tokens")
    assert count > 10
    assert again == first
    assert first["cache_bytes"] == len(content)
    assert file.read_bytes() == content
    assert ask(prompt + " The default is")["cached_tokens"] == count  # and the rest is appended
    assert file.read_bytes()[112 : len(content)] == content[112:]
    assert ask(prompt) == again | {
        "cached_tokens": count,
        "cache_bytes": file.stat().st_size,
    }
    other = ask("Nothing of the kind, but something else.")
    assert other["cached_tokens"] == 0
    assert ask(prompt)["text"] == first["text"]


def test_a_file_that_is_no_cache_of_the_plan_is_left_alone(
    stored: Path, plan: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    file = tmp_path / "letter.txt"
    file.write_text("Dear reader")
    ask = ("generate", MODEL, "--prompt", "Return the sum", "--cache", file)
    for more, said in (
        (("--plan", stored), "letter.txt: 11 bytes are no stored cache; take another file"),
        (("--plan", plan), "the plan holds no tables of symbols"),
        ((), "goes with the --plan of recipe stored"),
    ):
        code, _, err = run(capsys, monkeypatch, *ask, *more)
        assert code == 2
        assert said in err
    assert file.read_text() == "Dear reader"
    code, _, err = run(
        capsys, monkeypatch, *ask[:2], "--prompt", "a", "--cache", tmp_path / "x", "--plan", stored
    )
    assert code == 2
    assert "prompt of one token" in err


@pytest.mark.parametrize(
    "command",
    [("generate", "--prompt", "Return the sum"), ("evaluate",), ("bench",)],
)
def test_nothing_runs_on_a_plan_for_stored_caches(
    command: tuple, stored: Path, capsys, monkeypatch
) -> None:
    name, *more = command
    code, out, err = run(capsys, monkeypatch, name, MODEL, "--plan", stored, *more)
    assert (code, out) == (2, "")
    assert "stored and not attended to" in err


def test_a_report_needs_a_plan_that_a_model_runs_on(
    stored: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    ask = ("report", MODEL, "--plan", stored, "--out", tmp_path / "r.html", *FEW)
    code, out, err = run(capsys, monkeypatch, *ask)
    assert (code, out) == (2, "")
    assert "made by recipe stored" in err


def test_generate_writes_text(plan: Path, capsys, monkeypatch) -> None:
    ask = ("generate", MODEL, "--prompt", "Return the sum of", "--max-new-tokens", 5)
    code, out, _ = run(capsys, monkeypatch, *ask, "--plan", plan)
    assert (code, out.startswith("Return the sum of")) == (0, True)
    code, out, _ = run(capsys, monkeypatch, *ask, "--plan", plan, "--json")
    facts = json.loads(out)
    known = CompressionPlan.load(plan)
    assert facts["cache_bytes"] == known.nbytes(facts["tokens"] - 1, dtype=torch.float32)
    code, out, _ = run(capsys, monkeypatch, *ask, "--json")
    assert "cache_bytes" not in json.loads(out)


def test_drawn_text_depends_on_the_seed_alone(plan: Path, capsys, monkeypatch) -> None:
    ask = ("generate", MODEL, "--prompt", "Return", "--temperature", 1, "--plan", plan)
    first, again, other = (
        run(capsys, monkeypatch, *ask, "--max-new-tokens", 12, "--seed", seed)[1]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_evaluate_measures_both_caches(plan: Path, capsys, monkeypatch) -> None:
    ask = ("evaluate", MODEL, "--plan", plan, *FEW)
    code, out, _ = run(capsys, monkeypatch, *ask, "--json")
    facts = json.loads(out)
    assert code == 0
    assert 10 < facts["uncompressed_perplexity"] < facts["compressed_perplexity"] < 1000
    assert facts["ratio"] == 0.5
    _, out, _ = run(capsys, monkeypatch, *ask)
    assert f"{facts['compressed_perplexity']:.3f}" in out


def test_one_sequence_has_no_standard_error(plan: Path, capsys, monkeypatch) -> None:
    ask = ("evaluate", MODEL, "--plan", plan, "--sequences", 1, "--length", 32)
    facts = strict_json(run(capsys, monkeypatch, *ask, "--json")[1])
    assert facts["standard_error"] is None
    code, out, _ = run(capsys, monkeypatch, *ask)
    assert code == 0
    assert f"added         {facts['added_nll']:.4f} nats per token" in out
    assert "nan" not in out


def test_questions_are_asked_with_both_caches(plan: Path, capsys, monkeypatch) -> None:
    ask = ("evaluate", MODEL, "--plan", plan, "--tasks", "passkey,key-value")
    few = ("--length", 100, "--items", 4)
    code, out, _ = run(capsys, monkeypatch, *ask, *few, "--json")
    assert code == 0
    facts = strict_json(out)
    assert [row["task"] for row in facts["tasks"]] == ["passkey", "key-value"]
    assert all(row["items"] == 4 and not row["counted"] for row in facts["tasks"])
    assert (facts["length"], facts["prefill"], facts["ratio"]) == (100, "exact", 0.5)
    through = strict_json(
        run(capsys, monkeypatch, *ask, *few, "--prefill", "compressed", "--json")[1]
    )
    assert through["tasks"][0]["stock_nll"] == facts["tasks"][0]["stock_nll"]
    assert through["tasks"][0]["added_nll"] != facts["tasks"][0]["added_nll"]
    _, out, _ = run(capsys, monkeypatch, *ask, *few)
    assert f"{facts['tasks'][0]['added_nll']:.3f} ± " in out
    assert "(the uncompressed model fails it)" in out
    _, out, _ = run(capsys, monkeypatch, *ask, "--length", 100, "--items", 1)
    assert "nan" not in out


def test_questions_that_cannot_be_asked(plan: Path, capsys, monkeypatch) -> None:
    ask = ("evaluate", MODEL, "--plan", plan, "--tasks")
    for arguments, message in (
        (("nothing",), "unknown task 'nothing'; known: passkey"),
        (("passkey", "--length", 2000), "longer than the 1,024 positions"),
        (("passkey", "--length", 1024), "tokens, the model 1,024: ask for shorter"),
        (("niah_single_1",), "niah_single_1 needs prompts of at least 1024 tokens, not 512"),
    ):
        code, out, err = run(capsys, monkeypatch, *ask, *arguments)
        assert (code, out) == (2, "")
        assert message in err.splitlines()[-1]


def strict_json(text: str) -> dict:
    """Of a reader that knows JSON and nothing more."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_no_number_that_json_does_not_have(plan: Path, capsys, monkeypatch) -> None:
    broken = Comparison(Perplexity((math.nan, 1.0), 2), Perplexity((math.inf, 800.0), 2))
    monkeypatch.setattr(measuring, "compare", lambda *given: broken)
    ask = ("evaluate", MODEL, "--plan", plan, "--sequences", 2, "--length", 32)
    facts = strict_json(run(capsys, monkeypatch, *ask, "--json")[1])
    assert facts["uncompressed_perplexity"] is facts["compressed_perplexity"] is None
    assert facts["ratio"] == 0.5


def test_inspect_needs_no_model(plan: Path, capsys, monkeypatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "inspect", plan)
    assert code == 0
    assert "ratio 0.5 at 64 tokens, 768 bytes per further token in bfloat16" in out
    facts = json.loads(run(capsys, monkeypatch, "inspect", plan, "--json")[1])
    assert [(x["key_rank"], x["value_rank"]) for x in facts["layers"]] == [(16, 16)] * 6


def test_inspect_tells_tokens_that_are_kept(
    plan: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    for sinks, said in (
        (0, "        keys pre-rotation"),
        (4, "        first 4 tokens uncompressed, keys"),
    ):
        replace(CompressionPlan.load(plan), sinks=sinks).save(tmp_path)
        assert said in run(capsys, monkeypatch, "inspect", tmp_path)[1]
        facts = json.loads(run(capsys, monkeypatch, "inspect", tmp_path, "--json")[1])
        assert facts["sinks"] == sinks


def test_bench_takes_turns(plan: Path, capsys, monkeypatch) -> None:
    ask = ("bench", MODEL, "--plan", plan, "--tokens", 40, "--new-tokens", 2)
    code, out, _ = run(capsys, monkeypatch, *ask, "--rounds", 1, "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["compressed_bytes"] == facts["stock_bytes"] / 2 == 42 * 768 * 2
    assert facts["time_ratio"] == facts["compressed_seconds"] / facts["stock_seconds"]


def test_another_model_is_calibrated_on_what_it_writes_and_measured_on_what_is_named(
    short_model: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    small = ("--sequences", 2, "--length", 40, "--recipe", "eigen-attention")
    out, work = tmp_path / "plan", tmp_path / "work"
    ask = ("compress", short_model, *small, "--out", out, "--work", work)
    code, _, err = run(capsys, monkeypatch, *ask)
    assert code == 0, err
    assert "writing 2 texts to calibrate on" in err
    known = CompressionPlan.load(out)
    assert known.provenance.text == "own"
    model, _ = load_model(short_model)
    written = own_text(model, 2, 40)
    expected = compress_to_plan(model, written, recipe="eigen-attention", ratio=0.5)
    assert known.digest() == expected.digest()

    code, _, err = run(capsys, monkeypatch, *ask, "--force")
    assert (code, "writing" in err) == (0, False)  # it has been written
    code, _, err = run(capsys, monkeypatch, "compress", short_model, *small, "--dry-run")
    assert (code, "writing" in err) == (0, False)

    for command in ("evaluate", "diagnose"):
        code, _, err = run(capsys, monkeypatch, command, short_model, "--plan", out)
        assert code == 2
        assert f"name a text to measure {short_model} on with --text: a .txt file" in err
        code, _, err = run(
            capsys, monkeypatch, command, short_model, "--plan", out, "--text", "own"
        )
        assert code == 2
        assert "own is calibration text that a model writes itself" in err


def test_defaults_fit_a_model_of_few_positions(
    plan: Path, short_model: str, capsys, monkeypatch
) -> None:
    known = (short_model, "--plan", plan)
    few = ("--new-tokens", 2, "--rounds", 1, "--json")
    code, out, err = run(capsys, monkeypatch, "bench", *known, *few)
    assert (code, json.loads(out)["tokens"]) == (0, 510), err
    config = Path(short_model) / "config.json"
    whole = config.read_text()
    try:
        config.write_text(whole.replace("512", "40"))
        text = ("--text", "docstrings", "--sequences", 2)
        for command in ("evaluate", "diagnose"):
            code, out, err = run(capsys, monkeypatch, command, *known, *text)
            assert code == 0
            assert "2 × 40" in err
        ask = ("generate", *known, "--prompt", "Return the sum of", "--json")
        assert json.loads(run(capsys, monkeypatch, *ask)[1])["tokens"] <= 40
    finally:
        config.write_text(whole)


def test_diagnose_has_a_row_per_layer(plan: Path, capsys, monkeypatch) -> None:
    ask = ("diagnose", MODEL, "--plan", plan, *FEW)
    rows = json.loads(run(capsys, monkeypatch, *ask, "--json")[1])["layers"]
    assert [row["layer"] for row in rows] == list(range(6))
    assert all(0 < row["layer_output_error"] < 1 for row in rows)


def test_diagnose_sees_rounding(stored: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """Of bits in a cache, and of symbols in a file."""
    tokens = torch.randint(1, 4000, (4, 64), generator=torch.Generator().manual_seed(0))
    model, _ = load_model(MODEL)
    compress_to_plan(model, tokens, recipe="best", ratio=0.25, context=400).save(tmp_path)
    for folder in (tmp_path, stored):
        ask = ("diagnose", MODEL, "--plan", folder, *FEW)
        rows = strict_json(run(capsys, monkeypatch, *ask, "--json")[1])["layers"]
        assert [row["layer"] for row in rows] == list(range(6))
        assert all(1e-3 < row["layer_output_error"] < 1 for row in rows)


def test_what_is_registered_is_listed(capsys, monkeypatch) -> None:
    found = json.loads(run(capsys, monkeypatch, "list", "--json")[1])
    names = [list(RECIPES), OBJECTIVES.names(), SOLVERS.names(), RANK_RULES.names()]
    assert [list(of_kind) for of_kind in found.values()] == names
    said = run(capsys, monkeypatch, "list")[1]
    assert all(f"\n  {name}" in said for of_kind in names for name in of_kind)


def test_a_dry_run_saves_nothing(tmp_path: Path, capsys, monkeypatch) -> None:
    out = tmp_path / "plan"
    ask = ("compress", MODEL, "--out", out, "--dry-run", *FEW, "--recipe", "low-rank")
    facts = json.loads(run(capsys, monkeypatch, *ask, "--json")[1])
    assert facts["cache_bytes"] == facts["stock_bytes"] / 2 == 6 * 2 * 2 * 32 * 4 / 2
    assert set(facts["seconds"]) == {"capture", "bases", "ranks", "tuning"}
    assert all(seconds > 0 for seconds in facts["seconds"].values())
    assert "Nothing was saved" in run(capsys, monkeypatch, *ask)[1]
    assert not out.exists()


def test_a_dry_run_counts_what_writing_its_own_text_takes(capsys, monkeypatch, tmp_path) -> None:
    ask = ("compress", MODEL, "--text", "own", "--out", tmp_path / "plan", "--dry-run", *FEW)
    facts = json.loads(run(capsys, monkeypatch, *ask, "--json")[1])
    assert facts["seconds"]["text"] > 0
    assert "(text " in run(capsys, monkeypatch, *ask)[1]


@pytest.mark.parametrize("limit", [0, math.inf])
def test_long_work_is_announced_with_the_quick_recipe(
    limit: float, capsys, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(planning, "LONG_SECONDS", limit)
    ask = ("compress", MODEL, "--recipe", "eigen-attention", "--out", tmp_path / "plan", *FEW)
    code, _, err = run(capsys, monkeypatch, *ask)
    assert code == 0
    assert (f"recipe {DEFAULT_RECIPE} is quicker" in err) == (limit == 0)


def test_a_text_is_missing_before_anything_is_loaded(capsys, monkeypatch, tmp_path) -> None:
    other = tmp_path / "no-model"
    code, _, err = run(capsys, monkeypatch, "evaluate", other, "--plan", tmp_path / "no-plan")
    assert code == 2
    assert "name a text to measure" in err


def test_ranks_are_multiples_where_that_is_asked(tmp_path: Path, capsys, monkeypatch) -> None:
    out = tmp_path / "plan"
    arguments = (MODEL, "--recipe", "eigen-attention", "--set", "ranks=sequential", *FEW)
    asked = ("--ratio", "0.6", "--set", "ranks.multiple=8", "--context", "300", "--out", str(out))
    assert run(capsys, monkeypatch, "compress", *arguments, *asked)[0] == 0
    plan = CompressionPlan.load(out)
    assert {basis.rank % 8 for layer in plan.layers for basis in (layer.key, layer.value)} == {0}
    assert plan.provenance.recipe["ranks"]["multiple"] == 8
    assert plan.provenance.context == 300


def test_a_plan_with_bits_for_values_alone_is_inspected(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    model = tiny_model("llama")
    plan = bits_plan(model, tiny_tokens(), ratio=0.5, sinks=0)
    layers = [replace(layer, key_coding=None) for layer in plan.layers]
    replace(plan, layers=(layers[0], *plan.layers[1:])).save(tmp_path)
    code, out, _ = run(capsys, monkeypatch, "inspect", tmp_path)
    assert code == 0
    (first,) = re.findall(r"^ +0 .*", out, re.MULTILINE)
    assert first.split()[-2:] == [
        f"{16 * layers[0].key.rank / 8:.2f}",
        f"{layers[0].mean_bits['value']:.2f}",
    ]


def test_bits_from_one_budget(tmp_path: Path, capsys, monkeypatch) -> None:
    ask = ("compress", MODEL, "--ratio", 0.2, "--out", tmp_path)
    code, out, err = run(capsys, monkeypatch, *ask, "--sequences", 8, "--length", 32)
    assert code == 0
    assert phases(err) == ["loading", "reading", *["fitting"] * 3, "bits", "predicting"]
    plan = CompressionPlan.load(tmp_path)
    assert f"loss    {plan.provenance.predicted_nats:.4f} nats per token predicted, on" in out
    lines = out.partition("layer   key rank")[2].splitlines()[1:]
    for line, layer in zip(lines, plan.layers, strict=False):
        bits = [float(x) for x in line.split()[-2:]]
        assert bits == pytest.approx([*layer.mean_bits.values()], abs=0.01)
    for more, expected in (
        ("ranks=uniform", "recipe best has no field 'ranks'; known: widths, sinks, below, rotary"),
        ("sinks.x=1", "sinks of recipe best has no field 'x'"),
        ("sinks=many", "sinks=many must be int"),
        ("sinks", "--set takes name=value, got 'sinks'"),
        ("bits=4", "leave the quantisation out"),
    ):
        code, _, err = run(capsys, monkeypatch, *ask, "--force", *FEW, "--set", more)
        assert code == 2
        assert expected in err


def test_work_is_kept_and_used_again(tmp_path: Path, capsys, monkeypatch) -> None:
    ask = ("compress", MODEL, "--recipe", "eigen-attention", *FEW)
    ask = (*ask, "--work", tmp_path / "work", "--set", "bits=4")
    for name in ("first", "second"):
        assert run(capsys, monkeypatch, *ask, "--out", tmp_path / name)[0] == 0
    digests = {CompressionPlan.load(tmp_path / name).digest() for name in ("first", "second")}
    assert len(digests) == 1
    assert len(list((tmp_path / "work").glob("layer-*"))) == 12


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("inspect", "nowhere"), "cannot read nowhere/plan.safetensors"),
        (("compress", "./nowhere"), "no model at ./nowhere"),
        (("compress", MODEL, "--ratio", 2), "ratio 2 is not"),
        (("compress", MODEL, "--recipe", "x"), "unknown recipe 'x'; known: best"),
        (("compress", MODEL, "--text", "./x.txt"), "cannot read text"),
        (("compress", MODEL, *LOW_RANK, "--set", "bits=5"), "latents of 5 bits are not supported"),
        (("report", MODEL, "--plan", "p", "--out", "r.pdf"), "r.pdf is no file that ends in .htm"),
        (("compress", MODEL, "--set", f"seed={10**20}"), f"seed {10**20} is not an integer"),
        (("compress", MODEL, "--set", f"seed={-(10**20)}"), f"seed {-(10**20)} is not an int"),
        (("compress", MODEL, "--length", 100_000), "100,000 tokens are longer than the"),
        (("compress", MODEL, "--device", "meta"), "cannot use device 'meta'"),
        (("compress", MODEL, "--device", "cuda:99"), "cannot use device 'cuda:99'"),
        (("compress", MODEL, "--text", ""), "the name of the text is empty"),
        (("compress", ""), "the name of the model is empty"),
        (("compress", MODEL, "--out", ""), "'--out': the name is empty"),
        (("compress", MODEL, "--work", ""), "'--work': the name is empty"),
        (("report", MODEL, "--plan", ""), "'--plan': the name is empty"),
        (("inspect", ""), "'PLAN': the name is empty"),
        (("generate", MODEL, "--prompt", ""), "the prompt has no token"),
        (("generate", MODEL, "--prompt", "a" * 9000), "are longer than the 1,024 posit"),
        (
            ("generate", MODEL, "--prompt", "Return", "--max-new-tokens", 1024),
            "1024 new tokens after a prompt of 1 are more than the 1024 positions",
        ),
        (("generate", MODEL, "--prompt", "a", "--seed", 10**20), f"seed {10**20} is no"),
        (("compress", MODEL, "--set", "rotary=mid"), "unknown rotary space 'mid'"),
    ],
)
def test_errors_are_one_line_and_code_2(
    arguments: tuple, said: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
    assert out == ""
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("command", ["evaluate", "diagnose"])
@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--length", 100_000), "100,000 tokens are longer than the 1,024 positions"),
        (("--device", "meta"), "cannot use device 'meta'"),
        (("--text", ""), "the name of the text is empty"),
    ],
)
def test_measuring_the_impossible_is_refused(
    command: str, option: tuple, said: str, plan: Path, capsys, monkeypatch
) -> None:
    ask = (command, MODEL, "--plan", plan, "--sequences", 1)
    code, out, err = run(capsys, monkeypatch, *ask, *option)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]


def test_the_coldest_text_is_the_likeliest(plan: Path, capsys, monkeypatch) -> None:
    ask = ("generate", MODEL, "--prompt", "Return", "--plan", plan)
    ask = (*ask, "--max-new-tokens", 4, "--temperature")
    found = {run(capsys, monkeypatch, *ask, degree)[:2] for degree in (0, 1e-300)}
    assert len(found) == 1
    assert found.pop()[0] == 0


class TestWhatIsInTheWay:
    ASK = ("compress", MODEL, "--recipe", "eigen-attention", *FEW)

    def test_a_plan_is_not_overwritten_before_anything_is_loaded(
        self, plan: Path, tmp_path: Path, capsys, monkeypatch
    ) -> None:
        before = (plan / "plan.json").read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(inputs, "load_model", None)
            code, _, err = run(capsys, patch, *self.ASK, "--out", plan, "--work", tmp_path)
        assert code == 2
        assert f"{plan} holds a plan already: take another folder as --out, or --force" in err
        assert (plan / "plan.json").read_bytes() == before
        assert run(capsys, monkeypatch, *self.ASK, "--out", plan, "--dry-run")[0] == 0

    def test_force_overwrites_it(self, plan: Path, tmp_path: Path, capsys, monkeypatch) -> None:
        folder = shutil.copytree(plan, tmp_path / "plan")
        other = (*self.ASK, "--ratio", 0.75, "--out", folder)
        assert run(capsys, monkeypatch, *other)[0] == 2
        assert CompressionPlan.load(folder).ratio == 0.5
        assert run(capsys, monkeypatch, *other, "--force")[0] == 0
        assert CompressionPlan.load(folder).ratio == 0.75

    def test_the_folder_of_its_own_checkpoints_is_its_own(
        self, tmp_path: Path, capsys, monkeypatch
    ) -> None:
        own = ("--out", tmp_path / "both", "--work", f"{tmp_path}/./both")
        for _ in range(2):
            assert run(capsys, monkeypatch, *self.ASK, *own)[0] == 0

    def test_what_cannot_be_written_is_named_and_not_another_option(
        self, tmp_path: Path, capsys, monkeypatch
    ) -> None:
        (tmp_path / "file").write_text("")
        ask = ("report", MODEL, "--plan", "p", "--out", tmp_path / "file" / "r.html")
        code, _, err = run(capsys, monkeypatch, *ask)
        assert code == 2
        assert f"manifoldkv: cannot write to {tmp_path / 'file'}: " in err
        assert "--out" not in err

    def test_a_run_that_fails_leaves_no_folder(self, tmp_path: Path, capsys, monkeypatch) -> None:
        (tmp_path / "t.txt").write_text("one two three four\n" * 30)
        text, out = ("--text", tmp_path / "t.txt"), tmp_path / "new" / "plan"
        assert run(capsys, monkeypatch, *self.ASK, *text, "--out", out)[0] == 2
        (tmp_path / "old").mkdir()
        old = tmp_path / "old" / "plan"
        monkeypatch.setattr(planning, "find_plan", TestInterruption.interrupt)
        assert run(capsys, monkeypatch, *self.ASK, "--out", old)[0] == 130
        assert {path.name for path in tmp_path.rglob("*")} == {"t.txt", "old"}

    @pytest.mark.parametrize(
        "more", [("--ratio", 1e-4), ("--length", 100_000)], ids=["ratio", "length"]
    )
    def test_a_model_writes_nothing_for_a_run_that_is_refused(
        self, more: tuple, tmp_path: Path, capsys, monkeypatch
    ) -> None:
        monkeypatch.setattr(planning, "own_text", None)
        ask = ("compress", MODEL, "--text", "own", *more, "--out", tmp_path / "plan")
        assert run(capsys, monkeypatch, *ask)[0] == 2


def test_every_phase_is_a_line(tmp_path: Path, capsys, monkeypatch) -> None:
    pytest.importorskip("plotly")
    few = Optimal(candidates=(0.25, 0.5, 1.0), sequences=1)
    recipe = replace(RECIPES["low-rank"], ranks=few, tuning_steps=2)
    monkeypatch.setitem(RECIPES, "low-rank", recipe)
    few = ("--sequences", 2, "--length", 32)
    ask = ("compress", MODEL, "--out", tmp_path, *few, *LOW_RANK, "--set", "bits=4")
    code, out, err = run(capsys, monkeypatch, *ask)
    assert code == 0
    estimated = ["reading", "rehearsing"]
    found = ["reading", "finding", "choosing", "tuning", "rounding"]
    assert phases(err) == ["loading", *estimated, *found]
    ask = ("report", MODEL, "--plan", tmp_path, "--out", tmp_path / "r.html", *few)
    _, reported, err = run(capsys, monkeypatch, *ask)
    assert phases(err) == ["loading", "reading", *["measuring"] * 3, "continuing"]
    assert reported == f"report: {tmp_path / 'r.html'}\n"
    assert not re.search(r"\d\d:\d\d:\d\d", out)


class TestInterruption:
    @staticmethod
    def interrupt(*ignored: object, **also_ignored: object) -> None:
        raise KeyboardInterrupt

    def test_it_is_said_wherever_it_comes(self, plan: Path, capsys, monkeypatch) -> None:
        monkeypatch.setattr(inputs, "load_model", self.interrupt)
        for command in ("evaluate", "bench", "diagnose"):
            found = run(capsys, monkeypatch, command, MODEL, "--plan", plan)
            assert found == (130, "", "manifoldkv: interrupted\n")

    def test_what_is_left_is_said(self, tmp_path: Path, capsys, monkeypatch) -> None:
        monkeypatch.setattr(planning, "find_plan", self.interrupt)
        ask = ("compress", MODEL, "--out", tmp_path / "plan")
        code, out, err = run(capsys, monkeypatch, *ask)
        assert (code, out) == (130, "")
        assert err.endswith("nothing is saved; with --work FOLDER the same command resumes\n")
        code, _, err = run(capsys, monkeypatch, *ask, "--work", tmp_path / "w")
        assert code == 130
        assert f"interrupted: finished parts are in {tmp_path / 'w'}; the same comm" in err

    def test_a_real_one(self, tmp_path: Path) -> None:
        work = tmp_path / "work"
        ask = ("compress", MODEL, "--recipe", "low-rank", *FEW, "--work", str(work))
        with subprocess.Popen(
            [*COMMAND, *ask, "--out", str(tmp_path / "plan")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell starts what runs in the background with Ctrl-C ignored.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        ) as running:
            for line in running.stderr:
                if "choosing ranks" in line:
                    running.send_signal(signal.SIGINT)
                    break
            out, err = running.communicate()
        assert (running.returncode, out) == (130, "")
        assert err == (
            f"manifoldkv: interrupted: finished parts are in {work}; the same command resumes "
            "there\n"
        )
        assert len(list(work.glob("layer-*"))) == 108  # bases at all ranks
        assert not (tmp_path / "plan").exists()


class TestStandardOutput:
    """A result is printed whole, or its loss is told."""

    @pytest.fixture
    def nowhere(self, request: pytest.FixtureRequest) -> Iterator[int]:
        """A full disk, or a pipe that nobody reads any more."""
        if request.param == "full":
            descriptor = os.open("/dev/full", os.O_WRONLY)
        else:
            other, descriptor = os.pipe()
            os.close(other)
        yield descriptor
        os.close(descriptor)

    EXPECTED = {  # noqa: RUF012 (constant)
        "full": (2, "manifoldkv: cannot write to standard output: No space left on device\n"),
        "unread": (0, ""),
    }

    @pytest.mark.parametrize(
        ("nowhere", "kind"), [("full", "full"), ("unread", "unread")], indirect=["nowhere"]
    )
    def test_of_a_process(self, nowhere: int, kind: str) -> None:
        ask = [*COMMAND, "--help"]
        done = subprocess.run(ask, stdout=nowhere, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr) == self.EXPECTED[kind]

    @pytest.mark.parametrize(
        ("nowhere", "kind"), [("full", "full"), ("unread", "unread")], indirect=["nowhere"]
    )
    @pytest.mark.parametrize(
        "ask", [("--help",), ("compress", "--help"), ("list", "--json"), ("inspect",)]
    )
    def test_of_every_command(
        self, ask: tuple, nowhere: int, kind: str, plan: Path, capsys, monkeypatch
    ) -> None:
        ask = (*ask, plan) if "inspect" in ask else ask
        with monkeypatch.context() as patch, open(nowhere, "w", closefd=False) as stream:
            patch.setattr(sys, "stdout", stream)
            code, _, err = run(capsys, patch, *ask)
        assert (code, err) == self.EXPECTED[kind]

    def test_closed(self, plan: Path, capsys, monkeypatch) -> None:
        """What Python makes of ``>&-``."""
        with monkeypatch.context() as patch:
            for name in ("stdout", "__stdout__"):
                patch.setattr(sys, name, None)
            code, _, err = run(capsys, patch, "inspect", plan)
        said = "manifoldkv: standard output is closed: there is nowhere to print results\n"
        assert (code, err) == (2, said)

    def test_an_encoding_without_the_characters(self, plan: Path, capsys, monkeypatch) -> None:
        with open(os.devnull, "w", encoding="ascii") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            ask = ("evaluate", MODEL, "--plan", plan, "--sequences", 2, "--length", 8)
            assert run(capsys, monkeypatch, *ask)[0] == 0  # writes ×

    def test_standard_error_may_be_closed(self, plan: Path, capsys, monkeypatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", None)
            patch.setattr(sys, "argv", ["manifoldkv", "inspect", "nowhere"])
            with pytest.raises(SystemExit) as ended:
                main()
        assert ended.value.code == 2


COMMANDS = typer.main.get_command(app).commands


class TestHelp:
    """Nothing of the library is imported for help: what it says of defaults stands there as words.

    They must be those of the library.
    """

    @staticmethod
    def option(command: str, name: str) -> Any:
        (found,) = [p for p in COMMANDS[command].params if p.name == name]
        return found

    def said(self, command: str, name: str) -> str:
        return self.option(command, name).help

    def default(self, command: str, name: str) -> str:
        return self.option(command, name).show_default

    @pytest.mark.parametrize("command", ["compress", "evaluate", "compare", "diagnose"])
    def test_the_text(self, command: str) -> None:
        assert self.default(command, "length") == f"{LENGTH}, or all the model takes"
        said, own, _ = self.said(command, "text").partition(". 'own' is text that the model itself")
        said = said.removeprefix("Text: ").removesuffix(".")
        assert sources.HELP.startswith(said)
        assert bool(own) == (command == "compress")
        assert self.default(command, "text").endswith("docstrings for the reference models")

    def test_windows_and_bits(self) -> None:
        assert self.default("compress", "sequences") == str(SEQUENCES)
        said = self.said("compress", "settings").partition("to integers of ")[2]
        assert sorted(map(int, re.findall(r"\d+", said))) == sorted(BITS)

    def test_tokens(self) -> None:
        assert self.default("bench", "tokens") == f"{PROMPT}, or what the model takes"
        said = self.default("generate", "max_new_tokens")
        assert said == f"{NEW_TOKENS}, or all the model takes"

    def test_tasks(self) -> None:
        said = self.said("evaluate", "tasks")
        assert all(task in said for task in TASKS)
        assert f"({TASK_LENGTH}, or half of what the model takes)" in said

    def test_defaults_of_a_run(self) -> None:
        config, given = CompressionConfig(), {p.name: p for p in COMMANDS["compress"].params}
        assert given["recipe"].default == DEFAULT_RECIPE == config.recipe
        assert given["ratio"].show_default == f"{config.ratio:g}"
        for name in ("sequences", "length", "context"):
            assert given[name].default == getattr(config, name), name

    def test_a_run_has_sixteen_options_at_most(self) -> None:
        assert len([p for p in COMMANDS["compress"].params if p.param_type_name == "option"]) <= 16

    def test_defaults_of_a_bench(self) -> None:
        of_library = inspect.signature(decode_speed).parameters
        for option in COMMANDS["bench"].params:
            if option.name in ("tokens", "new_tokens", "rounds"):
                assert option.default == of_library[option.name].default

    def test_dtypes(self) -> None:
        assert {type(getattr(torch, name)) for name in get_args(Dtype)} == {torch.dtype}

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_default_is_shown_and_every_help_is_a_sentence(
        self, command: str, capsys, monkeypatch
    ) -> None:
        """What takes a value is required or tells its default; the others are off."""
        code, out, _ = run(capsys, monkeypatch, command, "-h")
        assert code == 0
        takes_value = [p for p in COMMANDS[command].params if not getattr(p, "is_flag", False)]
        shown = out.count("[required") + out.count("[default:")
        two_ways = [p for p in COMMANDS[command].params if p.secondary_opts]
        assert shown == len(takes_value) + len(two_ways)
        for parameter in COMMANDS[command].params:
            assert re.fullmatch(r"[A-Z].* .*[.)]", parameter.help), parameter.name


HEAVY = {"torch", "transformers", "numpy", "pandas", "datasets", "geoopt", "matplotlib", "scipy"}


@pytest.mark.parametrize("ask", [("--help",), ("--version",), ("compress", "-h"), ("evaluate",)])
def test_help_and_version_import_nothing_heavy(ask: tuple) -> None:
    """They take tenths of a second for that, not seconds."""
    program = (
        "import atexit, sys; from manifoldkv.cli import main; "
        f"atexit.register(lambda: print(sorted({HEAVY!r} & set(sys.modules)))); main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *ask], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "[]", done


def test_the_version_is_that_of_the_package(capsys, monkeypatch) -> None:
    assert run(capsys, monkeypatch, "--version") == (0, f"manifoldkv {version('manifoldkv')}\n", "")


def test_help_names_every_command(capsys, monkeypatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "--help")
    assert code == 0
    assert run(capsys, monkeypatch, "-h")[1] == out
    commands = "compress generate evaluate export compare inspect bench diagnose report list"
    assert list(COMMANDS) == commands.split()
    assert all(f"  {command} " in out for command in COMMANDS)
    assert "Exit codes: 0" in out
    assert "..." not in out.replace("[ARGS]...", "")  # every line of a command is whole


class TestBudget:
    """A size in bytes, and the parts of a recipe."""

    ASK = ("compress", MODEL, "--recipe", "eigen-attention", *FEW)

    def test_bytes_of_a_context(self, tmp_path: Path, capsys, monkeypatch) -> None:
        ask = (*self.ASK, "--bytes", "60KiB", "--context", "0.125k", "--out", tmp_path)
        assert run(capsys, monkeypatch, *ask)[0] == 0
        plan = CompressionPlan.load(tmp_path)
        assert plan.provenance.context == 128
        assert plan.provenance.requested_ratio == 60 * 1024 / (128 * 6 * 2 * 2 * 32 * 4)
        taken = plan.nbytes(128, dtype=torch.float32)
        assert 0.9 * 60 * 1024 < taken <= 60 * 1024
        facts = json.loads(run(capsys, monkeypatch, *ask, "--dry-run", "--json")[1])
        assert facts["cache_bytes"] == 60 * 1024 / 128

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            (("--bytes", "1GiB"), "say with --context how many tokens it has"),
            (("--bytes", "1GiB", "--ratio", 0.5, "--context", 64), "give one"),
            (("--bytes", "1XB", "--context", 64), "'1XB' is no number of bytes: write 1GiB"),
            (("--bytes", "0", "--context", 64), "'0' is no number of bytes"),
            (("--context", "many"), "'many' is no number of tokens: write 4000 or 32k"),
            (("--set", "sinks=4"), "recipe eigen-attention has no field 'sinks'; known: obj"),
            (("--set", "objective=x"), "unknown objective 'x'; known: "),
            (("--set", "solver=x"), "unknown solver 'x'; known: "),
            (("--set", "key_grouping=x"), "unknown head grouping 'x'; known: shared, all"),
        ],
    )
    def test_what_cannot_be_is_refused_before_anything_is_loaded(
        self, more: tuple, said: str, tmp_path: Path, capsys, monkeypatch
    ) -> None:
        monkeypatch.setattr(inputs, "load_model", None)
        code, out, err = run(capsys, monkeypatch, *self.ASK, "--out", tmp_path / "p", *more)
        assert (code, out) == (2, "")
        assert said in err

    def test_parts_of_a_recipe(self, tmp_path: Path, capsys, monkeypatch) -> None:
        fields = ("objective=kq-svd", "key_grouping=all", "value_grouping=2", "tuning_steps=1")
        more = ("ranks=optimal", "ranks.multiple=8")
        settings = chain(*(("--set", field) for field in (*fields, *more)))
        ask = (*self.ASK, *settings, "--out", tmp_path)
        assert run(capsys, monkeypatch, *ask)[0] == 0
        said = CompressionPlan.load(tmp_path).provenance.recipe
        assert (said["objective"]["name"], said["solver"]["name"]) == ("kq-svd", "closed-form")
        assert (said["key_grouping"], said["value_grouping"]) == ("all", 2)
        assert (said["ranks"]["name"], said["ranks"]["multiple"]) == ("optimal", 8)
        assert said["tuning_steps"] == 1


class TestChat:
    @pytest.fixture
    def chat_model(self, tmp_path: Path) -> Path:
        """The reference model with a chat template that is easily known again."""
        for path in Path(MODEL).iterdir():
            (tmp_path / path.name).symlink_to(path)
        (tmp_path / "chat_template.jinja").write_text(
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<answer>{% endif %}"
        )
        return tmp_path

    def test_the_answer_alone_is_printed(
        self, chat_model: Path, plan: Path, capsys, monkeypatch
    ) -> None:
        asked = ("--prompt", "What is it?", "--max-new-tokens", 6)
        for more in ((), ("--plan", plan)):
            code, out, err = run(
                capsys, monkeypatch, "generate", chat_model, "--chat", *asked, *more
            )
            assert code == 0, err
            begun = ("--prompt", "<user>What is it?<answer>", *asked[2:])
            whole = run(capsys, monkeypatch, "generate", MODEL, *begun, *more)[1]
            assert whole == f"<user>What is it?<answer>{out}"

    def test_a_model_without_a_template(self, capsys, monkeypatch) -> None:
        ask = ("generate", MODEL, "--prompt", "What is it?", "--chat")
        code, out, err = run(capsys, monkeypatch, *ask)
        assert (code, out) == (2, "")
        assert "has no chat template: leave --chat out" in err

    def test_top_p(self, capsys, monkeypatch) -> None:
        """Among the likeliest that have no probability together, there is one."""
        ask = ("generate", MODEL, "--prompt", "Return", "--max-new-tokens", 8)
        likeliest = run(capsys, monkeypatch, *ask)[:2]
        drawn = (*ask, "--temperature", 1, "--seed", 1)
        assert run(capsys, monkeypatch, *drawn, "--top-p", 1e-6)[:2] == likeliest
        assert run(capsys, monkeypatch, *drawn)[1] != likeliest[1]
        for top_p, said in ((0.9, "give a --temperature above 0 too"), (2, "is not in (0, 1]")):
            code, _, err = run(capsys, monkeypatch, *ask, "--top-p", top_p)
            assert (code, said in err) == (2, True)


class TestCompare:
    def test_two_plans_side_by_side(self, plan: Path, tmp_path: Path, capsys, monkeypatch) -> None:
        few = ("--recipe", "eigen-attention", *FEW, "--ratio", 0.25, "--out", tmp_path / "less")
        assert run(capsys, monkeypatch, "compress", MODEL, *few)[0] == 0
        ask = ("compare", MODEL, plan, tmp_path / "less", *FEW, "--max-new-tokens", 5)
        facts = strict_json(run(capsys, monkeypatch, *ask, "--json")[1])
        for folder, found in zip((plan, tmp_path / "less"), facts["plans"], strict=True):
            measured = run(capsys, monkeypatch, "evaluate", MODEL, "--plan", folder, *FEW, "--json")
            known = json.loads(measured[1])
            assert found["plan"] == str(folder)
            assert found["added_nll"] == known["added_nll"]
            assert found["cache_bytes"] == known["cache_bytes"]
            assert facts["uncompressed_perplexity"] == known["uncompressed_perplexity"]
        half, quarter = facts["plans"]
        assert 0 < half["added_nll"] < quarter["added_nll"]
        assert (half["ratio"], quarter["ratio"]) == (0.5, 0.25)
        code, out, _ = run(capsys, monkeypatch, *ask)
        assert code == 0
        assert f"{half['added_nll']:.4f} ± {half['standard_error']:.4f}" in out
        assert "continued by the uncompressed model:" in out

    def test_texts_are_those_of_each_cache(self, plan: Path, capsys, monkeypatch) -> None:
        begun, few = ("--prompt", "Return the sum of"), ("--max-new-tokens", 5)
        ask = ("compare", MODEL, plan, plan, "--sequences", 1, "--length", 16, *begun, *few)
        facts = strict_json(run(capsys, monkeypatch, *ask, "--json")[1])
        for more, found in (
            ((), facts["uncompressed_text"]),
            (("--plan", plan), facts["plans"][1]["text"]),
        ):
            whole = run(capsys, monkeypatch, "generate", MODEL, *begun, *few, *more)[1]
            assert whole == f"{facts['prompt']}{found}\n"

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            (("--prompt", ""), "the prompt has no token"),
            (("--prompt", "a", "--max-new-tokens", 1024), "more than the 1024 positions"),
            (("--max-new-tokens", 1024), "leave no room for a prompt"),
        ],
    )
    def test_what_cannot_go_on(
        self, more: tuple, said: str, plan: Path, capsys, monkeypatch
    ) -> None:
        ask = ("compare", MODEL, plan, plan, "--sequences", 1, "--length", 16)
        code, out, err = run(capsys, monkeypatch, *ask, *more)
        assert (code, out) == (2, "")
        assert said in err


def test_auto_is_a_device_that_is_there(plan: Path, capsys, monkeypatch) -> None:
    ask = ("bench", MODEL, "--plan", plan, "--tokens", 8, "--new-tokens", 1, "--rounds", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(capsys, monkeypatch, *ask, "--device", "auto")[0] == 0
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        inputs, "load_model", lambda *name, device, **others: asked.append(device) or sys.exit(7)
    )
    assert run(capsys, monkeypatch, *ask, "--device", "auto")[0] == 7
    assert asked == ["cuda"]

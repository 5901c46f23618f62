"""The command as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from manifoldkv import OBJECTIVES, RECIPES, SOLVERS, CompressionPlan, cli

MODEL = str(Path(__file__).parents[1] / "studies" / "reference_models" / "reference-llama")
FEW = ("--sequences", "4", "--length", "64")


def run(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["manifoldkv", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "plan"
    command = [sys.executable, "-c", "from manifoldkv.cli import main; main()", "compress"]
    arguments = ("--model", MODEL, "--recipe", "eigen-attention", "--out", str(folder), *FEW)
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"plan: {folder}" in done.stdout
    assert done.stderr == ""  # no bar where nobody watches
    return folder


def test_the_plan_is_saved(plan: Path) -> None:
    found = CompressionPlan.load(plan)
    assert found.ratio == 0.5
    said = found.provenance
    assert (said.text, said.sequences, said.length) == ("docstrings", 4, 64)


def test_generate_writes_text(plan: Path, capsys, monkeypatch) -> None:
    ask = ("generate", "--model", MODEL, "--prompt", "Return the sum of", "--max-new-tokens", 5)
    code, out, _ = run(capsys, monkeypatch, *ask, "--plan", plan)
    assert (code, out.startswith("Return the sum of")) == (0, True)
    code, out, _ = run(capsys, monkeypatch, *ask, "--plan", plan, "--json")
    facts = json.loads(out)
    known = CompressionPlan.load(plan)
    assert facts["cache_bytes"] == known.nbytes(facts["tokens"] - 1, dtype=torch.float32)
    code, out, _ = run(capsys, monkeypatch, *ask, "--json")
    assert "cache_bytes" not in json.loads(out)


def test_drawn_text_depends_on_the_seed_alone(plan: Path, capsys, monkeypatch) -> None:
    ask = ("generate", "--model", MODEL, "--prompt", "Return", "--temperature", 1, "--plan", plan)
    first, again, other = (
        run(capsys, monkeypatch, *ask, "--max-new-tokens", 12, "--seed", seed)[1]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_evaluate_measures_both_caches(plan: Path, capsys, monkeypatch) -> None:
    ask = ("evaluate", "--model", MODEL, "--plan", plan, *FEW)
    code, out, _ = run(capsys, monkeypatch, *ask, "--json")
    facts = json.loads(out)
    assert code == 0
    assert 10 < facts["uncompressed_perplexity"] < facts["compressed_perplexity"] < 1000
    assert facts["ratio"] == 0.5
    _, out, _ = run(capsys, monkeypatch, *ask)
    assert f"{facts['compressed_perplexity']:.3f}" in out


def test_one_sequence_has_no_standard_error(plan: Path, capsys, monkeypatch) -> None:
    ask = ("evaluate", "--model", MODEL, "--plan", plan, "--sequences", 1, "--length", 32)
    assert json.loads(run(capsys, monkeypatch, *ask, "--json")[1])["standard_error"] is None


def test_inspect_needs_no_model(plan: Path, capsys, monkeypatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "inspect", "--plan", plan)
    assert code == 0
    assert "ratio 0.5 at 64 tokens, 768 bytes per further token in bfloat16" in out
    facts = json.loads(run(capsys, monkeypatch, "inspect", "--plan", plan, "--json")[1])
    assert [(x["key_rank"], x["value_rank"]) for x in facts["layers"]] == [(16, 16)] * 6


def test_bench_takes_turns(plan: Path, capsys, monkeypatch) -> None:
    ask = ("bench", "--model", MODEL, "--plan", plan, "--tokens", 40, "--new-tokens", 2)
    code, out, _ = run(capsys, monkeypatch, *ask, "--rounds", 1, "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["compressed_bytes"] == facts["stock_bytes"] / 2 == 42 * 768 * 2
    assert facts["time_ratio"] == facts["compressed_seconds"] / facts["stock_seconds"]


def test_diagnose_has_a_row_per_layer(plan: Path, capsys, monkeypatch) -> None:
    ask = ("diagnose", "--model", MODEL, "--plan", plan, *FEW)
    rows = json.loads(run(capsys, monkeypatch, *ask, "--json")[1])["layers"]
    assert [row["layer"] for row in rows] == list(range(6))
    assert all(0 < row["layer_output_error"] < 1 for row in rows)


@pytest.mark.parametrize(
    ("command", "names"),
    [("objectives", OBJECTIVES.names()), ("solvers", SOLVERS.names()), ("recipes", list(RECIPES))],
)
def test_what_is_registered_is_listed(command: str, names: list, capsys, monkeypatch) -> None:
    found = json.loads(run(capsys, monkeypatch, command, "--json")[1])
    assert list(found) == names
    assert all(found.values())
    assert all(name in run(capsys, monkeypatch, command)[1] for name in names)


def test_a_study_becomes_a_page(tmp_path: Path, capsys, monkeypatch) -> None:
    pytest.importorskip("plotly")
    study = Path(MODEL).parents[2] / "figures" / "scale"
    code, out, _ = run(
        capsys, monkeypatch, "report", "--study", study, "--out", tmp_path / "r.html"
    )
    assert (code, out.strip()) == (0, f"report: {tmp_path / 'r.html'}")
    code, _, err = run(capsys, monkeypatch, "report", "--study", tmp_path, "--out", "r.html")
    assert code == 2
    assert "is no folder of a study" in err


def test_a_dry_run_saves_nothing(tmp_path: Path, capsys, monkeypatch) -> None:
    out = tmp_path / "plan"
    ask = ("compress", "--model", MODEL, "--out", out, "--dry-run", *FEW)
    facts = json.loads(run(capsys, monkeypatch, *ask, "--json")[1])
    assert facts["cache_bytes"] == facts["stock_bytes"] / 2 == 6 * 2 * 2 * 32 * 4 / 2
    assert set(facts["seconds"]) == {"capture", "bases", "ranks", "tuning"}
    assert all(seconds > 0 for seconds in facts["seconds"].values())
    assert "Nothing was saved" in run(capsys, monkeypatch, *ask)[1]
    assert not out.exists()


def test_work_is_kept_and_used_again(tmp_path: Path, capsys, monkeypatch) -> None:
    ask = ("compress", "--model", MODEL, "--recipe", "eigen-attention", *FEW)
    ask = (*ask, "--work", tmp_path / "work", "--bits", 4, "--threads", torch.get_num_threads())
    for name in ("first", "second"):
        assert run(capsys, monkeypatch, *ask, "--out", tmp_path / name)[0] == 0
    digests = {CompressionPlan.load(tmp_path / name).digest() for name in ("first", "second")}
    assert len(digests) == 1
    assert len(list((tmp_path / "work").glob("layer-*"))) == 12


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("inspect", "--plan", "nowhere"), "cannot read nowhere/plan.safetensors"),
        (("compress", "--model", "./nowhere"), "no model at ./nowhere"),
        (("compress", "--model", MODEL, "--ratio", 2), "ratio 2 is not"),
        (("compress", "--model", MODEL, "--recipe", "x"), "unknown recipe 'x'; known: eigen"),
        (("compress", "--model", MODEL, "--text", "./x.txt"), "cannot read text"),
        (("compress", "--model", MODEL, "--bits", 5), "latents of 5 bits are not supported"),
        (("compress", "--model", MODEL, "--report", "r.pdf"), "r.pdf does not end in .html"),
        (("compress", "--model", MODEL, "--rotary", "mid"), "'pre', 'post'"),
        (("compress", "--model", MODEL, "--ray-address", "auto"), "goes with --executor ray"),
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


def test_an_interruption_is_code_130(capsys, monkeypatch) -> None:
    def interrupt(*ignored: object, **also_ignored: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_model", interrupt)
    assert run(capsys, monkeypatch, "compress", "--model", MODEL)[0] == 130


def test_help_names_every_command(capsys, monkeypatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "--help")
    assert code == 0
    commands = "compress generate evaluate inspect bench diagnose report objectives solvers recipes"
    assert all(f"  {command} " in out for command in commands.split())
    assert "Exit codes: 0" in out

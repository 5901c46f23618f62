"""What a command refuses: one line that names the value and the fix, exit code 2, no file."""

from pathlib import Path

import pytest

from manifoldkv.cli import inputs
from tests.cli.running import MODEL, fail, run

COMPRESS = ("compress", MODEL, "--recipe", "eigen-attention")
GENERATE = ("generate", MODEL, "--prompt")
EVALUATE = ("evaluate", MODEL, "--plan", "{plan}")
LAYERS = (*EVALUATE, "--layers", "--sequences", 1)
COMPARE = ("compare", MODEL, "{plan}", "{plan}", "--sequences", 1, "--length", 16)
LARGE = 10**20

BEFORE_LOADING = [
    (("inspect", "nowhere"), "cannot read nowhere/plan.safetensors"),
    (("compress", MODEL, "--recipe", "x"), "unknown recipe 'x'; known: bits"),
    ((*COMPRESS, "--bytes", "1GiB"), "--bytes needs --context, the number of tokens"),
    (
        (*COMPRESS, "--bytes", "1GiB", "--ratio", 0.5, "--context", 64),
        "exclude each other: give one",
    ),
    ((*COMPRESS, "--bytes", "1XB"), "'1XB' is not a number of bytes: write 1GiB"),
    ((*COMPRESS, "--bytes", "0"), "'0' is not a number of bytes"),
    ((*COMPRESS, "--context", "many"), "'many' is not a number of tokens: write 4000 or 32k"),
    ((*COMPRESS, "--text", "./x.txt"), "cannot read text"),
    ((*COMPRESS, "--text", ""), "the name of the text is empty"),
    ((*COMPRESS, "--out", ""), "'--out': the name is empty"),
    ((*COMPRESS, "--checkpoints", ""), "'--checkpoints': the name is empty"),
    (("compress", MODEL, "--compute", 0), "compute must be a positive number, got 0"),
    (("compress", MODEL, "--compute", "nan"), "compute must be a positive number, got nan"),
    (("compress", MODEL, "--compute", "much"), "'--compute': "),
    ((*COMPRESS, "--compute", 4), "RankRecipe has no compute: leave compute=4.0 out, or take"),
    (("compress", MODEL, "--nats", 0), "nats must be a positive number, got 0"),
    (("compress", MODEL, "--nats", "nan"), "nats must be a positive number, got nan"),
    (("compress", MODEL, "--nats", "inf"), "nats must be a positive number, got inf"),
    (("compress", MODEL, "--nats", 0.1, "--ratio", 0.5), "--ratio and --nats exclude each other"),
    (("compress", MODEL, "--nats", 0.1, "--bytes", 9), "--bytes and --nats exclude each other"),
    ((*COMPRESS, "--nats", 0.1), "RankRecipe makes no plan for a loss: leave nats out, or take"),
    (("compress", MODEL, "--nats", 0.1, "--dry-run"), "give --ratio, not --nats"),
    ((*COMPRESS, "--set", "sinks"), "--set takes name=value, got 'sinks'"),
    ((*COMPRESS, "--set", "sinks=4"), "recipe eigen-attention has no field 'sinks'; known: obj"),
    ((*COMPRESS, "--set", "objective=x"), "unknown objective 'x'; known: "),
    ((*COMPRESS, "--set", "solver=x"), "unknown solver 'x'; known: "),
    ((*COMPRESS, "--set", "key_grouping=x"), "unknown head grouping 'x'; known: shared, all"),
    ((*COMPRESS, "--set", "rotary=mid"), "unknown rotary space 'mid'"),
    ((*COMPRESS, "--set", "bits=5"), "bits must be one of 2, 3, 4, 8, got 5"),
    ((*COMPRESS, "--set", f"seed={LARGE}"), f"seed {LARGE} is not an integer"),
    ((*COMPRESS, "--set", f"seed=-{LARGE}"), f"seed -{LARGE} is not an integer"),
    (
        ("compress", MODEL, "--set", "ranks=uniform"),
        "recipe bits has no field 'ranks'; known: sinks, objective, compute, bands, depth",
    ),
    (("compress", MODEL, "--set", "sinks.x=1"), "sinks of recipe bits has no field 'x'"),
    (("compress", MODEL, "--set", "sinks=many"), "sinks=many must be int"),
    (("compress", MODEL, "--set", "bands=8,x"), "bands=8,x must be int or none"),
    (("compress", MODEL, "--set", "bands="), "bands= must be int or none"),
    (("compress", MODEL, "--set", "depth=-1"), "depth must be >= 0, got -1"),
    (("compress", MODEL, "--set", "bits=4"), "leave the quantization out"),
    (("evaluate", "no-model", "--plan", "no-plan"), "name a text to measure no-model on with --te"),
    ((*LAYERS, "--tasks", "passkey"), "--layers and --tasks exclude each other: give one"),
    ((*EVALUATE, "--text", "own"), "own is calibration text that a model writes itself"),
    ((*LAYERS, "--text", ""), "the name of the text is empty"),
    (
        ("report", MODEL, "--plan", "p", "--out", "r.pdf"),
        "--out must name a file that ends in .html, got r.pdf",
    ),
    (
        ("report", MODEL, "--plan", "p", "--out", "{file}/r.html"),
        "manifoldkv: cannot write to {file}: ",
    ),
    (("report", MODEL, "--plan", ""), "'--plan': the name is empty"),
    (("inspect", ""), "'PLAN': the name is empty"),
    ((*GENERATE, "a", "--seed", LARGE), f"seed {LARGE} is no"),
    ((*GENERATE, "a", "--top-p", 0.9), "give a --temperature above 0 too"),
    ((*GENERATE, "a", "--top-p", 2), "is not in (0, 1]"),
]
AFTER_LOADING = [
    (("compress", "./nowhere"), "no model at ./nowhere"),
    (("compress", ""), "the name of the model is empty"),
    ((*COMPRESS, "--ratio", 2), "ratio 2 is not"),
    ((*COMPRESS, "--length", 100_000), "100,000 tokens are longer than the"),
    ((*COMPRESS, "--device", "meta"), "cannot use device 'meta'"),
    ((*COMPRESS, "--device", "cuda:99"), "cannot use device 'cuda:99'"),
    ((*GENERATE, ""), "the prompt has no token"),
    ((*GENERATE, "a" * 9000), "are longer than the 1,024 posit"),
    ((*GENERATE, "a", "--max-new-tokens", 1024), "1024 new tokens after a prompt of 1 are more"),
    ((*GENERATE, "a", "--chat"), "has no chat template: leave --chat out"),
    ((*GENERATE, "a", "--cache", "x", "--plan", "{stored}"), "prompt of one token is empty"),
    ((*GENERATE, "a", "--plan", "{stored}"), "stored and not attended to"),
    (("evaluate", MODEL, "--plan", "{stored}"), "stored and not attended to"),
    (("bench", MODEL, "--plan", "{stored}"), "stored and not attended to"),
    (("report", MODEL, "--plan", "{stored}"), "made by recipe stored"),
    ((*LAYERS, "--length", 100_000), "100,000 tokens are longer than the 1,024 positions"),
    ((*LAYERS, "--device", "meta"), "cannot use device 'meta'"),
    ((*EVALUATE, "--length", 100_000), "100,000 tokens are longer than the 1,024 positions"),
    ((*EVALUATE, "--tasks", "nothing"), "unknown task 'nothing'; known: passkey"),
    ((*EVALUATE, "--tasks", "passkey", "--length", 2000), "longer than the 1,024 positions"),
    ((*EVALUATE, "--tasks", "passkey", "--length", 1024), "the model 1,024: ask for shorter"),
    ((*EVALUATE, "--tasks", "niah_single_1"), "unknown task 'niah_single_1'; known: passkey"),
    ((*COMPARE, "--prompt", ""), "the prompt has no token"),
    ((*COMPARE, "--prompt", "a", "--max-new-tokens", 1024), "more than the 1024 positions"),
    ((*COMPARE, "--max-new-tokens", 1024), "leave no room for a prompt"),
]


@pytest.mark.parametrize(("arguments", "message"), [*BEFORE_LOADING, *AFTER_LOADING])
def test_a_command_refuses(
    arguments: tuple,
    message: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`{plan}` is the folder of that fixture."""
    names = {"file": tmp_path / "file", "folder": tmp_path / "folder"}
    (tmp_path / "folder").mkdir()
    names["file"].write_text("")
    for fixture in ("plan", "stored"):
        if f"{{{fixture}}}" in arguments:
            names[fixture] = request.getfixturevalue(fixture)
    monkeypatch.chdir(tmp_path)
    if (arguments, message) in BEFORE_LOADING:
        monkeypatch.setattr(inputs, "load_model", fail)
    given = [part.format(**names) if "{" in str(part) else part for part in arguments]
    done = run(*given)
    assert (done.code, done.out) == (2, "")
    assert message.format(**names) in done.err
    assert "Traceback" not in done.err
    errors = [line for line in done.err.splitlines() if line.startswith("manifoldkv: ")]
    assert len(errors) == (0 if done.err.startswith("Usage") else 1)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [names["file"]]

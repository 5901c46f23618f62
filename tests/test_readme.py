"""Code of the README and of the documentation runs, links lead somewhere, numbers are measured."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import typer

import manifoldkv
from manifoldkv import RECIPES, CompressionPlan, compress, load_model
from manifoldkv.cli import inputs, main
from manifoldkv.cli.app import app
from manifoldkv.core.basis import HeadGrouping
from manifoldkv.evaluate.reports import plan as reports
from manifoldkv.learn.objectives import KQSVD, OBJECTIVES
from manifoldkv.learn.ranks import RANK_RULES
from manifoldkv.learn.solvers import SOLVERS
from manifoldkv.learn.solvers.predictor import Predictor
from manifoldkv.learn.solvers.riemannian_adam import RiemannianAdam
from manifoldkv.testing import (
    ObjectiveConformance,
    RankRuleConformance,
    RecipeConformance,
    SolverConformance,
    tiny_activations,
)
from manifoldkv.text import tokens as text_tokens
from tests.evaluate.reports.test_report import assert_whole
from tests.numbers import faults

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^(?:<!-- not run: (.*?) -->\n)?```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NO_CODE = ("text", "toml", "bibtex")
FEW_STEPS = re.compile(r"((?:steps|--items|--rounds)[= ])\d+")
"""Counts that pages choose for good results, and tests for short ones."""
MEASURED_PAGES = ("README.md", "docs/index.md", "docs/recipes.md")
REASONS = ("set-up", "Hub", "Hub and GPU", "Hub, and minutes", "minutes", "an hour")


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """The code blocks of a page: why one is not run if it is not, its language, its code."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def snippet(page: str, part: str) -> str:
    """The first Python block of a page that has a part."""
    of_page = blocks(ROOT / page)
    return next(code for _, language, code in of_page if language == "python" and part in code)


OWN_OBJECTIVE = snippet("docs/how-to/write-an-objective.md", "register_objective")
OWN_SOLVER = snippet("docs/how-to/write-a-solver.md", "@register_solver")
OWN_RECIPE = snippet("docs/how-to/write-a-recipe.md", "register_recipe")
OWN_RANK_RULE = snippet("docs/how-to/write-a-rank-rule.md", "register_rank_rule")
GENERATE = ROOT / "docs" / "how-to" / "generate-and-serve.md"
RUN = [p for p in PAGES if any(not why and kind not in NO_CODE for why, kind, _ in blocks(p))]


@pytest.fixture
def late_keys(monkeypatch):
    monkeypatch.setattr(OBJECTIVES, "_classes", dict(OBJECTIVES._classes))
    exec(OWN_OBJECTIVE, {})
    return OBJECTIVES.get("late-keys")()


@pytest.fixture(scope="module")
def quick_plan() -> CompressionPlan:
    """A plan as pages about something else suppose that it lies in the folder ``plan``."""
    model, _ = load_model(str(ROOT / "studies" / "reference_models" / "reference-llama"))
    return compress(model, "docstrings", recipe="eigen-attention", sequences=2, length=64)


@pytest.fixture
def folder(tmp_path, monkeypatch, quick_plan):
    """A working folder with the repository's studies and a plan, and few calibration windows."""
    (tmp_path / "studies").symlink_to(ROOT / "studies")
    quick_plan.save(tmp_path / "plan")
    monkeypatch.chdir(tmp_path)
    # Enough to run, not to be good.
    monkeypatch.setattr(text_tokens, "SEQUENCES", 2)
    monkeypatch.setattr(reports, "LAYER_SEQUENCES", 1)
    for module in (text_tokens, inputs):
        monkeypatch.setattr(module, "LENGTH", 128)
    monkeypatch.setattr(OBJECTIVES, "_classes", dict(OBJECTIVES._classes))
    monkeypatch.setattr(SOLVERS, "_classes", dict(SOLVERS._classes))
    monkeypatch.setattr(RANK_RULES, "_classes", dict(RANK_RULES._classes))
    return tmp_path


@pytest.mark.parametrize(
    "page", [p for p in RUN if p not in (PAGES[0], GENERATE)], ids=lambda page: page.stem
)
def test_every_block_runs_or_says_why_not(page, folder, capsys, monkeypatch):
    run_page(page, monkeypatch)


def run_page(page, monkeypatch):
    """Run the blocks in the order of a page, each finding what those before it have made."""
    names = {"__name__": "page"}
    for why_not, language, code in blocks(page):
        code = FEW_STEPS.sub(r"\g<1>2", code)
        if why_not:
            assert why_not in REASONS
        elif language == "python":
            exec(code, names)
        elif language not in NO_CODE:
            for command in code.replace("\\\n", " ").strip().splitlines():
                run_command(command, monkeypatch)


def run_command(command, monkeypatch):
    program, *arguments = shlex.split(command)
    assert program == "manifoldkv"
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, command


def test_pages_that_have_code_are_run():
    names = {page.stem for page in RUN}
    assert len(names) >= 7
    assert {"README", "compress-a-chat-model", "generate-and-serve", "measure"} <= names


def test_commands_that_are_not_run_can_be_parsed():
    """Those of the command line that take long, or a model that is not here."""
    parsed = 0
    for page in PAGES:
        for why_not, _, code in blocks(page):
            for command in code.replace("\\\n", " ").splitlines() if why_not else ():
                program, *arguments = shlex.split(command, comments=True) or [""]
                if program == "manifoldkv":
                    name, *rest = arguments
                    typer.main.get_command(app).commands[name].make_context(name, rest)
                    parsed += 1
    assert parsed >= 5


def test_the_readme_runs_and_its_report_is_whole(folder, monkeypatch, capsys):
    run_page(PAGES[0], monkeypatch)
    plan = CompressionPlan.load("quick-plan")
    assert plan.ratio <= 0.5
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert_whole(page, plan, ["A text, before and after"])


def test_generating_with_a_quarter_of_the_cache(folder, capsys, monkeypatch):
    """The page runs, and the saving that it prints is there."""
    run_page(GENERATE, monkeypatch)
    text, numbers = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    assert text
    printed = re.fullmatch(r"([\d,]+) bytes instead of ([\d,]+)", numbers)
    compressed, stock = (int(number.replace(",", "")) for number in printed.groups())
    plan = CompressionPlan.load("plan")
    # 6 layers, K and V, 2 heads of 32, 4 bytes; the newest token is not cached yet.
    assert stock in {6 * 2 * 2 * 32 * 4 * tokens for tokens in range(800, 820)}
    assert compressed in {plan.nbytes(tokens, dtype=torch.float32) for tokens in range(800, 820)}
    assert compressed < 0.26 * stock
    exec(snippet("docs/how-to/measure.md", "import perplexity"), {})
    uncompressed, compressed = map(float, capsys.readouterr().out.split())
    assert 10 < uncompressed < 1000
    assert compressed == pytest.approx(uncompressed, rel=0.01)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    """The anchors inside of pages are checked where the documentation is built."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if (
            path.startswith("https://arxiv.org/")
            or path == "https://github.com/EleutherAI/lm-evaluation-harness"
        ):
            continue
        assert (page.parent / path).exists(), target
        if page.name == "README.md" and not path:
            headings = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}


def test_every_page_is_in_the_navigation():
    said = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        assert f": {page.relative_to(ROOT / 'docs').as_posix()}\n" in said


def test_every_public_name_is_in_the_reference():
    pages = "".join(p.read_text("utf-8") for p in (ROOT / "docs" / "reference").glob("*.md"))
    whole = set(re.findall(r"^::: manifoldkv\.core\.errors$", pages, re.MULTILINE))
    for name in manifoldkv.__all__:
        is_error = isinstance(getattr(manifoldkv, name), type) and issubclass(
            getattr(manifoldkv, name), manifoldkv.ManifoldKVError
        )
        assert whole if is_error else re.search(rf"\b{name}\b", pages), name


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 130


def test_set_up_commands_are_on_whole_lines():
    lines = README.splitlines()[:40]
    first = lines.index(
        "pip install -c constraints.txt -e . && python studies/compare_objectives.py"
    )
    assert lines[first + 1] == 'pip install -c constraints.txt -e ".[test]" && pytest'


@pytest.mark.parametrize("name", MEASURED_PAGES)
def test_every_measured_number_is_in_a_committed_table(name):
    assert not faults((ROOT / name).read_text(encoding="utf-8"))


TABLE = """<!-- numbers: figures/loss/smollm2/results.csv -->
| cache | times smaller | nats | passkeys | step |
|---|---|---|---|---|
| `grouped-4-bit` | 8.0 | 0.840 | 5 of 12 | 1.8 |
"""


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (TABLE, ""),
        (TABLE.replace("8.0", "8.1"), "['8.1']"),
        (TABLE.replace("0.840", "3.457"), "['3.457']"),  # of eigen-attention
        (TABLE.replace("0.840", "0.772"), "['0.772']"),  # of another size
        (TABLE.replace("5 of", "12 of"), "['12 of 12']"),
        (TABLE.replace("0.840", "0.840 ± 0.001"), "± of fewer than four windows"),
        (TABLE.partition("\n")[2], "no CSV file is named above"),
        ("It is 14 times smaller for 0.001 nats.", "no CSV file is named above"),
        ("<!-- numbers: figures/storage/smollm2/results.csv -->\n14 times smaller", "['14']"),
        ("Losses are in nats per token.", ""),
        ("`compress(model, text, nats=0.01)` asks by loss, in nats.", ""),
    ],
)
def test_a_wrong_number_is_found(text, fault):
    found = faults(text)
    assert bool(found) == bool(fault)
    assert fault in "".join(found)


def test_the_start_page_has_the_table_of_the_readme():
    table = README.partition("<!-- numbers")[2].partition("\n\n")[0]
    assert table in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_every_committed_picture_is_shown_by_a_page():
    shown = {
        (page.parent / link).resolve()
        for page in (*PAGES, *(ROOT / "figures").rglob("*.md"))
        for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    }
    pictures = {path for end in ("png", "svg") for path in (ROOT / "figures").rglob(f"*.{end}")}
    assert pictures
    assert not pictures - shown


def test_own_objective_takes_under_twenty_lines():
    assert len([line for line in OWN_OBJECTIVE.splitlines() if line.strip()]) < 20


def test_own_objective_obeys_the_laws(late_keys):
    suite = ObjectiveConformance()
    suite.objective = late_keys
    laws = [name for name in dir(suite) if name.startswith("test_")]
    assert len(laws) >= 8
    for law in laws:
        getattr(suite, law)()


@pytest.mark.parametrize("solver", [Predictor(epochs=20), RiemannianAdam(steps=100)])
def test_solvers_take_own_objective(late_keys, solver):
    problem = late_keys.problem(tiny_activations(), "key", HeadGrouping("shared", 2))
    found = problem.loss(solver.solve(problem, 3).basis)
    assert found < problem.loss(problem.initial(3))


def test_own_solver_obeys_the_laws(folder):
    exec(OWN_SOLVER, {})
    suite = SolverConformance()
    suite.solver, suite.objective = SOLVERS.get("trust-region")(), KQSVD()
    laws = [name for name in dir(suite) if name.startswith("test_")]
    assert len(laws) >= 4
    for law in laws:
        getattr(suite, law)()


def test_own_recipe_obeys_the_laws(folder):
    RECIPES.pop("principal-components", None)  # of the page, which another test runs
    exec(OWN_RECIPE, {"__name__": "page"})
    suite = RecipeConformance()
    suite.recipe = RECIPES.pop("principal-components")
    laws = [name for name in dir(suite) if name.startswith("test_")]
    assert len(laws) >= 5
    for law in laws:
        getattr(suite, law)()


def test_own_rank_rule_obeys_the_laws(folder):
    exec(OWN_RANK_RULE, {"__name__": "page"})
    suite = RankRuleConformance()
    suite.rule = RANK_RULES.resolve("exact-ends")
    laws = [name for name in dir(suite) if name.startswith("test_")]
    assert len(laws) >= 5
    for law in laws:
        getattr(suite, law)()


def test_every_objective_and_solver_is_named():
    concepts = (ROOT / "docs" / "concepts" / "bases.md").read_text(encoding="utf-8")
    for name in (*OBJECTIVES.names(), *SOLVERS.names()):
        assert f"`{name}`" in README
        assert f"| `{name}` |" in concepts

"""The README's code runs as it stands there."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from manifoldkv import (
    OBJECTIVES,
    RANK_RULES,
    SOLVERS,
    CompressionPlan,
    HeadGrouping,
)
from manifoldkv.cli import main
from manifoldkv.solvers.predictor import Predictor
from manifoldkv.solvers.riemannian_adam import RiemannianAdam
from manifoldkv.testing import (
    ObjectiveConformance,
    RankRuleConformance,
    SolverConformance,
    tiny_activations,
)
from manifoldkv.text import tokens as text_tokens
from tests.test_report import SECTIONS, assert_whole

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
OWN_OBJECTIVE = next(s for s in SNIPPETS if "register_objective" in s)
OWN_SOLVER = next(s for s in SNIPPETS if "@register_solver" in s)
BLOCKS = re.findall(
    r"^(?:<!-- not run: (.*?) -->\n)?```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE
)


@pytest.fixture
def late_keys(monkeypatch):
    monkeypatch.setattr(OBJECTIVES, "_classes", dict(OBJECTIVES._classes))
    exec(OWN_OBJECTIVE, {})
    return OBJECTIVES.get("late-keys")()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the repository's studies in it, and few calibration windows."""
    (tmp_path / "studies").symlink_to(ROOT / "studies")
    monkeypatch.chdir(tmp_path)
    # Enough to run, not to be good.
    monkeypatch.setattr(text_tokens, "SEQUENCES", 2)
    monkeypatch.setattr(OBJECTIVES, "_classes", dict(OBJECTIVES._classes))
    monkeypatch.setattr(SOLVERS, "_classes", dict(SOLVERS._classes))
    monkeypatch.setattr(RANK_RULES, "_classes", dict(RANK_RULES._classes))
    return tmp_path


def test_every_block_runs_or_says_why_not(folder, capsys, monkeypatch):
    """In the order of the page, each finding what those before it have made."""
    ran = []
    for why_not, language, code in BLOCKS:
        if why_not:
            assert why_not in ("set-up", "Hub", "Hub and GPU", "Hub, and minutes", "an hour")
            continue
        if language == "python":
            exec(code, {"__name__": "readme"})
        else:
            for command in code.replace("\\\n", " ").strip().splitlines():
                program, *arguments = shlex.split(command)
                assert program == "manifoldkv"
                monkeypatch.setattr(sys, "argv", [program, *arguments])
                with pytest.raises(SystemExit) as ended:
                    main()
                assert not ended.value.code, command
        ran.append(code.splitlines()[0])
    assert len(ran) >= 6
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert_whole(page, [SECTIONS[0], "A text, before and after", *SECTIONS[1:]])
    assert CompressionPlan.load("quick-plan").ratio <= 0.5


def test_generating_with_half_the_cache(folder, capsys):
    """The saving that is printed is there, and is half of the stock cache in the same dtype."""
    exec(next(s for s in SNIPPETS if "bytes instead of" in s), {})
    text, numbers = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    assert text
    printed = re.fullmatch(r"([\d,]+) bytes instead of ([\d,]+), torch\.float32 both", numbers)
    compressed, stock = (int(number.replace(",", "")) for number in printed.groups())
    plan = CompressionPlan.load("plan")
    # 6 layers, K and V, 2 heads of 32, 4 bytes; the newest token is not cached yet.
    assert stock in {6 * 2 * 2 * 32 * 4 * tokens for tokens in range(800, 820)}
    assert compressed in {plan.nbytes(tokens, dtype=torch.float32) for tokens in range(800, 820)}
    assert 0.4 * stock < compressed < 0.5 * stock
    assert plan.ratio <= 0.5
    assert plan.recent == 64  # as the text says; a prompt of so many would not be compressed
    assert plan.nbytes(64, dtype=torch.float32) == 6 * 2 * 2 * 32 * 4 * 64
    exec(next(s for s in SNIPPETS if "import perplexity" in s), {})
    uncompressed, compressed = map(float, capsys.readouterr().out.split())
    assert 10 < uncompressed < compressed < 1000


def test_set_up_commands_are_on_the_first_screen():
    first_screen = README.splitlines()[:24]
    install = 'pip install -c constraints.txt -e ".[test]" && '
    assert install + "python studies/compare_objectives.py" in first_screen
    assert install + "pytest" in first_screen


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
    suite.solver = SOLVERS.get("random-walk")()
    laws = [name for name in dir(suite) if name.startswith("test_")]
    assert len(laws) >= 4
    for law in laws:
        getattr(suite, law)()


def test_own_rank_rule_obeys_the_laws(folder, monkeypatch):
    monkeypatch.setattr(RANK_RULES, "_classes", dict(RANK_RULES._classes))
    exec(next(s for s in SNIPPETS if "register_rank_rule" in s), {"__name__": "readme"})
    suite = RankRuleConformance()
    suite.rule = RANK_RULES.resolve("exact-ends")
    laws = [name for name in dir(suite) if name.startswith("test_")]
    assert len(laws) >= 5
    for law in laws:
        getattr(suite, law)()


def test_every_objective_and_solver_is_in_the_tables():
    for name in ("k-svd", "eigen-attention", "kq-svd", "layer-output"):
        assert f"| `{name}` |" in README
    for name in ("closed-form", "predictor", "riemannian-adam"):
        assert f"| `{name}` |" in README

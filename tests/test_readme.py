"""The README's code runs as it stands there."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manifoldkv import OBJECTIVES, RECIPES, CompressionPlan, HeadGrouping, calibration
from manifoldkv.solvers.predictor import Predictor
from manifoldkv.solvers.riemannian_adam import RiemannianAdam
from manifoldkv.testing import ObjectiveConformance, tiny_activations

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
OWN_OBJECTIVE = next(s for s in SNIPPETS if "register_objective" in s)


@pytest.fixture(scope="module")
def late_keys():
    exec(OWN_OBJECTIVE, {})
    return OBJECTIVES.get("late-keys")()


def test_generating_with_half_the_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibration, "SEQUENCES", 2)  # enough to run, not to be good
    monkeypatch.setitem(RECIPES, "best", replace(RECIPES["best"], tuning_steps=2))
    snippet = next(s for s in SNIPPETS if "new_cache" in s)
    snippet = snippet.replace("studies/", f"{ROOT}/studies/")
    monkeypatch.chdir(tmp_path)
    exec(snippet, {})
    text, numbers = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    assert text.startswith("Return the sum of")
    found, most = re.fullmatch(r"(\d+) bytes; (\d+) per token in bfloat16", numbers).groups()
    plan = CompressionPlan.load("plan")
    # 6 layers, 2 heads, 16 + 16 numbers per token are half of the cache: 768 bytes in bfloat16.
    assert int(most) == plan.bytes_per_token() < 768
    assert plan.ratio <= 0.5
    assert int(found) in {plan.nbytes(tokens, dtype=torch.float32) for tokens in range(5, 40)}
    measure = next(s for s in SNIPPETS if "import perplexity" in s)
    exec(measure.replace("studies/", f"{ROOT}/studies/"), {})
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


def test_every_objective_and_solver_is_in_the_tables():
    for name in ("k-svd", "eigen-attention", "kq-svd", "layer-output"):
        assert f"| `{name}` |" in README
    for name in ("closed-form", "predictor", "riemannian-adam"):
        assert f"| `{name}` |" in README

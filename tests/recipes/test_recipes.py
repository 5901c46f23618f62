from dataclasses import replace

import pytest
import typer

from manifoldkv import (
    RECIPES,
    BitRecipe,
    Quantization,
    RankRecipe,
    compress,
    compressed,
    load_model,
    open_text,
)
from manifoldkv.cli.app import app
from manifoldkv.core.errors import ArgumentError, PlanError
from manifoldkv.learn.objectives import KQSVD
from manifoldkv.learn.ranks import PAPER_CANDIDATES, Optimal, Sequential
from manifoldkv.learn.solvers import Predictor
from manifoldkv.recipes.config import CompressionConfig
from manifoldkv.recipes.named import recipe_named
from tests.families import tiny_model, tiny_tokens
from tests.short_recipes import short


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_makes_a_plan_that_decodes(name: str) -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(2, 20)
    recipe = short(name)
    plan = compress(model, tokens, recipe=recipe, context=200)
    assert plan.ratio <= 0.5
    if not plan.attended:
        with pytest.raises(PlanError, match="caches that are stored and not attended to"):
            compressed(model, plan).__enter__()
        return
    with compressed(model, plan):
        assert model(input_ids=tokens).logits.isfinite().all()


def test_a_text_is_read_as_far_as_it_is_asked_for() -> None:
    model, _ = load_model("studies/reference_models/reference-qwen3")
    plan = compress(
        model, open_text("docstrings"), recipe="best", ratio=0.2, sequences=2, length=40
    )
    provenance = plan.provenance
    assert (provenance.sequences, provenance.length, provenance.context) == (2, 40, 40)
    assert provenance.text != "tokens"


def test_what_rounds_by_itself_takes_no_ranks_and_no_quantisation() -> None:
    with pytest.raises(ArgumentError, match="leave ranks='uniform' out"):
        CompressionConfig(recipe="best", ranks="uniform")
    with pytest.raises(PlanError, match="leave the quantization out"):
        CompressionConfig(recipe="best", quantization=Quantization(4))
    for name in ("sinks", "depth"):
        with pytest.raises(ArgumentError, match=f"{name} must be >= 0, got -1"):
            BitRecipe(**{name: -1})
    for bands in ((), (0,), (None, -2)):
        with pytest.raises(ArgumentError, match="bands must be positive numbers of frequencies"):
            BitRecipe(bands=bands)
    for recipe in ("best", "stored"):
        with pytest.raises(PlanError, match="stores keys before rotation"):
            CompressionConfig(recipe=recipe, rotary="post")


def test_names_stand_for_objects_with_default_fields() -> None:
    assert RankRecipe("kq-svd", "predictor", "2", ranks="optimal") == RankRecipe(
        KQSVD(), Predictor(), 2, ranks=Optimal()
    )


def test_the_paper_and_its_faster_version_differ_in_speed_only() -> None:
    """The paper's rank rule and candidates; the fast one takes a sample to measure errors on."""
    paper, fast = RECIPES["paper"], RECIPES["fast"]
    assert isinstance(paper.ranks, Sequential)
    assert paper.ranks.candidates == PAPER_CANDIDATES
    assert paper.ranks.sequences is paper.ranks.rows is None
    assert replace(fast, solver=paper.solver, ranks=paper.ranks) == paper
    assert replace(fast.ranks, sequences=None, rows=None) == paper.ranks


def test_python_and_the_command_line_have_the_same_default() -> None:
    shown = typer.main.get_command(app).commands["compress"].params
    (recipe,) = [p for p in shown if p.name == "recipe"]
    assert recipe.default == CompressionConfig().recipe


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ArgumentError, match="unknown recipe 'nothing'; known: bits, best"):
        recipe_named("nothing")
    with pytest.raises(ArgumentError, match=r"unknown rank rule .best.; known: .*uniform"):
        RankRecipe("k-svd", "closed-form", ranks="best")
    with pytest.raises(ArgumentError, match="unknown solver 'none'"):
        RankRecipe("k-svd", "none")

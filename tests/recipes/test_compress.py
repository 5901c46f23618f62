import itertools
import re
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

from manifoldkv import (
    RECIPES,
    CompressionPlan,
    Quantization,
    RankRecipe,
    compress,
    compressed,
    load_model,
    tune,
)
from manifoldkv.core.basis import HeadGrouping, projector_distance
from manifoldkv.core.errors import ArgumentError, ModelError, PlanError
from manifoldkv.evaluate.diagnostics import layer_errors
from manifoldkv.learn.objectives import OBJECTIVES, LayerOutput
from manifoldkv.learn.ranks import PAPER_CANDIDATES, GivenRanks, Uniform, candidate_ranks
from manifoldkv.learn.solvers import Predictor, RiemannianAdam
from manifoldkv.recipes.config import CompressionConfig
from manifoldkv.recipes.solve import BasisFinder
from manifoldkv.statistics.capture import capture
from manifoldkv.statistics.layer import LayerActivations
from manifoldkv.statistics.outputs import compressed_output
from tests.families import tiny_model, tiny_tokens
from tests.plans import random_plan
from tests.short_recipes import short


@pytest.mark.parametrize("rotary", ["pre", "post"])
def test_eigen_attention_is_its_closed_form(rotary: str) -> None:
    model, tokens = tiny_model("qwen3"), tiny_tokens()
    plan = compress(model, tokens, recipe="eigen-attention", ratio=0.5, rotary=rotary)
    assert plan.ratio == 0.5
    for activations, layer in zip(capture(model, tokens), plan.layers, strict=True):
        objective = OBJECTIVES.get("eigen-attention")()
        for site, basis in (("key", layer.key.basis), ("value", layer.value.basis)):
            grouping = HeadGrouping("shared" if site == "key" else 1, 2)
            expected = objective.problem(activations, site, grouping, rotary).closed_form(4)
            assert projector_distance(basis, expected) < 1e-9


def test_the_recipe_of_the_paper() -> None:
    """Its objective, solver, rank rule and candidates, all in the plan's provenance."""
    model, tokens = tiny_model("llama", num_hidden_layers=1), tiny_tokens(2, 6)
    plan = compress(model, tokens, ratio=0.7, recipe="paper")
    found = plan.provenance
    assert found.method("objective") == "layer-output"
    assert found.recipe["solver"] == {"name": "predictor"} | asdict(Predictor())
    assert found.recipe["ranks"] == {
        "name": "sequential",
        "candidates": PAPER_CANDIDATES,
        "multiple": 1,
        "sequences": None,
        "rows": None,
    }
    layer = plan.layers[0]
    assert {layer.key.rank, layer.value.rank} <= set(candidate_ranks(8, PAPER_CANDIDATES))
    assert plan.ratio <= 0.7
    again = compress(model, tokens, ratio=0.7, recipe="paper")
    assert torch.equal(layer.key.basis.down, again.layers[0].key.basis.down)
    with pytest.raises(ArgumentError, match=r"smallest feasible ratio is 0\.5"):
        compress(model, tokens, ratio=0.49, recipe="paper")


def test_fields_of_a_method_are_taken() -> None:
    """An object stands wherever a name may, and other fields are another plan."""
    model, tokens = tiny_model("llama"), tiny_tokens(4, 12)
    recipe = RankRecipe(LayerOutput(), RiemannianAdam(steps=3), ranks=Uniform(multiple=2))
    plan = compress(model, tokens, recipe=recipe, ratio=0.7)
    assert plan.provenance.recipe["solver"]["steps"] == 3
    assert all(site.rank % 2 == 0 for layer in plan.layers for _, site in layer.sites)
    longer = replace(recipe, solver=RiemannianAdam(steps=30))
    assert compress(model, tokens, recipe=longer, ratio=0.7).digest() != plan.digest()


def test_a_config_and_its_fields_are_the_same() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    config = CompressionConfig(ratio=0.6, recipe="eigen-attention", rotary="post", seed=3)
    given = compress(model, tokens, config)
    apart = compress(model, tokens, ratio=0.6, recipe="eigen-attention", rotary="post", seed=3)
    assert given.digest() == apart.digest()
    assert compress(model, tokens, config, ratio=0.8).ratio == 0.75
    with pytest.raises(TypeError, match="ration"):
        compress(model, tokens, ration=0.5)


def test_ranks_can_be_given() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    ranks = ((2, 5), (3, 4), (8, 1))
    plan = compress(
        model, tokens, recipe="eigen-attention", ratio=0.6, ranks=GivenRanks(ranks=ranks)
    )
    assert tuple((layer.key.rank, layer.value.rank) for layer in plan.layers) == ranks
    low_rank = partial(compress, model, tokens, recipe="low-rank")
    with pytest.raises(ArgumentError, match="too small"):
        low_rank(ratio=0.4, ranks=GivenRanks(ranks=ranks))
    with pytest.raises(ArgumentError, match="must be those of 3 layers, got 1"):
        low_rank(ranks=GivenRanks(ranks=((2, 2),)))


def test_an_oblique_recipe_runs() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    recipe = RankRecipe("kq-svd", "closed-form", key_grouping="all", value_grouping="all")
    plan = compress(model, tokens, recipe=recipe)
    assert not plan.layers[0].key.basis.orthonormal
    with compressed(model, plan) as new_cache:
        assert model(input_ids=tokens, past_key_values=new_cache()).logits.isfinite().all()


def test_nothing_is_lost_at_ratio_one() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    plan = compress(model, tokens, recipe="eigen-attention", ratio=1.0)
    with compressed(model, plan):
        found = model(input_ids=tokens).logits
    assert float((found - model(input_ids=tokens).logits).abs().max()) < 1e-6


def test_every_phase_is_logged_and_nothing_is_printed(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture
) -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    recipe = RankRecipe("eigen-attention", "closed-form", ranks="optimal", tuning_steps=1)
    capfd.readouterr()
    with caplog.at_level("INFO", logger="manifoldkv"):
        compress(model, tokens, recipe=recipe, quantization=Quantization(4))
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        *("finding", "choosing", "tuning", "rounding")
    ]
    assert capfd.readouterr() == ("", "")


class TestText:
    def test_a_text_is_read_with_the_models_own_tokenizer(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(import_module("manifoldkv.text.tokens"), "SEQUENCES", 2)
        monkeypatch.setattr(import_module("manifoldkv.text.tokens"), "LENGTH", 32)
        model, _ = load_model("studies/reference_models/reference-llama")
        plan = compress(model, "pydoc-topics", recipe="eigen-attention")
        found = plan.provenance
        assert (found.text, found.sequences, found.length) == ("pydoc-topics", 2, 32)

    def test_a_model_without_tokenizer_needs_token_ids(self) -> None:
        with pytest.raises(ArgumentError, match="pass token ids instead"):
            compress(tiny_model("llama"), "pydoc-topics")

    @pytest.mark.parametrize(
        "tokens",
        [torch.zeros(3), torch.zeros(0, 4).long(), torch.zeros(2, 2), torch.zeros(()).int()],
    )
    def test_tokens_of_another_shape_are_refused(self, tokens: torch.Tensor) -> None:
        with pytest.raises(ArgumentError, match="tokens must be integers of shape"):
            compress(tiny_model("llama"), tokens)


class TestRefusedBeforeAnyWork:
    def test_unknown_names(self) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens()
        with pytest.raises(ArgumentError, match="unknown recipe 'nothing'; known: bits, best"):
            compress(model, tokens, recipe="nothing")
        with pytest.raises(ArgumentError, match="unknown rank rule"):
            compress(model, tokens, recipe="low-rank", ranks="greedy")

    def test_a_recipe_that_cannot_be_solved(self) -> None:
        with pytest.raises(ArgumentError, match="no closed form"):
            compress(
                tiny_model("llama"), tiny_tokens(), recipe=RankRecipe("layer-output", "closed-form")
            )

    @pytest.mark.parametrize("context", [0, -1, 2**20 + 1])
    def test_contexts_that_no_plan_can_name(
        self, context: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = import_module("manifoldkv.recipes.compress")  # which would read the text
        monkeypatch.setattr(module, "calibration_tokens", None)
        for recipe in ("low-rank", "best"):
            with pytest.raises(PlanError, match=f"a context of {context:,} tokens, only for 1 to"):
                compress(tiny_model("llama"), "docstrings", recipe=recipe, context=context)

    def test_a_plan_for_the_longest_context_is_read_again(self, tmp_path: Path) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens()
        for recipe in ("eigen-attention", "best"):
            compress(model, tokens, recipe=recipe, context=2**20).save(tmp_path)
            assert CompressionPlan.load(tmp_path).provenance.context == 2**20

    @pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**30, -(10**30), 0.5])
    def test_seeds_that_no_generator_takes(self, seed: int) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens()
        with pytest.raises(
            ArgumentError, match=f"^seed {re.escape(str(seed))} is not an integer from"
        ):
            compress(model, tokens, recipe="fast", seed=seed)
        with pytest.raises(ArgumentError):
            tune(model, random_plan(model), tokens, seed=seed)

    @pytest.mark.parametrize("seed", [2**64 - 1, -(2**63)])
    def test_the_largest_and_the_smallest_seed(self, seed: int) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens()
        found = compress(model, tokens, recipe=short("low-rank"), seed=seed)
        assert found.provenance.seed == seed
        assert found.provenance.tuning_steps > 0

    def test_an_unsupported_model(self) -> None:
        model = tiny_model("llama")
        model.config.kv_lora_rank = 3
        with pytest.raises(ModelError):
            compress(model, tiny_tokens())


class TestRankRules:
    def test_an_infeasible_ratio_is_refused_before_any_work(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(import_module("manifoldkv.recipes.solve"), "capture", None)
        with pytest.raises(ArgumentError, match=r"smallest feasible ratio is 0\.125"):
            compress(tiny_model("llama"), tiny_tokens(), ratio=0.12, recipe="low-rank")

    @pytest.mark.parametrize("grouping", ["shared", "all"])
    def test_threshold_takes_the_least_error_that_keeps_the_budget(
        self, grouping: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every pair comes from one error; a smaller error for all layers costs too much."""
        model, tokens = tiny_model("llama"), tiny_tokens()
        recipe = RankRecipe("eigen-attention", "closed-form", grouping, grouping, ranks="threshold")
        module = import_module("manifoldkv.learn.ranks.threshold")
        search, calls = module._search_on_candidates, []

        def watched(*given: object) -> tuple[int, int]:
            calls.append((given[3], search(*given)))
            return calls[-1][1]

        monkeypatch.setattr(module, "_search_on_candidates", watched)
        plan = compress(model, tokens, ratio=0.6, recipe=recipe)
        cost = {
            calls[i][0]: sum(sum(p) for _, p in calls[i : i + 3]) for i in range(0, len(calls), 3)
        }
        chosen = [(layer.key.rank, layer.value.rank) for layer in plan.layers]
        assert chosen == [pair for _, pair in calls[-3:]]
        error = calls[-1][0]
        assert cost[error] <= 0.6 * 3 * 16
        assert len(cost) > 2
        assert all(cost[e] > 0.6 * 3 * 16 for e in cost if e < error)

    def test_sequential_follows_its_own_surfaces(self) -> None:
        """Alg. error_surface written out: measure, select, propagate."""
        model, tokens = tiny_model("llama"), tiny_tokens()
        plan = compress(model, tokens, recipe="eigen-attention", ratio=0.6, ranks="sequential")
        find = BasisFinder(RECIPES["eigen-attention"], "pre", 0)
        clean = list(capture(model, tokens))
        left = int(0.6 * 3 * 16)

        def propagate(activations: LayerActivations) -> torch.Tensor:
            layer = plan.layers[activations.layer]
            return compressed_output(activations, layer.key.basis, layer.value.basis)

        for activations in capture(model, tokens, propagate=propagate):
            index = activations.layer
            share = left / (3 - index)
            errors = {}
            for key, value in itertools.product(candidate_ranks(8), repeat=2):
                if key + value <= share:
                    bases = [
                        dict(find(clean[index], site, [rank]))[rank]
                        for site, rank in (("key", key), ("value", value))
                    ]
                    errors[key, value] = layer_errors(activations, *bases).layer_output_error
            chosen = (plan.layers[index].key.rank, plan.layers[index].value.rank)
            assert errors[chosen] == pytest.approx(min(errors.values()), abs=1e-9)
            left -= sum(chosen)

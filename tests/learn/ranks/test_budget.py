"""Budgets are bytes at a stated context length: of the formula, and of real caches."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv import BitRecipe, RankRecipe, compress, compressed, ratio_from_bytes
from manifoldkv.core.errors import ArgumentError
from manifoldkv.core.windows import cached_tokens
from manifoldkv.learn.ranks import CANDIDATES, PAPER_CANDIDATES, Budget, Uniform, candidate_ranks
from manifoldkv.recipes.full_rank import full_rank_plan
from tests.families import FAMILIES, tiny_model, tiny_tokens

WINDOWS = st.lists(st.none() | st.integers(2, 3000), min_size=1, max_size=5).map(tuple)


class TestCandidates:
    def test_the_papers_ranks(self) -> None:
        assert candidate_ranks(128, PAPER_CANDIDATES) == (64, 77, 90, 102, 115, 128)

    def test_ours(self) -> None:
        assert candidate_ranks(128) == (8, 16, 32, 48, 64, 80, 96, 112, 128)
        assert candidate_ranks(128, multiple=16) == (16, 32, 48, 64, 80, 96, 112, 128)

    @given(st.integers(1, 300), st.integers(1, 32))
    def test_they_ascend_to_head_dim(self, head_dim: int, multiple: int) -> None:
        ranks = candidate_ranks(head_dim, CANDIDATES, multiple)
        assert list(ranks) == sorted(set(ranks))
        assert ranks[-1] == head_dim
        assert all(r % multiple == 0 for r in ranks[:-1])

    def test_impossible_ratios_and_multiples(self) -> None:
        with pytest.raises(ArgumentError, match="candidate ratio"):
            candidate_ranks(8, (0.5, 1.2))
        with pytest.raises(ArgumentError, match="multiple must be >= 1, got 0"):
            candidate_ranks(8, multiple=0)


class TestBudget:
    @given(st.floats(0.01, 1), st.integers(1, 128), WINDOWS, st.integers(1, 5000))
    def test_latents_take_the_ratio(
        self, ratio: float, head_dim: int, windows: tuple[int | None, ...], context: int
    ) -> None:
        budget = Budget(ratio, head_dim, windows, context)
        cached = [cached_tokens(context, window) for window in windows]
        full = 2 * head_dim * sum(cached)
        assert budget.full == full
        assert budget.latent_tokens == tuple(cached)
        assert ratio * full - 1 < budget.latent_elements <= ratio * full + 1e-6

    def test_windows_count_for_what_they_cache(self) -> None:
        budget = Budget(0.5, 8, (None, 6), context=100)
        assert budget.full == 16 * 105
        assert budget.cost([(3, 4), (8, 8)]) == 7 * 100 + 16 * 5

    @pytest.mark.parametrize("ratio", [0.0, -1, 1.1, float("nan")])
    def test_what_is_no_ratio(self, ratio: float) -> None:
        with pytest.raises(ArgumentError, match="not in"):
            Budget(ratio, 32, (None,), 10)
        with pytest.raises(ArgumentError, match="context must be >= 1 token, got 0"):
            Budget(0.5, 32, (None,), 0)

    def test_the_smallest_feasible_ratio_is_named(self) -> None:
        budget = Budget(0.2, 8, (None, None), 10)
        with pytest.raises(ArgumentError, match=r"smallest feasible ratio is 0\.25"):
            budget.check([(2, 2)] * 2)


class TestUniform:
    @given(st.integers(1, 300), st.floats(1e-3, 1), WINDOWS, st.integers(1, 5000))
    def test_it_never_exceeds_the_ratio_and_wastes_less_than_a_rank(
        self, head_dim: int, ratio: float, windows: tuple[int | None, ...], context: int
    ) -> None:
        budget = Budget(ratio, head_dim, windows, context)
        if int(ratio * budget.full + 1e-9) < 2 * sum(budget.latent_tokens):
            with pytest.raises(ArgumentError, match="smallest feasible ratio"):
                Uniform().candidate_ranks(budget)
            return
        ((key,), (value,)), *others = Uniform().candidate_ranks(budget)
        assert all(other == ((key,), (value,)) for other in others)
        assert 1 <= key <= value <= min(key + 1, head_dim)
        assert key + value <= ratio * 2 * head_dim + 1e-6
        assert key + value + 1 > ratio * 2 * head_dim - 1e-6

    def test_candidates_and_multiples(self) -> None:
        def pair(ratio: float, **fields: object) -> tuple:
            budget = Budget(ratio, 32, (None,) * 6, 10)
            return Uniform(**fields).candidate_ranks(budget)[0]

        assert pair(0.5, candidates=(0.25, 0.375, *PAPER_CANDIDATES)) == ((16,), (16,))
        assert pair(0.55, candidates=PAPER_CANDIDATES) == ((16,), (19,))
        assert pair(0.6, multiple=8) == ((16,), (16,))
        assert pair(0.7, multiple=8) == ((16,), (24,))


RULES = ["sequential", "threshold", "optimal"]
WITH_WINDOWS_AND_WITHOUT = ["llama", "gemma3"]
EVERY_FAMILY_AND_EVERY_RULE = [
    *((family, "uniform") for family in FAMILIES),
    *itertools.product(WITH_WINDOWS_AND_WITHOUT, RULES),
]


@pytest.mark.parametrize(("family", "rule"), EVERY_FAMILY_AND_EVERY_RULE)
def test_bytes_are_kept_at_the_context(family: str, rule: str) -> None:
    """Of the cache itself, in every family, at contexts shorter and longer than the text."""
    model, tokens = tiny_model(family), tiny_tokens(1, 60)
    with torch.no_grad():
        stock = model(input_ids=tokens[:, :1], use_cache=True).past_key_values
    per_token = sum(x.nbytes for layer in stock.layers for x in (layer.keys, layer.values))
    per_layer = per_token // len(stock.layers)
    for context in (5, 60):
        recipe = RankRecipe("eigen-attention", "closed-form", ranks=rule)
        plan = compress(model, tokens[:, :16], ratio=0.55, recipe=recipe, context=context)
        with compressed(model, plan) as new_cache, torch.no_grad():
            cache = new_cache()
            model(input_ids=tokens[:, :context], past_key_values=cache)
        full = per_layer * sum(layer.cached_tokens(context) for layer in plan.layers)
        assert cache.nbytes() <= 0.55 * full
        assert cache.nbytes() == pytest.approx(plan.ratio * full)
        assert plan.ratio == plan.ratio_at(context)


@pytest.mark.parametrize("family", WITH_WINDOWS_AND_WITHOUT)
@pytest.mark.parametrize("context", [3, 20, 40])
def test_a_budget_in_bytes_is_kept(family: str, context: int) -> None:
    model, tokens = tiny_model(family), tiny_tokens(2, 12)
    for nbytes in (150 * context, 317 * context):
        recipe = RankRecipe("k-svd", "closed-form")
        ratio = ratio_from_bytes(model, nbytes, context=context, recipe=recipe)
        plan = compress(model, tokens, ratio=ratio, recipe=recipe, context=context)
        assert plan.nbytes(context, dtype=model.dtype) <= nbytes


@pytest.mark.parametrize("family", WITH_WINDOWS_AND_WITHOUT)
@pytest.mark.parametrize("sinks", [0, 2])
def test_a_budget_in_bytes_is_kept_by_coded_latents(family: str, sinks: int) -> None:
    """Their ratio is one to 16 bits, the model runs in 64."""
    model, tokens, context = tiny_model(family), tiny_tokens(2, 12), 40
    recipe = BitRecipe(sinks=sinks)
    full = full_rank_plan(model).nbytes(context)
    for nbytes in (full // 2, 3 * full // 5):
        ratio = ratio_from_bytes(model, nbytes, context=context, recipe=recipe)
        plan = compress(model, tokens, ratio=ratio, recipe=recipe, context=context)
        taken = plan.nbytes(context, dtype=model.dtype)
        assert taken <= nbytes
        assert taken > 0.8 * nbytes


@pytest.mark.parametrize(
    ("nbytes", "settings", "message"),
    [
        (0, {"context": 1}, "leave room for nothing"),
        (1000, {"context": 0}, "for 0 tokens"),
        (1000, {"context": 40, "recipe": BitRecipe(sinks=4)}, "leave room for nothing"),
    ],
)
def test_impossible_budgets_are_refused(nbytes: int, settings: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ratio_from_bytes(tiny_model("llama"), nbytes, **settings)

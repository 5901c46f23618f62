import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldkv import HeadGrouping, RankError, capture, layer_errors
from manifoldkv.decoder import compressed_output
from manifoldkv.rank_selection import (
    CANDIDATES,
    PAPER_CANDIDATES,
    ErrorSurface,
    Sequential,
    budget_from_ratio,
    candidate_ranks,
    optimal,
    threshold,
    threshold_rank,
    uniform,
)
from manifoldkv.surfaces import error_surface
from tests.families import activations_of, tiny_model, tiny_tokens
from tests.plans import any_basis

HEAD_DIM = 8


@st.composite
def surfaces(draw: st.DrawFn, layers: int | None = None) -> list[ErrorSurface]:
    """Errors that fall with rank, as trained bases mostly have them, or any errors at all."""
    count = layers if layers is not None else draw(st.integers(1, 4))
    ranks = tuple(sorted(draw(st.sets(st.integers(1, HEAD_DIM), min_size=1, max_size=3))))
    falling = draw(st.booleans())
    found = []
    for _ in range(count):
        numbers = draw(
            st.lists(st.floats(0, 1), min_size=len(ranks) ** 2, max_size=len(ranks) ** 2)
        )
        errors = torch.tensor(numbers, dtype=torch.float64).view(len(ranks), -1)
        if falling:
            errors = errors.flip(0, 1).cumsum(0).cumsum(1).flip(0, 1)
        found.append(ErrorSurface(ranks, ranks, errors))
    return found


def cost(ranks: list[tuple[int, int]]) -> int:
    return sum(key + value for key, value in ranks)


def total_error(found: list[ErrorSurface], ranks: list[tuple[int, int]]) -> float:
    return sum(
        float(s.errors[s.key_ranks.index(key), s.value_ranks.index(value)])
        for s, (key, value) in zip(found, ranks, strict=True)
    )


def cheapest(found: list[ErrorSurface]) -> int:
    return sum(min(s.key_ranks) + min(s.value_ranks) for s in found)


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

    def test_impossible_ratios(self) -> None:
        with pytest.raises(RankError, match="candidate ratio"):
            candidate_ranks(8, (0.5, 1.2))


class TestBudgets:
    def test_ratio(self) -> None:
        assert budget_from_ratio(0.5, layers=6, head_dim=32) == 192
        assert budget_from_ratio(0.3, layers=1, head_dim=5) == 3
        with pytest.raises(RankError, match="not in"):
            budget_from_ratio(1.1, 6, 32)


class TestUniform:
    @given(st.integers(1, 5), st.integers(1, 100))
    def test_it_never_exceeds_the_budget_and_wastes_less_than_it_must(
        self, layers: int, budget: int
    ) -> None:
        ranks = candidate_ranks(HEAD_DIM)
        if budget < 2 * min(ranks) * layers:
            with pytest.raises(RankError, match="smallest feasible ratio"):
                uniform(ranks, ranks, layers, budget, HEAD_DIM)
            return
        found = uniform(ranks, ranks, layers, budget, HEAD_DIM)
        assert len(set(found)) == 1
        assert cost(found) <= budget
        dearer = [k + v for k in ranks for v in ranks if k + v > sum(found[0])]
        assert all(layers * price > budget for price in dearer)

    def test_it_is_even(self) -> None:
        ranks = candidate_ranks(32, (0.25, 0.375, *PAPER_CANDIDATES))
        assert uniform(ranks, ranks, 6, budget_from_ratio(0.5, 6, 32), 32) == [(16, 16)] * 6
        assert uniform(ranks, ranks, 1, 35, 32) == [(16, 19)]

    def test_the_smallest_feasible_ratio_is_named(self) -> None:
        with pytest.raises(RankError, match=r"smallest feasible ratio is 0\.25"):
            uniform((2, 8), (2, 8), 3, 11, HEAD_DIM)


class TestSequential:
    @settings(deadline=None)
    @given(surfaces(), st.floats(0.01, 1))
    def test_it_never_exceeds_the_budget_and_every_share_is_at_least_the_ratio(
        self, found: list[ErrorSurface], ratio: float
    ) -> None:
        layers = len(found)
        budget = budget_from_ratio(ratio, layers, HEAD_DIM)
        rule = Sequential(layers, budget)
        if budget < cheapest(found):
            with pytest.raises(RankError, match="fits its share"):
                [rule.select(surface) for surface in found]
            return
        for number, surface in enumerate(found):
            share = (budget - cost(rule.ranks)) / (layers - number)
            assert share >= budget / layers - 1e-9
            pair = rule.select(surface)
            assert sum(pair) <= share + 1e-9
        assert cost(rule.ranks) <= budget

    def test_by_hand(self) -> None:
        errors = torch.tensor([[0.9, 0.5], [0.4, 0.0]], dtype=torch.float64)
        surface = ErrorSurface((4, 8), (4, 8), errors)
        rule = Sequential(3, 36)  # 12 per layer
        assert [rule.select(surface) for _ in range(3)] == [(8, 4)] * 3
        flat = ErrorSurface((4, 8), (4, 8), torch.zeros(2, 2, dtype=torch.float64))
        rule = Sequential(2, 24)
        assert rule.select(flat) == (4, 4)  # of equal errors the cheaper
        assert rule.select(surface) == (8, 8)  # what was saved is spent

    def test_one_feasible_pair_makes_it_uniform(self) -> None:
        """The paper's candidates at half the cache."""
        ranks = candidate_ranks(32, PAPER_CANDIDATES)
        rule = Sequential(6, budget_from_ratio(0.5, 6, 32))
        surface = ErrorSurface(ranks, ranks, torch.rand(6, 6, dtype=torch.float64))
        assert [rule.select(surface) for _ in range(6)] == [(16, 16)] * 6


class TestOptimal:
    @settings(deadline=None, max_examples=200)
    @given(surfaces(), st.integers(1, 2 * HEAD_DIM * 4))
    def test_it_is_the_best_of_all_allocations(
        self, found: list[ErrorSurface], budget: int
    ) -> None:
        if budget < cheapest(found):
            with pytest.raises(RankError, match="smallest feasible ratio"):
                optimal(found, budget, HEAD_DIM)
            return
        ranks = optimal(found, budget, HEAD_DIM)
        assert cost(ranks) <= budget
        pairs = [list(itertools.product(s.key_ranks, s.value_ranks)) for s in found]
        best = min(
            total_error(found, list(chosen))
            for chosen in itertools.product(*pairs)
            if cost(list(chosen)) <= budget
        )
        assert total_error(found, ranks) == pytest.approx(best, abs=1e-12)

    @settings(deadline=None)
    @given(surfaces(layers=3), st.integers(0, 40), st.integers(0, 20))
    def test_more_budget_is_never_worse(
        self, found: list[ErrorSurface], extra: int, more: int
    ) -> None:
        budget = cheapest(found) + extra
        small = total_error(found, optimal(found, budget, HEAD_DIM))
        large = total_error(found, optimal(found, budget + more, HEAD_DIM))
        assert large <= small + 1e-12

    def test_of_equal_sums_the_cheaper(self) -> None:
        flat = ErrorSurface((2, 8), (2, 8), torch.zeros(2, 2, dtype=torch.float64))
        assert optimal([flat] * 3, 48, HEAD_DIM) == [(2, 2)] * 3


class TestThreshold:
    spectra = torch.tensor([[4.0, 3.0, 2.0, 1.0], [7.0, 1.0, 1.0, 1.0]])

    def test_ranks_are_shares_of_the_sum_and_the_largest_of_any_head(self) -> None:
        assert threshold_rank(self.spectra, 0.3) == 1
        assert threshold_rank(self.spectra, 0.75) == 2
        assert threshold_rank(self.spectra, 0.85) == 2
        assert threshold_rank(self.spectra, 0.95) == 3
        assert threshold_rank(self.spectra, 0.0) == 1

    def test_it_stops_where_the_error_budget_ends(self) -> None:
        asked = []

        def error(key: int, value: int) -> float:
            asked.append((key, value))
            return (8 - key - value) / 10

        assert threshold(self.spectra, self.spectra, error, 1.0, smallest_share=0.5) == (3, 3)
        assert threshold(self.spectra, self.spectra, error, 0.25) == (3, 3)
        assert threshold(self.spectra, self.spectra, error, 0.0) == (4, 4)
        assert max(map(sum, asked)) <= 8


class TestErrorSurface:
    def test_entries_are_layer_output_errors(self) -> None:
        activations = activations_of("qwen3")
        keys = {r: any_basis(8, r, HeadGrouping("shared", 2), oblique=True, seed=r) for r in (3, 5)}
        for name in (1, "all", "shared"):
            values = {
                r: any_basis(8, r, HeadGrouping(name, 2), oblique=False, seed=r) for r in (2, 6)
            }
            surface = error_surface(activations, keys | {8: None}, values | {8: None})
            assert (surface.key_ranks, surface.value_ranks) == ((3, 5, 8), (2, 6, 8))
            for i, key in enumerate((*keys.values(), None)):
                for j, value in enumerate((*values.values(), None)):
                    expected = layer_errors(activations, key, value).layer_output_error
                    assert float(surface.errors[i, j]) == pytest.approx(expected, abs=1e-9)
        assert surface.errors[-1, -1] == 0

    def test_rows_are_a_part_of_the_whole(self) -> None:
        activations = activations_of("llama")
        basis = any_basis(8, 3, HeadGrouping("shared", 2), oblique=False, seed=0)
        whole = error_surface(activations, {3: basis}, {8: None})
        all_rows = error_surface(activations, {3: basis}, {8: None}, rows=torch.arange(12))
        some = error_surface(activations, {3: basis}, {8: None}, rows=torch.tensor([3, 7]))
        assert torch.allclose(whole.errors, all_rows.errors)
        assert not torch.allclose(whole.errors, some.errors)


def test_inputs_can_pass_compressed_layers() -> None:
    """Propagated through one compressed layer, the next sees what a compressed model shows it."""
    model, tokens = tiny_model("llama"), tiny_tokens()
    basis = any_basis(8, 3, HeadGrouping("shared", 2), oblique=False, seed=0)
    clean = list(capture(model, tokens))
    seen = list(capture(model, tokens, propagate=lambda a: compressed_output(a, basis, None)))
    assert torch.equal(clean[0].inputs, seen[0].inputs)
    expected = compressed_output(clean[0], basis, None)
    assert torch.allclose(seen[1].inputs, expected)
    assert not torch.allclose(seen[1].inputs, clean[1].inputs)

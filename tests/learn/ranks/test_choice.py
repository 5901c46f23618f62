"""The rules' own logic: by hand, against all allocations, against the release's arithmetic."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv.core.errors import ArgumentError
from manifoldkv.learn.ranks import PAPER_CANDIDATES, Budget, candidate_ranks
from manifoldkv.learn.ranks.optimal import allocate
from manifoldkv.learn.ranks.sequential import Selection
from manifoldkv.learn.ranks.surfaces import ErrorSurface
from manifoldkv.learn.ranks.threshold import threshold_rank, threshold_search

HEAD_DIM = 8
CONTEXT = 12


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


@st.composite
def problems(draw: st.DrawFn, layers: int | None = None) -> tuple[list[ErrorSurface], Budget]:
    found = draw(surfaces(layers))
    windows = tuple(draw(st.none() | st.integers(2, 20)) for _ in found)
    return found, Budget(draw(st.floats(0.01, 1)), HEAD_DIM, windows, CONTEXT)


def total_error(found: list[ErrorSurface], ranks: list[tuple[int, int]]) -> float:
    return sum(
        float(s.errors[s.key_ranks.index(key), s.value_ranks.index(value)])
        for s, (key, value) in zip(found, ranks, strict=True)
    )


def cheapest(found: list[ErrorSurface]) -> list[tuple[int, int]]:
    return [(min(s.key_ranks), min(s.value_ranks)) for s in found]


def feasible(found: list[ErrorSurface], budget: Budget) -> bool:
    return budget.cost(cheapest(found)) <= budget.latent_elements


class TestSelection:
    @given(problems())
    def test_the_budget_is_kept_and_every_share_is_at_least_the_ratio(
        self, problem: tuple[list[ErrorSurface], Budget]
    ) -> None:
        found, budget = problem
        selection = Selection(budget)
        if not feasible(found, budget):
            with pytest.raises(ArgumentError, match="fits its share"):
                [selection.select(surface) for surface in found]
            return
        first = selection.share
        for surface in found:
            share = selection.share
            assert share >= first - 1e-9
            assert sum(selection.select(surface)) <= share + 1e-9
        assert budget.cost(selection.ranks) <= budget.latent_elements

    def test_by_hand(self) -> None:
        errors = torch.tensor([[0.9, 0.5], [0.4, 0.0]], dtype=torch.float64)
        surface = ErrorSurface((4, 8), (4, 8), errors)
        selection = Selection(Budget(0.75, HEAD_DIM, (None,) * 3, 1))  # 12 per layer
        assert [selection.select(surface) for _ in range(3)] == [(8, 4)] * 3
        flat = ErrorSurface((4, 8), (4, 8), torch.zeros(2, 2, dtype=torch.float64))
        selection = Selection(Budget(0.75, HEAD_DIM, (None,) * 2, 1))
        assert selection.select(flat) == (4, 4)  # of equal errors the cheaper
        assert selection.select(surface) == (8, 8)  # what was saved is spent

    def test_what_a_window_does_not_cache_is_left_to_other_layers(self) -> None:
        selection = Selection(Budget(0.75, HEAD_DIM, (5, None), 100))  # 4 and 100 tokens
        assert selection.share == pytest.approx(12)
        assert selection.select(ErrorSurface((4, 8), (4, 8), torch.zeros(2, 2))) == (4, 4)
        assert selection.share == pytest.approx((12 * 104 - 8 * 4) / 100)

    def test_one_feasible_pair_makes_it_uniform(self) -> None:
        """The paper's candidates at half the cache."""
        ranks = candidate_ranks(32, PAPER_CANDIDATES)
        selection = Selection(Budget(0.5, 32, (None,) * 6, 10))
        surface = ErrorSurface(ranks, ranks, torch.rand(6, 6, dtype=torch.float64))
        assert [selection.select(surface) for _ in range(6)] == [(16, 16)] * 6


class TestAllocate:
    @given(problems())
    def test_it_is_the_best_of_all_allocations(
        self, problem: tuple[list[ErrorSurface], Budget]
    ) -> None:
        found, budget = problem
        if not feasible(found, budget):
            with pytest.raises(ArgumentError, match="smallest feasible ratio"):
                allocate(found, budget)
            return
        ranks = allocate(found, budget)
        assert budget.cost(ranks) <= budget.latent_elements
        pairs = [list(itertools.product(s.key_ranks, s.value_ranks)) for s in found]
        best = min(
            total_error(found, list(chosen))
            for chosen in itertools.product(*pairs)
            if budget.cost(list(chosen)) <= budget.latent_elements
        )
        assert total_error(found, ranks) == pytest.approx(best, abs=1e-12)

    @given(problems(layers=3), st.floats(0, 0.5))
    def test_more_budget_is_never_worse(
        self, problem: tuple[list[ErrorSurface], Budget], more: float
    ) -> None:
        found, budget = problem
        if feasible(found, budget):
            larger = Budget(min(1, budget.ratio + more), HEAD_DIM, budget.windows, CONTEXT)
            small = total_error(found, allocate(found, budget))
            assert total_error(found, allocate(found, larger)) <= small + 1e-12

    def test_of_equal_sums_the_cheaper(self) -> None:
        flat = ErrorSurface((2, 8), (2, 8), torch.zeros(2, 2, dtype=torch.float64))
        assert allocate([flat] * 3, Budget(1.0, HEAD_DIM, (None,) * 3, 5)) == [(2, 2)] * 3


class TestThreshold:
    spectra = torch.tensor([[4.0, 3.0, 2.0, 1.0], [7.0, 1.0, 1.0, 1.0]])

    def test_ranks_are_shares_of_the_sum_and_the_largest_of_any_head(self) -> None:
        assert threshold_rank(self.spectra, 0.3) == 1
        assert threshold_rank(self.spectra, 0.75) == 2
        assert threshold_rank(self.spectra, 0.85) == 2
        assert threshold_rank(self.spectra, 0.95) == 3
        assert threshold_rank(self.spectra, 0.0) == 1

    @given(
        st.lists(st.floats(0.01, 1), min_size=2, max_size=12),
        st.lists(st.floats(0.01, 1), min_size=2, max_size=12),
        st.floats(0, 2),
        st.floats(0, 1),
    )
    def test_it_is_the_releases_arithmetic(
        self, keys: list[float], values: list[float], error_budget: float, smallest: float
    ) -> None:
        """Written out as the release does it: lower, look, and take 0.04 back at the end."""
        size = min(len(keys), len(values))
        spectra = [
            torch.tensor(sorted(x[:size], reverse=True), dtype=torch.float64)[None]
            for x in (keys, values)
        ]

        def error(key: int, value: int) -> float:
            return (2 * size - key - value) / size

        def ranks(level: float) -> tuple[int, int]:
            if level > 1.0 + 1e-9:
                return size, size
            return threshold_rank(spectra[0], level), threshold_rank(spectra[1], level)

        level, found, rank_k, rank_v = 1.0, 0.0, size, size
        while (
            found < error_budget
            and rank_k > smallest * size
            and rank_v > smallest * size
            and level > 0
        ):
            rank_k, rank_v = ranks(level)
            found = error(rank_k, rank_v)
            level -= 0.02
        expected = ranks(level + 0.04) if level < 1.0 else (size, size)
        chosen = threshold_search(*spectra, error, error_budget, smallest_share=smallest)
        # The release adds 0.04 to a sum of many steps: one rounding at a share that is met exactly.
        assert max(abs(a - b) for a, b in zip(chosen, expected, strict=True)) <= 1

    def test_either_rank_at_its_floor_ends_the_search(self) -> None:
        flat, steep = torch.ones(1, 8), torch.tensor([[8.0, 1, 1, 1, 1, 1, 1, 1]])
        # The steep spectrum falls below 45 % of 8 ranks first, at 0.72; at 0.74 both are above it.
        assert threshold_search(flat, steep, lambda *pair: 0.0, 1.0) == (5, 4)
        assert threshold_search(flat, flat, lambda *pair: 0.0, 1.0) == (4, 4)

    def test_an_error_ends_the_search_one_step_before(self) -> None:
        asked = []

        def error(key: int, value: int) -> float:
            asked.append((key, value))
            return (8 - key - value) / 10

        chosen = threshold_search(self.spectra, self.spectra, error, 0.25, smallest_share=0.0)
        assert error(*asked[-1]) >= 0.25
        assert chosen == asked[-3]
        nothing = threshold_search(self.spectra, self.spectra, error, 0.0)
        assert nothing == (4, 4)

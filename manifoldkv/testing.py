"""Laws every objective and every solver obeys, as test classes to inherit.

    from manifoldkv.testing import ObjectiveConformance

    class TestMine(ObjectiveConformance):
        objective = MyObjective()

pytest collects the inherited tests. They run on tiny random models in float64, in seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from manifoldkv.basis import Basis, HeadGrouping, Rotary, Site, identity_basis, orthonormal_basis
from manifoldkv.errors import DivergenceError, RankError, UnsolvableError
from manifoldkv.layers.activations import Batch, LayerActivations
from manifoldkv.layers.capture import capture
from manifoldkv.models.support import sliding_windows
from manifoldkv.objectives import KSVD, OBJECTIVES, Objective, Problem
from manifoldkv.ranks import RANK_RULES, Budget, LayerBases, RankProblem, RankRule, Ranks
from manifoldkv.ranks.base import CandidateRanks
from manifoldkv.solvers import SOLVERS, Solver

HEAD_DIM = 8
KV_HEADS = 2

T = TypeVar("T")

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # attention that looks somewhere
}


@cache
def tiny_activations(dtype: torch.dtype = torch.float64) -> LayerActivations:
    """Return layer 1 of a random Llama with 4 query and 2 KV heads of 8, 6 sequences of 16."""
    return next(iter(capture(_tiny_llama(dtype), tiny_tokens(), [1])))


@cache
def tiny_tokens() -> Tensor:
    """Return token ids of 6 sequences of 16, (6, 16), int64."""
    return torch.randint(64, (6, 16), generator=torch.Generator().manual_seed(0))


@cache
def _tiny_llama(dtype: torch.dtype) -> PreTrainedModel:
    return _random_model(LlamaConfig(**SHAPE), dtype)


@cache
def _tiny_gemma() -> PreTrainedModel:
    """Return a model with a layer that has a sliding window and one that has none."""
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SHAPE, sliding_window=6, layer_types=kinds)
    return _random_model(config, torch.float64)


def _random_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    return model.to(dtype).eval().requires_grad_(False)


def _random_bases(candidates: Sequence[CandidateRanks]) -> list[LayerBases]:
    """Return random bases at all candidate ranks; full rank leaves everything as it is."""

    def basis(rank: int, grouping: HeadGrouping) -> Basis:
        if rank < HEAD_DIM:
            return random_basis(rank, grouping, rank)
        return identity_basis(grouping, rank).like(torch.empty(0, dtype=torch.float64))

    shared, apart = HeadGrouping("shared", KV_HEADS), HeadGrouping(1, KV_HEADS)
    return [
        LayerBases({r: basis(r, shared) for r in keys}, {r: basis(r, apart) for r in values})
        for keys, values in candidates
    ]


def random_basis(rank: int, grouping: HeadGrouping, seed: int) -> Basis:
    """Return a uniformly random orthonormal basis in float64."""
    generator = torch.Generator().manual_seed(seed)
    size = HEAD_DIM * grouping.width
    shape = (grouping.groups, size, rank * grouping.width)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    return orthonormal_basis(torch.linalg.qr(normal).Q, grouping)


class ObjectiveConformance:
    """Inherit, set `objective`, and narrow `sites`, `groupings` or `rotaries` if need be."""

    objective: Objective
    sites: ClassVar[tuple[Site, ...]] = ("key", "value")
    groupings: ClassVar[tuple[str | int, ...]] = ("shared", 1, "all")
    rotaries: ClassVar[tuple[Rotary, ...]] = ("pre", "post")

    def problems(self) -> Iterator[Problem]:
        for site, name, rotary in product(self.sites, self.groupings, self.rotaries):
            grouping = HeadGrouping(name, KV_HEADS)
            yield self.objective.problem(tiny_activations(), site, grouping, rotary)

    def test_full_rank_costs_nothing(self) -> None:
        for problem in self.problems():
            assert abs(problem.loss(random_basis(HEAD_DIM, problem.grouping, 0)).item()) < 1e-6

    def test_less_than_full_rank_costs_something(self) -> None:
        for problem in self.problems():
            loss = problem.loss(random_basis(HEAD_DIM // 2, problem.grouping, 0)).item()
            assert math.isfinite(loss)
            assert loss > 1e-4

    def test_loss_sees_the_projector_only(self) -> None:
        for problem in self.problems():
            basis = random_basis(3, problem.grouping, 0)
            columns = basis.down.shape[-1]
            generator = torch.Generator().manual_seed(1)
            mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
            rotation = torch.linalg.qr(mixing).Q
            rotated = Basis(basis.down @ rotation, basis.up @ rotation, basis.grouping)
            oblique = Basis(
                basis.down @ mixing, basis.up @ torch.linalg.inv(mixing).mT, basis.grouping
            )
            expected = problem.loss(basis)
            torch.testing.assert_close(problem.loss(rotated), expected, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(problem.loss(oblique), expected, rtol=1e-5, atol=1e-7)

    def test_gradient_is_the_slope_of_the_loss(self) -> None:
        for problem in self.problems():
            columns = random_basis(3, problem.grouping, 0).down.clone().requires_grad_()
            direction = random_basis(3, problem.grouping, 1).down

            def loss_at(p: Tensor, problem: Problem = problem) -> Tensor:
                return problem.loss(Basis(p, p, problem.grouping))

            (gradient,) = torch.autograd.grad(loss_at(columns), [columns])
            step = 1e-4
            ahead = loss_at(columns.detach() + step * direction)
            behind = loss_at(columns.detach() - step * direction)
            slope = (ahead - behind) / (2 * step)
            torch.testing.assert_close((gradient * direction).sum(), slope, rtol=2e-2, atol=2e-3)

    def test_without_a_batch_all_data_count(self) -> None:
        for problem in self.problems():
            basis = random_basis(3, problem.grouping, 0)
            everything = Batch(torch.arange(problem.activations.sequences))
            torch.testing.assert_close(problem.loss(basis), problem.loss(basis, everything))

    def test_start_is_orthonormal(self) -> None:
        for problem in self.problems():
            basis = problem.initial(3)
            assert basis.rank == 3
            assert basis.orthonormal
            assert_orthonormal(basis)

    def test_closed_form_is_optimal_or_refused(self) -> None:
        for problem in self.problems():
            exists, reason = self.objective.has_closed_form(problem.site, problem.grouping.name)
            if not exists:
                assert reason
                try:
                    problem.closed_form(3)
                except UnsolvableError:
                    continue
                raise AssertionError("closed_form answers although has_closed_form denies it")
            best = problem.loss(problem.closed_form(3)).item()
            for seed in range(5):
                assert best <= problem.loss(random_basis(3, problem.grouping, seed)).item() + 1e-12
            assert best <= problem.loss(problem.initial(3)).item() + 1e-12

    def test_provenance_can_name_it(self) -> None:
        assert_describable(OBJECTIVES.describe(self.objective))

    def test_closed_form_improves_with_rank(self) -> None:
        for problem in self.problems():
            if self.objective.has_closed_form(problem.site, problem.grouping.name)[0]:
                losses = [problem.loss(problem.closed_form(r)).item() for r in (1, 3, 6, HEAD_DIM)]
                assert losses == sorted(losses, reverse=True)
                assert losses[-1] < 1e-6


_KEPT: dict[tuple[Hashable, ...], tuple[tuple[object, ...], Any]] = {}


def _once(objects: tuple[object, ...], key: Hashable, compute: Callable[[], T]) -> T:
    """Return what is computed for these very objects, which is done at the first call only.

    The objects need not be hashable. They are kept, so that no others take their identity.
    """
    place = (*map(id, objects), key)
    if place not in _KEPT:
        _KEPT[place] = (objects, compute())
    return _KEPT[place][1]


class _Solved(NamedTuple):
    """A solution that several laws look at."""

    basis: Basis
    history: list[float]
    random_state_is_left: bool
    """Torch's global one."""


class SolverConformance:
    """Inherit and set `solver`; `objective` is what it is tried on.

    Every problem is solved once, and once more where two solutions are compared.
    """

    solver: Solver
    objective: Objective = KSVD()
    groupings: ClassVar[tuple[str | int, ...]] = ("shared", 1, "all")

    def problems(self, dtype: torch.dtype = torch.float64) -> Iterator[Problem]:
        sites: tuple[Site, ...] = ("key", "value")
        for site, name in product(sites, self.groupings):
            if self.solver.accepts(self.objective, site, name)[0]:
                make = partial(self._problem, site, name, dtype)
                yield _once((self.objective,), (site, name, dtype), make)

    def _problem(self, site: Site, name: str | int, dtype: torch.dtype) -> Problem:
        grouping = HeadGrouping(name, KV_HEADS)
        return self.objective.problem(tiny_activations(dtype), site, grouping)

    def _solved(self, problem: Problem, rank: int = 3) -> _Solved:
        return _once((self.solver, problem), rank, partial(self._solve, problem, rank))

    def _solve(self, problem: Problem, rank: int) -> _Solved:
        before = torch.get_rng_state()
        found = self.solver.solve(problem, rank, seed=7)
        return _Solved(found.basis, found.history, torch.equal(before, torch.get_rng_state()))

    def test_some_problem_is_accepted(self) -> None:
        assert list(self.problems()), "nothing that this solver can solve is tried on it"

    def test_basis_has_the_rank_and_dtype_asked_for(self) -> None:
        for dtype in (torch.float32, torch.float64):
            for problem in self.problems(dtype):
                basis = self._solved(problem).basis
                assert basis.rank == 3
                assert basis.head_dim == HEAD_DIM
                assert basis.down.dtype == dtype
                assert not basis.down.requires_grad

    def test_basis_is_a_projector(self) -> None:
        for problem in self.problems():
            basis = self._solved(problem).basis
            projector = basis.projector()
            torch.testing.assert_close(projector @ projector, projector, rtol=0, atol=1e-8)
            if basis.orthonormal:
                assert_orthonormal(basis)

    def test_full_rank_costs_nothing(self) -> None:
        for problem in self.problems():
            assert abs(problem.loss(self._solved(problem, HEAD_DIM).basis).item()) < 1e-6

    def test_solution_beats_random_bases(self) -> None:
        for problem in self.problems():
            found = problem.loss(self._solved(problem).basis).item()
            for seed in range(5):
                assert found < problem.loss(random_basis(3, problem.grouping, seed)).item()

    def test_same_seed_gives_the_same_bytes(self) -> None:
        for problem in self.problems():
            first, second = self._solved(problem).basis, self._solve(problem, 3).basis
            assert torch.equal(first.down, second.down)
            assert torch.equal(first.up, second.up)

    def test_provenance_can_name_it(self) -> None:
        assert_describable(SOLVERS.describe(self.solver))

    def test_global_random_state_is_left_alone(self) -> None:
        for problem in self.problems():
            assert self._solved(problem).random_state_is_left

    def test_impossible_ranks_are_refused(self) -> None:
        for problem in self.problems():
            for rank in (0, HEAD_DIM + 1):
                try:
                    self.solver.solve(problem, rank)
                except RankError as error:
                    assert str(rank) in str(error)
                else:
                    raise AssertionError(f"rank {rank} of head_dim {HEAD_DIM} is accepted")

    def test_loss_that_is_not_finite_is_an_error(self) -> None:
        for problem in self.problems():
            if not self._solved(problem).history:
                continue  # a solver that never asks for the loss
            broken = _Broken().problem(problem.activations, problem.site, problem.grouping)
            try:
                self.solver.solve(broken, 3)
            except DivergenceError as error:
                assert "layer 1" in str(error)
                assert problem.site in str(error)
                assert "step" in str(error)
            else:
                raise AssertionError("a basis is returned although the loss is not a number")


class RankRuleConformance:
    """Inherit and set `rule`; narrow `ratios` to what its candidates can meet.

    Ranks of every problem are chosen once, and once more where two choices are compared.
    """

    rule: RankRule
    ratios: ClassVar[tuple[float, ...]] = (0.5, 0.7, 1.0)

    def budgets(self) -> Iterator[tuple[PreTrainedModel, Budget]]:
        for model in (_tiny_llama(torch.float64), _tiny_gemma()):
            windows = sliding_windows(model.config)
            for ratio, recent_share in product(self.ratios, (0.0, 0.2)):
                yield model, Budget(ratio, HEAD_DIM, windows, context=16, recent_share=recent_share)

    def problems(self) -> Iterator[RankProblem]:
        for model, budget in self.budgets():
            try:
                candidates = self.rule.candidate_ranks(budget)
            except RankError:
                assert budget.recent  # what is left for latents may be too little
                continue
            make = partial(self._problem, model, candidates, budget)
            yield _once((self.rule, model), budget, make)

    def _problem(
        self, model: PreTrainedModel, candidates: Sequence[CandidateRanks], budget: Budget
    ) -> RankProblem:
        return RankProblem(model, tiny_tokens()[:3], _random_bases(candidates), budget)

    def _chosen(self, problem: RankProblem) -> list[Ranks]:
        return _once((self.rule, problem), None, partial(self.rule.choose, problem))

    def test_candidates_are_ranks(self) -> None:
        for problem in self.problems():
            candidates = self.rule.candidate_ranks(problem.budget)
            assert len(candidates) == problem.budget.layers
            for ranks in (ranks for of_layer in candidates for ranks in of_layer):
                assert ranks == tuple(sorted(set(ranks)))
                assert 1 <= ranks[0] <= ranks[-1] <= HEAD_DIM

    def test_choice_is_among_the_candidates_and_within_the_budget(self) -> None:
        for problem in self.problems():
            ranks = self._chosen(problem)
            assert problem.budget.cost(ranks) <= problem.budget.latent_elements
            for (key, value), bases in zip(ranks, problem.bases, strict=True):
                assert key in bases.keys
                assert value in bases.values

    def test_choice_is_the_same_again(self) -> None:
        for problem in self.problems():
            assert self.rule.choose(problem) == self._chosen(problem)

    def test_too_small_a_ratio_is_refused_before_any_work(self) -> None:
        budget = Budget(0.01, HEAD_DIM, (None, None), context=16)
        try:
            self.rule.candidate_ranks(budget)
        except RankError as error:
            assert "0.01" in str(error) or "layers" in str(error)
        else:
            raise AssertionError("a ratio of 0.01 is accepted")

    def test_provenance_can_name_it(self) -> None:
        assert_describable(RANK_RULES.describe(self.rule))


def assert_describable(description: dict[str, Any]) -> None:
    """Fail unless a method's name and fields survive JSON, as a plan stores them."""
    assert isinstance(description["name"], str)
    assert list(json.loads(json.dumps(description))) == list(description)


class _Broken(Objective):
    """An objective whose loss is not a number."""

    def loss(self, problem: Problem, basis: Basis, batch: Batch | None = None) -> Tensor:
        return basis.down.sum() * float("nan")


def assert_orthonormal(basis: Basis, tolerance: float = 1e-8) -> None:
    """Fail unless the columns are orthonormal to `tolerance`."""
    columns = basis.down
    identity = torch.eye(columns.shape[-1], dtype=columns.dtype).expand_as(columns.mT @ columns)
    torch.testing.assert_close(columns.mT @ columns, identity, rtol=0, atol=tolerance)

"""Laws of rank rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from manifoldkv.core.basis import Basis, HeadGrouping, identity_basis
from manifoldkv.core.errors import ArgumentError
from manifoldkv.learn.ranks import RANK_RULES, Budget, LayerBases, RankProblem, RankRule, Ranks
from manifoldkv.learn.ranks.base import CandidateRanks
from manifoldkv.testing.checks import assert_describable
from manifoldkv.testing.once import once
from manifoldkv.testing.tiny import (
    HEAD_DIM,
    KV_HEADS,
    random_basis,
    tiny_gemma,
    tiny_llama,
    tiny_tokens,
)


class RankRuleConformance:
    """Laws of `rule`, at `ratios` that it can meet.

    Ranks of every problem are chosen once, and once more to compare two choices.
    """

    rule: RankRule
    ratios: ClassVar[tuple[float, ...]] = (0.5, 0.7, 1.0)

    def budgets(self) -> Iterator[tuple[PreTrainedModel, Budget]]:
        for model in (tiny_llama(torch.float64), tiny_gemma()):
            _, layers = get_layer_types_and_kwargs(model.config)
            windows = tuple(layer.get("sliding_window") for layer in layers)
            for ratio in self.ratios:
                yield model, Budget(ratio, HEAD_DIM, windows, context=16)

    def problems(self) -> Iterator[RankProblem]:
        for model, budget in self.budgets():
            candidates = self.rule.candidate_ranks(budget)
            make = partial(self._problem, model, candidates, budget)
            yield once((self.rule, model), budget, make)

    def _problem(
        self, model: PreTrainedModel, candidates: Sequence[CandidateRanks], budget: Budget
    ) -> RankProblem:
        return RankProblem(model, tiny_tokens()[:3], _random_bases(candidates), budget)

    def _chosen(self, problem: RankProblem) -> list[Ranks]:
        return once((self.rule, problem), None, partial(self.rule.choose, problem))

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
        except ArgumentError as error:
            assert "0.01" in str(error) or "layers" in str(error)
        else:
            raise AssertionError("a ratio of 0.01 is accepted")

    def test_provenance_can_name_it(self) -> None:
        assert_describable(RANK_RULES.describe(self.rule))


def _random_bases(candidates: Sequence[CandidateRanks]) -> list[LayerBases]:
    """Return random bases at all candidate ranks, the identity at full rank."""

    def basis(rank: int, grouping: HeadGrouping) -> Basis:
        if rank < HEAD_DIM:
            return random_basis(rank, grouping, rank)
        return identity_basis(grouping, rank).like(torch.empty(0, dtype=torch.float64))

    shared, apart = HeadGrouping("shared", KV_HEADS), HeadGrouping(1, KV_HEADS)
    return [
        LayerBases({r: basis(r, shared) for r in keys}, {r: basis(r, apart) for r in values})
        for keys, values in candidates
    ]

"""Every rank rule obeys the laws of rank rules."""

from manifoldkv.learn.ranks import (
    PAPER_CANDIDATES,
    GivenRanks,
    Optimal,
    Sequential,
    Threshold,
    Uniform,
)
from manifoldkv.testing import RankRuleConformance


class TestUniform(RankRuleConformance):
    rule = Uniform()


class TestUniformOverCandidates(RankRuleConformance):
    rule = Uniform(candidates=(0.25, 0.5, 1.0), multiple=2)


class TestSequential(RankRuleConformance):
    rule = Sequential(candidates=(0.25, 0.5, 0.75, 1.0), sequences=2, rows=8)


class TestPaperSequential(RankRuleConformance):
    rule = Sequential(candidates=PAPER_CANDIDATES, sequences=None, rows=None)


class TestThreshold(RankRuleConformance):
    rule = Threshold(candidates=(0.25, 0.5, 0.75, 1.0), sequences=2, rows=8)


class TestOptimal(RankRuleConformance):
    rule = Optimal(candidates=(0.25, 0.5, 0.75, 1.0), sequences=2)


class TestGivenRanks(RankRuleConformance):
    rule = GivenRanks(ranks=((2, 5), (4, 3)))
    ratios = (0.7, 1.0)

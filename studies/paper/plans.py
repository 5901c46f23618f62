"""The plans that are compared: methods, ratios and rank rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv import CompressionPlan, RankRecipe, compress
from manifoldkv.activations.capture import capture
from manifoldkv.objectives import KQSVD, EigenAttention, LayerOutput
from manifoldkv.ranks import GivenRanks, Optimal, RankRule, Ranks, Sequential, Threshold, Uniform
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_tokens
from manifoldkv.solvers import ClosedForm
from paper.protocol import EIGEN, GROUPED, SAME_RANKS, STIEF, Protocol
from paper.search import ReleaseSearch
from paper.steps import Steps


@dataclass(frozen=True)
class Labelled:
    """A plan with the columns that identify it in the results."""

    plan: CompressionPlan
    method: str
    policy: str
    point: float
    requested_ratio: float | None = None
    seed: int = 0

    def columns(self) -> dict[str, Any]:
        names = ("method", "policy", "point", "requested_ratio", "seed")
        return {name: getattr(self, name) for name in names} | {"ratio": self.plan.ratio}


@dataclass(frozen=True)
class PlanMaker:
    """The plans of one model; `folder` has the checkpoints of their bases."""

    model: PreTrainedModel
    calibration: Tensor  # (sequences, length)
    protocol: Protocol
    seeds: Sequence[int]
    checkpoints: Checkpoints
    steps: Steps
    folder: Path

    def searched(self) -> list[Labelled]:
        """Return the plans of EigenAttention's own search."""
        plans = []
        for budget in self.protocol.error_budgets:
            rule = GivenRanks(ranks=tuple(self.searched_ranks(budget)))
            plan = self.plan(EIGEN, rule, 1.0)
            plans.append(Labelled(plan, EIGEN, "release", budget))
        return plans

    def at_ratio(self, ratio: float) -> list[Labelled]:
        """Return the plans of all methods at a ratio."""
        plans = []
        for seed in self.seeds:
            of_stief = self.at(STIEF, ratio, seed)
            plans += of_stief
        (sequential,) = [p.plan for p in of_stief if p.policy == "sequential"]
        same = GivenRanks(ranks=tuple(ranks_of(sequential)))
        for method in (EIGEN, GROUPED):
            plans += self.at(method, ratio)
            plan = self.plan(method, same, ratio)
            plans.append(Labelled(plan, method, SAME_RANKS, ratio, ratio))
        return plans

    def at(self, method: str, ratio: float, seed: int = 0) -> list[Labelled]:
        """Return the plans of a method at a ratio under every rank rule."""
        protocol = self.protocol
        measured = (1, protocol.surface_sequences, protocol.surface_rows)
        rules: dict[str, RankRule] = {
            "sequential": Sequential(protocol.candidates, *measured),
            "uniform": Uniform(protocol.candidates),
            "threshold": Threshold(protocol.candidates, *measured),
            "optimal": Optimal(protocol.candidates),
        }
        ours = tuple(rule for rule in protocol.rules if rule == protocol.series[GROUPED])
        names = {STIEF: protocol.rules, EIGEN: protocol.eigen_rules, GROUPED: ours}[method]
        return [
            Labelled(self.plan(method, rules[name], ratio, seed), method, name, ratio, ratio, seed)
            for name in names
        ]

    def plan(self, method: str, rule: RankRule, ratio: float, seed: int = 0) -> CompressionPlan:
        recipe = {
            EIGEN: RankRecipe(EigenAttention(), ClosedForm()),
            STIEF: RankRecipe(LayerOutput(), self.protocol.solver),
            GROUPED: RankRecipe(KQSVD(), ClosedForm(), "all", "all"),
        }[method]
        recipe = replace(recipe, ranks=rule)

        def make() -> CompressionPlan:
            return compress(
                *(self.model, self.calibration),
                recipe=recipe,
                ratio=ratio,
                seed=seed,
                folder=self.folder,
            )

        checkpoints = self.checkpoints.keyed(
            recipe=recipe.describe(),
            ratio=ratio,
            seed=seed,
            calibration=digest_of_tokens(self.calibration),
        )
        return self.steps.value(checkpoints, f"plans of {method}", make)

    def searched_ranks(self, budget: float) -> list[Ranks]:
        """Return the ranks of EigenAttention's search in every layer, on uncompressed inputs."""

        def compute() -> pd.DataFrame:
            few = self.calibration[: self.protocol.search_sequences]
            rows = []
            for fit, measured in zip(
                capture(self.model, self.calibration), capture(self.model, few), strict=True
            ):
                search = ReleaseSearch(fit, measured)
                for each in self.protocol.error_budgets:
                    key, value = search.ranks(each)
                    row = {"budget": each, "layer": fit.layer, "key": key, "value": value}
                    rows.append(row)
            return pd.DataFrame(rows)

        checkpoints = self.checkpoints.keyed(
            calibration=digest_of_tokens(self.calibration),
            sequences=self.protocol.search_sequences,
            budgets=self.protocol.error_budgets,
        )
        frame = self.steps.frame(checkpoints, "release", "EigenAttention's search", compute)
        rows = frame[frame["budget"] == budget].sort_values("layer")
        return [(int(k), int(v)) for k, v in zip(rows["key"], rows["value"], strict=True)]


def nearest(plans: list[Labelled], ratio: float) -> Labelled:
    """Return the plan whose achieved ratio is nearest."""
    return min(plans, key=lambda labelled: abs(labelled.plan.ratio - ratio))


def ranks_of(plan: CompressionPlan) -> list[Ranks]:
    return [(layer.key.rank, layer.value.rank) for layer in plan.layers]

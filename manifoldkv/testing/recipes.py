"""Laws of recipes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from manifoldkv.errors import ArgumentError
from manifoldkv.models.decoder import Decoder
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.recipes.compress import compress
from manifoldkv.recipes.recipe import Recipe
from manifoldkv.testing.once import once
from manifoldkv.testing.tiny import tiny_llama, tiny_tokens


class RecipeConformance:
    """Laws of `recipe`, at `ratios` that it can meet on a tiny model. Plans are computed once."""

    recipe: Recipe
    ratios: ClassVar[tuple[float, ...]] = (0.6, 1.0)
    context: ClassVar[int] = 400
    """Number of tokens of the text that ratios are measured on."""

    def model(self) -> PreTrainedModel:
        return once((RecipeConformance,), "model", partial(tiny_llama, torch.float32))

    def plan(self, ratio: float, seed: int = 0) -> CompressionPlan:
        return compress(
            self.model(),
            tiny_tokens(),
            recipe=self.recipe,
            ratio=ratio,
            context=self.context,
            seed=seed,
        )

    def plans(self) -> Iterator[tuple[float, CompressionPlan]]:
        for ratio in self.ratios:
            yield ratio, once((self.recipe, self.model()), ratio, partial(self.plan, ratio))

    def test_the_ratio_is_never_exceeded(self) -> None:
        for ratio, plan in self.plans():
            assert plan.ratio <= ratio * (1 + 1e-9)
            assert plan.provenance.requested_ratio == ratio

    def test_a_ratio_outside_its_range_is_refused(self) -> None:
        for ratio in (0.0, 1.5, float("nan")):
            try:
                self.plan(ratio)
            except ArgumentError as error:
                assert f"{ratio:g}" in str(error)
            else:
                raise AssertionError(f"a ratio of {ratio} was accepted")

    def test_the_plan_is_one_of_the_model(self) -> None:
        for _, plan in self.plans():
            plan.check_model(Decoder.of(self.model()))

    def test_the_same_seed_gives_the_same_plan(self) -> None:
        ratio, plan = next(self.plans())
        assert self.plan(ratio).digest() == plan.digest()

    def test_saved_and_loaded_it_is_the_same(self) -> None:
        for _, plan in self.plans():
            with TemporaryDirectory() as folder:
                plan.save(Path(folder) / "plan")
                assert CompressionPlan.load(Path(folder) / "plan") == plan

    def test_its_description_is_in_the_plan(self) -> None:
        described = self.recipe.describe()
        for part in ("objective", "solver", "ranks"):
            assert isinstance(described[part]["name"], str)
        _, plan = next(self.plans())
        assert json.dumps(plan.provenance.recipe) == json.dumps(described)

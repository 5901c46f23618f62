"""What holds tensors compares, hashes and prints as a user expects."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manifoldkv import RECIPES, CompressionPlan, Quantization, compress, quantize
from manifoldkv.core.basis import HeadGrouping, identity_basis
from manifoldkv.learn.ranks.surfaces import ErrorSurface
from manifoldkv.learn.solvers import Solution
from manifoldkv.statistics.layer import Batch
from tests.families import activations_of, tiny_model, tiny_tokens
from tests.plans import random_plan

LONGEST_REPR = 600
"""In characters: a few lines."""


def plan_of(seed: int = 0, **options: Any) -> CompressionPlan:
    return random_plan(tiny_model("llama", seed=seed), **options)


def rounded_plan() -> CompressionPlan:
    return quantize(plan_of(), tiny_model("llama"), tiny_tokens(), Quantization(4))


MAKE = {
    "Basis": lambda: plan_of().layers[0].key.basis,
    "an oblique Basis": lambda: plan_of(oblique=True).layers[0].key.basis,
    "SitePlan": lambda: plan_of().layers[0].key,
    "LayerPlan": lambda: plan_of().layers[0],
    "a rounded LayerPlan": lambda: rounded_plan().layers[0],
    "CompressionPlan": plan_of,
    "a rounded CompressionPlan": rounded_plan,
    "Provenance": lambda: replace(plan_of().provenance),
    "ErrorSurface": lambda: ErrorSurface((1, 2), (1, 2), torch.tensor([[4.0, 3.0], [2.0, 1.0]])),
    "Solution": lambda: Solution(plan_of().layers[0].key.basis, [1.0, 0.5], "converged"),
    "Recipe": lambda: replace(RECIPES["low-rank"]),
    "Quantization": lambda: Quantization(4),
    "HeadGrouping": lambda: HeadGrouping("all", 2),
}


@pytest.mark.parametrize("name", MAKE)
def test_the_same_twice_is_equal_and_hashes_alike(name: str) -> None:
    first, second = MAKE[name](), MAKE[name]()
    assert first is not second
    assert first == first
    assert first == second
    assert hash(first) == hash(second)
    assert {first: "found"}[second] == "found"
    assert first != "anything else"
    assert len(repr(first)) < LONGEST_REPR


@pytest.mark.parametrize("make", [lambda: activations_of("llama"), lambda: Batch(torch.arange(4))])
def test_activations_and_batches_are_equal_to_themselves_alone(make) -> None:
    first, second = make(), make()
    assert first == first
    assert first != second
    assert len({first, second, first}) == 2
    assert len(repr(first)) < LONGEST_REPR


def test_another_element_is_another_basis() -> None:
    basis = plan_of().layers[0].key.basis
    for other in (
        replace(basis, down=-basis.down, up=-basis.up),  # of the same span
        replace(basis, down=basis.down.float(), up=basis.up.float()),
        replace(basis, up=basis.down.clone()),  # no longer known to be orthonormal
        replace(basis, grouping=HeadGrouping("shared", 4)),
        identity_basis(basis.grouping, basis.head_dim),
    ):
        assert basis != other


def test_another_range_or_window_is_another_layer() -> None:
    layer = rounded_plan().layers[0]
    quantizer = layer.key.quantizer
    for other in (replace(quantizer, ranges=quantizer.ranges + 1), layer.value.quantizer):
        assert layer != replace(layer, key=replace(layer.key, quantizer=other))
    assert layer != replace(layer, window=5)
    assert layer != replace(layer, value=layer.key)


def test_another_cost_or_candidate_is_another_surface() -> None:
    surface = MAKE["ErrorSurface"]()
    assert surface != replace(surface, errors=surface.errors + 1)
    assert surface != replace(surface, key_ranks=(1, 3))


class TestPlan:
    def test_what_a_cache_holds_decides(self, tmp_path: Path) -> None:
        plan = plan_of()
        plan.save(tmp_path)
        assert CompressionPlan.load(tmp_path) == plan
        for other in (
            replace(plan, rotary="post"),
            replace(plan, sinks=2),
            replace(plan, layers=plan.layers[::-1]),
            plan_of(key_rank=3),
            rounded_plan(),
        ):
            assert plan != other

    def test_where_it_comes_from_does_not(self) -> None:
        plan = plan_of()
        later = replace(plan.provenance, versions={"manifoldkv": "2"}, threads=7, text="another")
        assert replace(plan, provenance=later) == plan
        assert len({plan, replace(plan, provenance=later)}) == 1

    def test_the_same_run_finds_an_equal_plan(self) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens()
        half, other_half, more = (
            compress(model, tokens, ratio=ratio, recipe="eigen-attention")
            for ratio in (0.5, 0.5, 0.75)
        )
        assert half == other_half
        assert half != more

    def test_its_repr_says_what_it_is(self) -> None:
        model = tiny_model("llama")
        plan = quantize(plan_of(sinks=4), model, tiny_tokens(), Quantization(4))
        said = repr(plan)
        assert len(said.splitlines()) <= 6
        for part in ("for tiny", "3 layers", "key ranks 5 to 5", "value ranks 4 to 4 of 8"):
            assert part in said
        for part in (
            "first 4 tokens uncompressed",
            "calibrated ranges (keys), 4-bit integers in ranges per token (values)",
            f"ratio {plan.ratio:.4g} at 12 tokens",
        ):
            assert part in said

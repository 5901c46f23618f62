"""The work of a plan: its blocks, its shape of attention, and the least that there is."""

import re
from dataclasses import replace
from math import inf, nan

import pytest
import torch

from manifoldkv import BitRecipe, compress
from manifoldkv.core.errors import ArgumentError, PlanError
from manifoldkv.models.decoder import Decoder
from manifoldkv.plan.compute import AttentionShape, block_entries
from manifoldkv.recipes.bits import least_compute
from manifoldkv.recipes.config import CompressionConfig
from tests.families import tiny_model, tiny_tokens
from tests.plans import designed_plan, random_plan


def test_entries_of_blocks_are_counted_in_any_order() -> None:
    blocks = torch.block_diag(torch.ones(3, 2), torch.ones(2, 4), torch.ones(1, 1))
    blocks[0, 1] = blocks[3, 2] = 0  # a kernel multiplies whole blocks
    generator = torch.Generator().manual_seed(0)
    shuffled = blocks[torch.randperm(6, generator=generator)]
    shuffled = shuffled[:, torch.randperm(7, generator=generator)]
    assert block_entries(shuffled) == 3 * 2 + 2 * 4 + 1
    assert block_entries(torch.ones(4, 3)) == 12
    assert block_entries(torch.zeros(4, 3)) == block_entries(torch.zeros(4, 0)) == 0


def test_the_work_of_bands_by_hand() -> None:
    """2 KV heads of 8 with 4 query heads: a band of one frequency has 4 of 16 features."""
    model = tiny_model("llama")
    for kind, rows in (("dense", 16), ("own keys", 4), ("keys below", 8)):
        plan = designed_plan(model, kind)
        total = 0
        for index, layer in enumerate(plan.layers):
            assert bool((layer.key.basis.up != 0).sum(dim=1).eq(rows).all())
            total += layer.key.latents * (rows + 1) + 2 * 16 + 4 * 8
            below = {"dense": (), "own keys": (0,), "keys below": range(index + 1)}[kind]
            mixed = [plan.layers[index - one].key for one in below]
            total += sum(4 * (1 + site.latents) for site in [layer.value, *mixed])
        assert plan.compute == pytest.approx(total / (3 * 2 * 4 * 8))


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3-partial", "gpt-oss"])
def test_less_than_the_least_compute_is_refused_and_the_least_is_not(family: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens(4, 24)
    recipe = BitRecipe(sinks=0)
    with pytest.raises(ArgumentError, match=r"^compute must be >= \d") as caught:
        compress(model, tokens, recipe=recipe, compute=0.1, ratio=1.0)
    said = re.fullmatch(
        r"compute must be >= ([\d.]+), got 0\.1: a decode step on the cheapest plan for this model "
        r"multiplies \1 times as often as uncompressed attention",
        str(caught.value),
    )
    assert said is not None
    assert float(said[1]) == pytest.approx(least_compute(Decoder.of(model).description()), abs=0.01)
    plan = compress(model, tokens, recipe=recipe, compute=float(said[1]), ratio=1.0)
    assert plan.compute <= float(said[1])
    free = compress(model, tokens, recipe=recipe, compute=inf, ratio=1.0)
    assert free.compute > plan.compute


@pytest.mark.parametrize("work", [nan, 0.0, -1.0, -inf])
def test_compute_is_a_positive_number(work: float) -> None:
    for make in (lambda: BitRecipe(compute=work), lambda: CompressionConfig(compute=work)):
        with pytest.raises(ArgumentError, match=f"compute must be a positive number, got {work}"):
            make()


def test_other_recipes_have_no_budget_of_work() -> None:
    for recipe in ("low-rank", "stored"):
        with pytest.raises(ArgumentError, match=r"has no compute: leave compute=2\.0 out"):
            CompressionConfig(recipe=recipe, compute=2.0)


@pytest.mark.parametrize(
    ("query_heads", "rotary_dim", "said"),
    [
        (0, 8, "query heads must be a multiple of 2 KV heads, got 0"),
        (-2, 8, "query heads must be a multiple of 2 KV heads, got -2"),
        (3, 8, "query heads must be a multiple of 2 KV heads, got 3"),
        (4, 9, "rotary_dim must be between 0 and head_dim 8, got 9"),
        (4, -1, "rotary_dim must be between 0 and head_dim 8, got -1"),
    ],
)
def test_impossible_shapes_of_attention(query_heads: int, rotary_dim: int, said: str) -> None:
    plan = random_plan(tiny_model("llama"))
    with pytest.raises(PlanError, match=said):
        replace(plan, shape=AttentionShape(query_heads, rotary_dim))


def test_a_plan_of_another_attention_is_refused() -> None:
    model = tiny_model("llama")
    plan = replace(random_plan(model), shape=AttentionShape(2, 4))
    with pytest.raises(PlanError, match="has 4 query heads and rotates 8 features of a head"):
        plan.check_model(Decoder.of(model))
    assert Decoder.of(tiny_model("gpt-oss")).rotary_dim == 8

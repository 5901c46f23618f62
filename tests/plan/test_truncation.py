"""Laws of plans of leading columns."""

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv import CompressionPlan, Quantization, RankRecipe, compress
from manifoldkv.core.errors import ArgumentError, PlanError
from manifoldkv.learn.solvers import Flag
from manifoldkv.recipes.full_rank import full_rank_plan
from tests.families import tiny_model, tiny_tokens
from tests.plans import random_plan

KINDS = {
    "plain": {"key_rank": 8, "value_rank": 3},
    "oblique": {"oblique": True, "key_grouping": "all", "sinks": 2},
    "windows": {"value_grouping": "shared"},
}


@cache
def plan_of(kind: str) -> CompressionPlan:
    return random_plan(tiny_model("gemma2" if kind == "windows" else "llama"), **KINDS[kind])


@given(kind=st.sampled_from(sorted(KINDS)), share=st.floats(0, 1))
def test_a_ratio_is_never_exceeded_and_used_up(kind: str, share: float) -> None:
    plan = plan_of(kind)
    least = 0.3
    ratio = min(plan.ratio, least + share * (plan.ratio - least))
    smaller = plan.truncated(ratio)
    assert smaller.ratio <= ratio
    assert smaller.provenance.requested_ratio == ratio
    heads = sum(1 for layer in plan.layers for _ in layer.sites)
    step = heads / (2 * plan.layers[0].key.head_dim * len(plan.layers))
    assert ratio - smaller.ratio < step + 1e-9
    for layer, whole in zip(smaller.layers, plan.layers, strict=True):
        for site, planned in layer.sites:
            basis, columns = whole.of(site).basis, planned.basis.down.shape[-1]
            assert planned.rank >= 1
            assert planned.basis.orthonormal == basis.orthonormal
            assert torch.equal(planned.basis.down, basis.down[..., :columns])
            assert torch.equal(planned.basis.up, basis.up[..., :columns])


def test_the_plans_own_ratio_keeps_all_of_it() -> None:
    plan = plan_of("plain")
    assert plan.truncated(plan.ratio) == plan


def test_uncompressed_sites_are_kept() -> None:
    plan = full_rank_plan(tiny_model("llama"))
    assert plan.truncated(1.0) == plan
    with pytest.raises(ArgumentError, match="ratio must be >= 1 and <= 1"):
        plan.truncated(0.9)


@pytest.mark.parametrize("ratio", [0.0, -1.0, 0.01, 0.99])
def test_an_impossible_ratio_is_refused(ratio: float) -> None:
    with pytest.raises(ArgumentError, match=r"ratio must be >= 0\.\d+ and <= 0\.\d+, that of"):
        plan_of("plain").truncated(ratio)


def test_rounded_latents_are_refused() -> None:
    plan = random_plan(tiny_model("llama"), quantization=Quantization(3, "token", group_size=2))
    with pytest.raises(PlanError, match="only plans of bases alone"):
        plan.truncated(0.2)


def test_nested_bases_are_truncated_at_every_site_and_resumed(tmp_path) -> None:
    recipe = RankRecipe("layer-output", Flag(steps=4), ranks="sequential")

    def plan() -> CompressionPlan:
        return compress(
            tiny_model("llama"), tiny_tokens(), recipe=recipe, ratio=0.6, folder=tmp_path
        )

    first = plan()
    assert first.truncated(0.25).ratio <= 0.25
    stored = sorted(tmp_path.glob("*layer-0-key*"))
    assert len(stored) > 1
    stored[0].unlink()
    assert plan() == first

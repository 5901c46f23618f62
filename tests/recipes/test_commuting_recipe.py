"""Commuting bases in closed form, tuned, and the recipe that makes them."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manifoldkv import RECIPES, BitRecipe, Quantization, compress, compressed, tune
from manifoldkv.activations.capture import capture
from manifoldkv.basis import Basis, HeadGrouping
from manifoldkv.commuting import hermitian_parts
from manifoldkv.errors import ArgumentError, ModelError
from manifoldkv.objectives import KQSVD, LayerOutput
from manifoldkv.objectives.linear_algebra import weighted_directions
from manifoldkv.recipes.commuting import CommutingRecipe, _latents
from manifoldkv.recipes.commuting_bases import closed_form
from manifoldkv.recipes.config import CompressionConfig
from tests.families import tiny_model, tiny_tokens
from tests.recipes.test_tuning import lost

HALF, HEADS = 4, 3
ALL = HeadGrouping("all", HEADS)


def forms(seed: int, layers: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Random second moments and weights of keys of 3 heads of 8, float64."""
    generator = torch.Generator().manual_seed(seed)
    size = (layers, 2, 1, 2 * HALF * HEADS, 2 * HALF * HEADS)
    halves = torch.randn(size, generator=generator, dtype=torch.float64)
    return [(gram, weight) for gram, weight in halves @ halves.mT]


def error(gram: Tensor, weight: Tensor, basis: Basis) -> float:
    """What the errors of a commuting basis cost, all phases alike: of both forms' averages."""
    averaged = [_average(x) for x in (gram, weight)]
    residual = torch.eye(gram.shape[-1], dtype=gram.dtype) - basis.projector().to(gram)
    return float(((averaged[0] @ residual) * (residual @ averaged[1])).sum())


def _average(form: Tensor) -> Tensor:
    """A quadratic form of keys, averaged over 64 turns of all features by one angle."""
    turns = []
    for step in range(64):
        angle = torch.tensor(2 * torch.pi * step / 64, dtype=form.dtype)
        cos, sin = angle.cos() * torch.eye(HALF), angle.sin() * torch.eye(HALF)
        turn = torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)]).to(form)
        turn = torch.block_diag(*[turn] * HEADS)
        turns.append(turn @ form @ turn.mT)
    mean = torch.stack(turns).mean(0)
    # Frequencies turn by angles of their own: what is between two of them averages out too.
    same = torch.arange(2 * HALF * HEADS) % HALF
    return mean * (same.unsqueeze(1) == same)


@given(seed=st.integers(0, 100), pairs=st.integers(1, HALF * HEADS))
def test_nothing_commuting_with_these_ranks_is_better(seed: int, pairs: int) -> None:
    """Its error is the sum of all eigenvalues that are left out: Eckart–Young per frequency."""
    found = closed_form(forms(seed), pairs, ALL)
    assert {basis.frequencies for basis in found} == {found[0].frequencies}
    for (gram, weight), basis in zip(forms(seed), found, strict=True):
        gains = weighted_directions(*(hermitian_parts(x, HEADS) for x in (gram, weight)))[0][0]
        left = sum(float(gains[j, basis.frequencies.count(j) :].sum()) for j in range(HALF))
        # A complex direction is two real ones of half its energy each, in both forms.
        assert error(gram, weight, basis) == pytest.approx(left / 2, rel=1e-4, abs=1e-4)


def test_no_other_ranks_are_better() -> None:
    layers = forms(3)
    pairs = 5
    total = sum(
        error(*form, basis)
        for form, basis in zip(layers, closed_form(layers, pairs, ALL), strict=True)
    )
    gains = torch.stack(
        [weighted_directions(*(hermitian_parts(x, HEADS) for x in form))[0][0] for form in layers]
    ).sum(0)
    left = [
        sum(float(gains[j, r:].sum()) for j, r in enumerate(ranks)) / 2
        for ranks in product(range(HEADS + 1), repeat=HALF)
        if sum(ranks) == pairs
    ]
    assert len(left) > 10
    assert total == pytest.approx(min(left), rel=1e-5)


@pytest.mark.parametrize("objective", ["fisher", "kq-svd"])
@pytest.mark.parametrize("grouping", ["all", 1, 2])
def test_a_plan_of_it(objective: str, grouping: str | int, tmp_path: Path) -> None:
    model, tokens = tiny_model("llama", num_key_value_heads=4), tiny_tokens(3, 20)
    recipe = CommutingRecipe(objective, grouping)
    plan = compress(model, tokens, recipe=recipe, ratio=0.5, folder=tmp_path)
    assert plan.ratio == plan.ratio_at(1000) == 0.5
    assert plan.rotary == "post"
    assert plan.provenance.recipe == recipe.describe()
    keys = [layer.key for layer in plan.layers]
    assert {key.basis.frequencies for key in keys} == {keys[0].basis.frequencies}
    assert all(key.basis.commuting for key in keys)
    assert {b.grouping.name for layer in plan.layers for _, b in layer.sites} == {grouping}
    with compressed(model, plan):
        after = model(input_ids=tokens).logits
    with compressed(model, replace(plan, rotary="pre")):
        before = model(input_ids=tokens).logits
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert compress(model, tokens, recipe=recipe, ratio=0.5, folder=tmp_path, rotary="pre") == plan


@pytest.mark.parametrize(("objective", "family"), [("fisher", "qwen3"), ("layer-output", "llama")])
def test_at_full_ratio_nothing_is_lost(objective: str, family: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens(3, 20)
    plan = compress(model, tokens, recipe=CommutingRecipe(objective), ratio=1.0)
    assert plan.ratio == 1
    with compressed(model, plan):
        logits = model(input_ids=tokens).logits
    tolerance = 1e-3 if objective == "fisher" else 1e-4
    expected = model(input_ids=tokens).logits
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)


@given(ratio=st.floats(0.01, 1), heads=st.sampled_from([1, 2, 3, 4]))
def test_the_ratio_is_kept_and_hardly_missed(ratio: float, heads: int) -> None:
    grouping = HeadGrouping("all", heads)
    step = {1: 2, 2: 2, 3: 6, 4: 4}[heads]
    if ratio * 8 * heads < step * (1 - 1e-6):
        with pytest.raises(ArgumentError, match="ratio must be >= "):
            _latents(ratio, 8, grouping)
        return
    latents = _latents(ratio, 8, grouping)
    assert latents <= ratio * 8 * heads + 1e-6 < latents + step + 1e-6
    assert latents % 2 == latents % heads == 0


def test_queries_weigh_their_own_frequencies() -> None:
    """The objective kq-svd has the query weights on the diagonal: E|q|² of the heads that read."""
    activations = next(iter(capture(tiny_model("llama"), tiny_tokens(3, 20), [1])))
    problem = KQSVD().problem(activations, "key", HeadGrouping("all", 2))
    _, weight = KQSVD().matrices(problem, None)
    made = activations.projections("pre")
    q = torch.complex(*made.queries.chunk(2, dim=-1))  # (S, H_q, n, d/2)
    by_head = q.abs().square().sum(dim=(0, 2)).view(2, 2, 4).sum(1)  # (H_kv, d/2)
    found = hermitian_parts(weight, 2)[0]
    torch.testing.assert_close(found.diagonal(dim1=-2, dim2=-1).real, by_head.mT)
    assert not found[:, 0, 1].any()


@pytest.mark.parametrize(("family", "heads"), [("llama", 4), ("qwen3", 2)])
def test_tuned_it_commutes_still(family: str, heads: int) -> None:
    model, tokens = tiny_model(family, num_key_value_heads=heads), tiny_tokens(4, 20)
    start = compress(model, tokens, recipe="commuting", ratio=0.5)
    tuned = tune(model, start, tokens, steps=20)  # a plan checks that keys commute
    assert lost(model, tuned, tokens) < 0.9 * lost(model, start, tokens)
    for before, after in zip(start.layers, tuned.layers, strict=True):
        assert after.key.basis.frequencies == before.key.basis.frequencies
        assert after.key.basis.down.dtype == before.key.basis.down.dtype
        assert not torch.equal(after.key.basis.down, before.key.basis.down)


def test_frequencies_that_are_whole_or_gone_do_not_move() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(3, 20)
    start = compress(model, tokens, recipe=CommutingRecipe(grouping=1), ratio=0.5)
    tuned = tune(model, start, tokens, steps=3)
    for before, after in zip(start.layers, tuned.layers, strict=True):
        assert after.key == before.key
        assert after.value != before.value


def test_it_composes_with_rounding() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(3, 20)
    plan = compress(model, tokens, recipe="commuting", quantization=Quantization(8))
    assert plan.formats.startswith("8-bit integers")
    with compressed(model, plan):
        assert model(input_ids=tokens).logits.isfinite().all()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ArgumentError, match="known: fisher, kq-svd, layer-output"):
        CommutingRecipe("layer")
    with pytest.raises(ArgumentError, match="must be all or a number of heads, got shared"):
        CommutingRecipe(grouping="shared")
    with pytest.raises(ArgumentError, match="same ranks in all layers"):
        CompressionConfig(recipe="commuting", ranks="uniform")


@pytest.mark.parametrize("family", ["glm4", "cohere", "ernie4_5", "phi3-partial"])
def test_other_rotations_are_refused_by_name(family: str) -> None:
    with pytest.raises(ModelError, match=r"ForCausalLM has no commuting bases: .* 4 \+ j"):
        compress(tiny_model(family), tiny_tokens(), recipe="commuting")


def test_a_recipe_describes_itself() -> None:
    assert isinstance(RECIPES["commuting"], CommutingRecipe)
    assert not isinstance(RECIPES["commuting"], BitRecipe)
    assert CommutingRecipe("kq-svd", "2").describe()["key_grouping"] == 2


def test_layer_output_is_reached_from_query_weights() -> None:
    """Same ranks and frequencies; less error of each layer; all else is the same."""
    model, tokens = tiny_model("qwen3"), tiny_tokens(4, 24)
    start, refined = [
        compress(model, tokens, recipe=CommutingRecipe(objective), ratio=0.5)
        for objective in ("kq-svd", "layer-output")
    ]
    assert refined.provenance.recipe["solver"] == {"name": "riemannian-adam"}
    for activations in capture(model, tokens):
        before, after = start.layers[activations.layer], refined.layers[activations.layer]
        assert after.key.basis.frequencies == before.key.basis.frequencies
        assert (after.key.rank, after.value.rank) == (before.key.rank, before.value.rank)
        for site, rotary in (("key", "post"), ("value", "pre")):
            problem = LayerOutput().problem(activations, site, before.key.grouping, rotary)
            losses = [
                problem.loss(getattr(plan, site).basis.like(activations.cos))
                for plan in (before, after)
            ]
            assert losses[1] < losses[0]

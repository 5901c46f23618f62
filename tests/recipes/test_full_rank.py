"""The plan that cuts nothing, exact and rounded as inference engines round their caches."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from manifoldkv import CompressionPlan, Quantization, compressed, quantize
from manifoldkv.cli.describing import describe
from manifoldkv.core.basis import HeadGrouping, identity_basis
from manifoldkv.core.errors import PlanError
from manifoldkv.evaluate.reports.plan import write_report
from manifoldkv.models.support import sliding_windows
from manifoldkv.plan.site import SitePlan
from manifoldkv.recipes.full_rank import full_rank_plan
from manifoldkv.testing.quantizers import read
from tests.families import KINDS, tiny_model, tiny_tokens
from tests.serve.cache.test_compressed import LONG, ROTARIES, assert_equal, steps
from tests.serve.cache.test_quantizers import rounded_by_numpy


def rounded_plan(
    model: PreTrainedModel, bits: int, rotation: str = "hadamard", group_size: int = 64
) -> CompressionPlan:
    rounding = Quantization(bits, "token", group_size=group_size)
    return quantize(full_rank_plan(model), model, tiny_tokens(1, 4), rounding, rotation)


@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("family", KINDS)
def test_a_model_on_its_cache_is_the_model(family: str, rotary: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens(2, LONG)
    plan = full_rank_plan(model, rotary)
    expected = model(input_ids=tokens).logits
    assert_equal(steps(model, plan, tokens, [LONG]), expected)
    assert_equal(steps(model, plan, tokens, [6, 1, 4, 1, 2]), expected)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("rotary", ROTARIES)
class TestPlan:
    def test_nothing_is_cut(self, family: str, rotary: str) -> None:
        model = tiny_model(family)
        plan = full_rank_plan(model, rotary)
        assert plan.rotary == rotary
        for layer, window in zip(plan.layers, sliding_windows(model.config), strict=True):
            assert layer.window == window
            assert layer.key == layer.value == SitePlan(identity_basis(HeadGrouping(1, 2), 8))
        assert [plan.ratio_at(tokens) for tokens in (1, 7, 1000)] == [1, 1, 1]
        assert plan.ratio == plan.provenance.requested_ratio == 1
        assert plan.rank_only

    def test_it_takes_the_bytes_of_the_stock_cache(self, family: str, rotary: str) -> None:
        model, tokens = tiny_model(family), tiny_tokens(2, LONG)
        plan = full_rank_plan(model, rotary)
        stock = model(input_ids=tokens).past_key_values
        with compressed(model, plan):
            cache = model(input_ids=tokens).past_key_values
        expected = sum(x.nbytes for layer in stock.layers for x in (layer.keys, layer.values))
        assert cache.nbytes() == plan.nbytes(LONG, batch=2, dtype=torch.float64) == expected


def test_a_rounded_plan_is_saved_and_described(tmp_path: Path) -> None:
    model, tokens = tiny_model("gemma2"), tiny_tokens(2, LONG)
    plan = rounded_plan(model, 4)
    plan = replace(plan, rotary="post", provenance=replace(plan.provenance, model="a/b"))
    plan.save(tmp_path)
    loaded = CompressionPlan.load(tmp_path)
    assert (loaded, loaded.provenance) == (plan, plan.provenance)
    assert_equal(steps(model, loaded, tokens, [LONG]), steps(model, plan, tokens, [LONG]))
    said = "\n".join(describe(loaded).lines)
    write_report(tmp_path / "report.html", model, plan, tokens)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for text in (repr(plan), said, plan.card("a/b"), page):
        assert "full-rank, on no text" in text
        assert "0 × 0 tokens" not in text


def test_an_unknown_rotary_space_is_refused_before_anything_runs() -> None:
    model = tiny_model("llama")
    model.register_forward_pre_hook(lambda *given: pytest.fail("the model runs"))
    with pytest.raises(PlanError, match="unknown rotary space 'sideways'; known: pre, post"):
        full_rank_plan(model, "sideways")


def test_a_model_of_very_many_positions_has_a_plan_that_loads(tmp_path: Path) -> None:
    model = tiny_model("llama", max_position_embeddings=1 << 22)
    plan = full_rank_plan(model)
    plan.save(tmp_path)
    assert CompressionPlan.load(tmp_path) == plan


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
class TestRounded:
    @pytest.mark.parametrize("group_size", [3, 8])
    def test_the_first_layer_holds_what_numpy_rounds(self, bits: int, group_size: int) -> None:
        """Later layers see what the first one made of rounded keys and values."""
        model, tokens = tiny_model("llama", dtype=torch.float32), tiny_tokens(2, LONG)
        stock = model(input_ids=tokens).past_key_values.layers[0]
        with compressed(model, rounded_plan(model, bits, "none", group_size)):
            layer = model(input_ids=tokens).past_key_values.layers[0]
        stores = (layer.key_store, stock.keys), (layer.value_store, stock.values)
        for store, exact in stores:
            expected, bound = rounded_by_numpy(exact.numpy(), bits, group_size)
            found = read(store).numpy()
            assert np.array_equal(found, expected)
            assert bool((np.abs(found - exact.numpy()) <= bound).all())

    @pytest.mark.parametrize("head_dim", [8, 12, 64])
    def test_bytes_by_hand(self, bits: int, head_dim: int) -> None:
        model = tiny_model("llama", dtype=torch.bfloat16, head_dim=head_dim)
        plan, tokens = rounded_plan(model, bits), tiny_tokens(2, LONG)
        codes = {12: {8: 12, 4: 6, 3: 6, 2: 3}}.get(head_dim, {bits: head_dim * bits // 8})[bits]
        by_hand = 3 * 2 * 2 * (codes + 4)  # layers, sites, heads; a range of two float16
        assert plan.bytes_per_token() == by_hand
        with compressed(model, plan):
            cache = model(input_ids=tokens).past_key_values
        assert cache.nbytes() == plan.nbytes(LONG, batch=2) == 2 * LONG * by_hand

    @pytest.mark.parametrize("head_dim", [8, 12, 64])
    def test_a_rotation_of_every_head_stays_whole(self, bits: int, head_dim: int) -> None:
        model = tiny_model("llama", head_dim=head_dim)
        plan, tokens = rounded_plan(model, bits), tiny_tokens(2, LONG)
        for layer in plan.layers:
            for _, planned in layer.sites:
                basis = planned.basis
                assert basis.rank == head_dim
                assert basis.down.shape == (2, head_dim, head_dim)
                assert torch.allclose(basis.projector(), torch.eye(head_dim), atol=1e-5)
                entries = basis.down.abs()
                even = torch.allclose(entries, torch.tensor(head_dim**-0.5))
                assert even == (head_dim != 12)  # where it is random
        exact = model(input_ids=tokens).logits
        error = float((steps(model, plan, tokens, [LONG]) - exact).norm() / exact.norm())
        assert 0 < error < {8: 0.02, 4: 0.4, 3: 0.8, 2: 1.5}[bits]

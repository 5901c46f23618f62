"""Rank and bits from one budget, on tiny models: budgets, laws, and what they promise."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import inf
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv import (
    BitRecipe,
    CompressionPlan,
    compress,
    compressed,
    load_model,
    open_text,
    sample_tokens,
)
from manifoldkv.coding.regression import RIDGE
from manifoldkv.core.basis import Basis, HeadGrouping
from manifoldkv.core.errors import ArgumentError
from manifoldkv.evaluate import Comparison, perplexity
from manifoldkv.learn.objectives import OBJECTIVES
from manifoldkv.models.decoder import Decoder
from manifoldkv.recipes.bits import BANDS, least_compute
from manifoldkv.recipes.coded import CodedRecipe
from manifoldkv.recipes.stored import StoredRecipe
from manifoldkv.statistics.capture import capture
from manifoldkv.statistics.collect import collect
from manifoldkv.statistics.statistics import TensorStatistics
from tests.families import tiny_model, tiny_tokens
from tests.plans import bits_plan

MODEL = "studies/reference_models/reference-qwen3"


def stock_bytes(model: PreTrainedModel, tokens: int, windows: list[int | None]) -> int:
    config = model.config
    cached = sum(tokens if w is None else min(tokens, w - 1) for w in windows)
    return 4 * config.num_key_value_heads * config.head_dim * cached


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cache_is_as_large_as_its_plan_says_and_no_larger_than_asked(family: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens(3, 14)
    plan = bits_plan(model, tokens, ratio=0.4, sinks=1)
    windows = [layer.window for layer in plan.layers]
    assert plan.nbytes(14) <= 0.4 * stock_bytes(model, 14, windows)
    assert plan.ratio == pytest.approx(plan.nbytes(14) / stock_bytes(model, 14, windows))
    with compressed(model, plan) as new_cache:
        cache = new_cache()
        model(input_ids=tokens[:2], past_key_values=cache)
        assert cache.nbytes() == plan.nbytes(14, batch=2, dtype=model.dtype)


@given(
    ratio=st.floats(0.2, 1),
    sinks=st.integers(0, 3),
    trellis=st.booleans(),
    compute=st.one_of(st.just(inf), st.floats(0, 4)),
    depth=st.sampled_from([None, 0, 2]),
    context=st.sampled_from([24, 200]),
)
@settings(max_examples=15)
def test_the_budget_is_never_exceeded(
    ratio: float,
    sinks: int,
    trellis: bool,
    compute: float,
    depth: int | None,
    context: int,
) -> None:
    """That of bytes, and that of multiplications, which is drawn above the least one."""
    model, tokens = tiny_model("llama"), tiny_tokens(8, 24)
    recipe = BitRecipe(sinks, inf, depth=depth, trellis=trellis)
    recipe = replace(recipe, compute=least_compute(Decoder.of(model).description()) + compute)
    options = {"recipe": recipe, "ratio": ratio, "context": context}
    layers = [None] * model.config.num_hidden_layers
    full = stock_bytes(model, context, layers)
    exact = stock_bytes(model, sinks, layers) + context * 2 * len(layers)  # and scales
    if ratio * full < exact:
        with pytest.raises(ArgumentError, match="too small"):
            compress(model, tokens, **options)
        return
    plan = compress(model, tokens, **options)
    assert plan.nbytes(context) <= ratio * full + 1e-6
    assert plan.compute <= recipe.compute * (1 + 1e-12)
    predictors = [s.predictor for layer in plan.layers for _, s in layer.sites]
    assert all(one is None or one.expansion is None or one.rank < 16 for one in predictors)


ONE_TOKEN = torch.ones(8, 32, dtype=torch.int64)
"""One token repeated."""


@pytest.mark.parametrize(
    ("layers", "heads", "ratio", "recipe", "tokens"),
    [
        (2, 4, 1 / 8, BitRecipe(compute=3.0, bands=(None,)), tiny_tokens(8, 32)),
        (3, 2, 1 / 4, BitRecipe(bands=(None,)), tiny_tokens(8, 32)),
        (2, 4, 1 / 2, BitRecipe(compute=8.0), tiny_tokens(8, 32)),
        (2, 4, 1 / 4, BitRecipe(bands=(None,), trellis=False), ONE_TOKEN),
        (2, 4, 1 / 4, StoredRecipe(), tiny_tokens(8, 32)),
        (2, 4, 1 / 32, StoredRecipe(sinks=0), tiny_tokens(8, 32)),
    ],
)
def test_predictions_are_from_what_is_stored(
    layers: int, heads: int, ratio: float, recipe: CodedRecipe, tokens: Tensor
) -> None:
    """A site without bits predicts nothing: errors of rounding would be multiplied."""
    shape = {"num_hidden_layers": layers, "num_key_value_heads": heads, "head_dim": 16}
    model = tiny_model("llama", torch.float32, **shape)
    plan = compress(model, tokens, recipe=recipe, ratio=ratio, context=512)
    for index, layer in enumerate(plan.layers):
        for _, site in layer.sites:
            inputs = () if site.predictor is None else site.predictor.inputs
            assert not any(plan.layers[index - b].of(s).quantizer.is_empty for b, s in inputs)
            assert site.predictor is None or site.predictor.weights.abs().max() < 100
    if isinstance(recipe, BitRecipe):
        assert plan.compute <= recipe.compute
        in_float32 = divergence(model, tokens, plan)
        in_bfloat16 = divergence(model.to(torch.bfloat16), tokens, plan)
        assert in_bfloat16 == pytest.approx(in_float32, rel=0.1, abs=1e-3)


class Measured(NamedTuple):
    predicted: float
    lost: float
    diverged: float


def divergence(model: PreTrainedModel, tokens: torch.Tensor, plan: CompressionPlan) -> float:
    """Mean Kullback-Leibler divergence of the predictions on the compressed cache, nats."""
    stock = model(input_ids=tokens, use_cache=False).logits.double().log_softmax(dim=-1)
    with compressed(model, plan):
        found = model(input_ids=tokens, use_cache=False).logits.double().log_softmax(dim=-1)
    return float((stock.exp() * (stock - found)).sum(dim=-1).mean())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Measured]:
    """Plans of one Fisher information, which a folder keeps; losses on text no plan has seen."""
    model, tokenizer = load_model(MODEL)
    text, folder = open_text("docstrings"), tmp_path_factory.mktemp("bits")
    calibration, held_out = (
        sample_tokens(text, tokenizer, sequences=count, length=128, split=split)
        for split, count in (("calibration", 16), ("held-out", 8))
    )
    stock = perplexity(model, held_out)

    @cache
    def measure(
        sequences: int, ratio: float, depth: int | None = None, work: float = inf
    ) -> Measured:
        tokens = calibration[:sequences]
        bands = (None,) if depth is None else BANDS
        recipe = BitRecipe(compute=work, bands=bands, depth=depth)
        plan = compress(model, tokens, ratio=ratio, recipe=recipe, folder=folder)
        assert plan.ratio <= ratio
        assert plan.compute <= work
        assert depth is not None or plan.predictor_depth is None
        lost = Comparison(stock, perplexity(model, held_out, plan)).added_nll
        return Measured(plan.provenance.predicted_nats, lost, divergence(model, tokens, plan))

    return measure


def test_more_bytes_lose_less_and_theory_says_how_much(measured) -> None:
    """The theory is of the text it was made on: few tokens make it too small elsewhere."""
    found = [measured(8, ratio) for ratio in (1 / 2, 1 / 4, 1 / 8)]
    predicted, lost = [each.predicted for each in found], [each.lost for each in found]
    assert abs(lost[0]) < 0.01
    assert lost[0] < lost[1] + 0.005 < lost[2]
    assert predicted == sorted(predicted)
    for each in found[1:]:
        assert 0.9 < each.diverged / each.predicted < 1.7


def test_predictions_and_work_save_half_of_the_loss(measured) -> None:
    """At equal bytes; what is lost on other text, of 1,024 tokens, is noisier than divergences."""
    dense = measured(8, 1 / 8)
    within_four, free = (measured(8, 1 / 8, depth=2, work=work) for work in (4.0, inf))
    for other in (dense, within_four):
        assert 0 < free.lost < 0.8 * other.lost
        assert free.diverged < other.diverged / 2
        assert free.predicted < 0.6 * other.predicted


def test_plans_without_predictions_keep_to_their_work(measured) -> None:
    """Predictions from reconstructions turn out to be worth less than they cost."""
    assert measured(8, 1 / 8, depth=2, work=1.2).predicted > 0


@pytest.mark.parametrize("name", ["k-svd", "eigen-attention", "kq-svd"])
def test_no_coordinates_are_better_than_those_of_fisher(name: str) -> None:
    """By Hadamard's inequality: the product of what an error costs and of what latents vary."""
    model, tokens = tiny_model("llama"), tiny_tokens(4, 40)
    moments = collect(model, tokens).layers
    plan = compress(model, tokens, recipe=BitRecipe(0, inf, (None,), None), ratio=1.0)
    loss = perplexity(model, tokens, plan).nll - perplexity(model, tokens).nll
    assert abs(loss) < 0.01  # nearly nothing is lost with eight bits
    found, others = [], []
    for activations, of_layer in zip(capture(model, tokens), moments, strict=True):
        layer = plan.layers[activations.layer]
        heads = HeadGrouping("all", activations.kv_heads)
        for site, planned in layer.sites:
            problem = OBJECTIVES.get(name)().problem(activations, site, heads, "pre")
            other = problem.closed_form(activations.head_dim)
            found.append(log_costs(planned.basis, of_layer.of(site)))
            others.append(log_costs(other, of_layer.of(site)))
    assert (torch.stack(found) <= torch.stack(others) + 1e-3).all()
    assert (torch.stack(found) < torch.stack(others) - 0.1).any()


def log_costs(basis: Basis, moments: TensorStatistics) -> Tensor:
    """The sum over all latents of the logarithm of their variance times their Fisher cost."""
    down, up = basis.down[0].double(), basis.up[0].double()
    variance = (down.mT @ moments.covariance @ down).diagonal()
    ridge = RIDGE * moments.fisher.diagonal().mean() * torch.eye(len(moments.fisher))
    return (variance * (up.mT @ (moments.fisher + ridge) @ up).diagonal()).log().sum()


def test_what_cannot_be_done() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(2, 12)
    for ratio in (0, 1.5, float("nan")):
        with pytest.raises(ArgumentError, match="is not in"):
            bits_plan(model, tokens, ratio=ratio)
    with pytest.raises(
        ArgumentError, match="too small: 4 uncompressed tokens and the scales of tokens take"
    ):
        bits_plan(model, tokens, ratio=0.1)

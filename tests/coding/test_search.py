"""Joint moments, and the candidates that are made of them."""

from math import inf

import torch

from manifoldkv.coding.regression import Regression, reduced_rank
from manifoldkv.coding.search import (
    GROUP_LENGTHS,
    ONE_GROUP,
    SearchSpace,
    _Joint,
    candidates,
    exact_tensors,
)
from manifoldkv.core.basis import SITES
from manifoldkv.plan.formats.trellis import GAUSSIAN_DISTORTION
from manifoldkv.plan.predictor import PredictorContext
from manifoldkv.statistics.collect import collect
from tests.families import tiny_model, tiny_tokens

TOKENS, FITTED, FEATURES = 400, 600, 6


def test_residuals_are_those_of_a_regression() -> None:
    """Of full and of low rank, with the factor for text that nothing was fitted to."""
    torch.manual_seed(0)
    lower = [torch.randn(TOKENS, FEATURES) for _ in range(2)]
    key = lower[0] @ torch.randn(FEATURES, FEATURES) + torch.randn(TOKENS, FEATURES)
    value = key @ torch.randn(FEATURES, FEATURES) + torch.randn(TOKENS, FEATURES)
    context = PredictorContext(1, (None, None))
    for index, pair in enumerate((lower, (key, value))):
        context.begin(index)
        for x in pair:
            context.add(x)
    joint = _Joint.of([key, value], context, below=1, fitted=FITTED)
    fisher = torch.diag(torch.linspace(1, 3, FEATURES, dtype=torch.float64))
    inputs = ((0, "key"), (1, "key"), (1, "value"))
    found = joint.residuals("value", inputs, fisher, [None, 2])
    joined = torch.cat([key, *lower], dim=1)
    fit = Regression.of(value, joined, 1)
    _, weights = fit.on_all()
    for second, rank in zip(found, (None, 2), strict=True):
        whole = weights
        if rank is not None:
            first, last = reduced_rank(weights, fit.gram, fisher, rank)
            whole = first @ last
        centred = (value - value.mean(dim=0)).double()
        residual = centred - (joined - joined.mean(dim=0)).double() @ whole
        count = len(whole) if rank is None else len(whole) * rank // FEATURES
        factor = (1 + count / FITTED) / (1 - count / TOKENS)
        expected = residual.mT @ residual / TOKENS * factor
        torch.testing.assert_close(second, expected, rtol=1e-4, atol=1e-4)
    assert found[0].trace() < found[1].trace() < joint.exact["value"].trace()
    assert joint.residuals("value", (), fisher, [None])[0] is joint.exact["value"]


def test_few_tokens_predict_nothing() -> None:
    context = PredictorContext(0, (None,))
    context.begin(0)
    pair = [torch.randn(2 * FEATURES - 1, FEATURES) for _ in range(2)]
    for x in pair:
        context.add(x)
    joint = _Joint.of(pair, context, below=0, fitted=2 * FEATURES - 1)
    fisher = torch.eye(FEATURES, dtype=torch.float64)
    assert joint.residuals("value", ((0, "key"),), fisher, [None]) == []


def test_one_group_of_all_layers_loses_no_more_than_shorter_ones() -> None:
    """Without a limit of compute it has every candidate of theirs."""
    statistics = collect(tiny_model("llama"), tiny_tokens(12, 32))
    metrics = [layer.of(site).fisher for layer in statistics.layers for site in SITES]
    found = candidates(
        statistics,
        metrics,
        [exact_tensors(statistics, index) for index in range(3)],
        SearchSpace((None,), 5, (*GROUP_LENGTHS, *ONE_GROUP)),
        GAUSSIAN_DISTORTION,
        32,
    )
    bits = 8 * 0.3 * 3 * 2 * 16 * 2 * 32
    _, *groups, one_group = (each.best(bits, inf).nats for each in found)
    assert len(groups) == len(GROUP_LENGTHS)
    assert one_group <= min(groups) * 1.001
    assert one_group < groups[0]  # of two layers

"""Joint moments, and the choices that are made of them."""

import torch

from manifoldkv.coding.predictor import PredictorContext
from manifoldkv.coding.regression import Regression, reduced_rank
from manifoldkv.recipes.designs import _Joint

TOKENS, FEATURES = 400, 6


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
    joint = _Joint.of([key, value], context, below=1)
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
        factor = (TOKENS + count) / (TOKENS - count)
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
    joint = _Joint.of(pair, context, below=0)
    fisher = torch.eye(FEATURES, dtype=torch.float64)
    assert joint.residuals("value", ((0, "key"),), fisher, [None]) == []

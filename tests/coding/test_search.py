"""Joint moments, and the candidates that are made of them."""

from functools import cache
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv.coding.candidates import Candidate, Candidates, StepCompute
from manifoldkv.coding.regression import Regression, reduced_rank
from manifoldkv.coding.search import (
    GROUP_LENGTHS,
    ONE_GROUP,
    SearchSpace,
    _Joint,
    candidates,
    exact_tensors,
)
from manifoldkv.core.basis import SITES, Basis, HeadGrouping
from manifoldkv.plan.compute import multiplications
from manifoldkv.plan.formats.mixed import MixedWidths
from manifoldkv.plan.formats.trellis import GAUSSIAN_DISTORTION
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.predictor import LinearPredictor, PredictorContext
from manifoldkv.plan.site import SitePlan
from manifoldkv.statistics.collect import collect
from tests.families import tiny_model, tiny_tokens
from tests.plans import shape_of

TOKENS, FITTED, FEATURES = 400, 600, 6
CONTEXT = 32


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


@cache
def all_candidates() -> list[Candidates]:
    """Without groups, with `GROUP_LENGTHS` and with one group; keys in one block."""
    statistics = collect(tiny_model("llama"), tiny_tokens(12, 32))
    metrics = [layer.of(site).fisher for layer in statistics.layers for site in SITES]
    exact = [exact_tensors(statistics, index) for index in range(3)]
    space = SearchSpace((None,), 5, (*GROUP_LENGTHS, *ONE_GROUP))
    return candidates(statistics, metrics, exact, space, GAUSSIAN_DISTORTION, CONTEXT)


def site_plan(one: Candidate, stored: int) -> SitePlan:
    """A plan of any numbers, of the structure of a candidate."""
    features = len(one.variances)
    bits = (torch.arange(features) < stored).to(torch.uint8)
    ones = torch.ones(features)
    basis = Basis(*[torch.ones(1, features, features)] * 2, HeadGrouping("all", 2))
    predictor, inputs, rank = None, one.config.inputs, one.config.rank
    if inputs:
        weights = torch.ones(len(inputs) * features, rank or features)
        expansion = None if rank is None else torch.ones(rank, features)
        predictor = LinearPredictor(inputs, weights, expansion)
    return SitePlan(basis, MixedWidths(bits, ones, ones, ones), torch.zeros(features), predictor)


@given(data=st.data(), groups=st.sampled_from(range(2 + len(GROUP_LENGTHS))))
def test_the_compute_of_candidates_is_that_of_their_plan(data: st.DataObject, groups: int) -> None:
    """Inputs of inputs are multiplied too."""
    found = all_candidates()[groups]
    chosen = [data.draw(st.sampled_from(of_tensor)) for of_tensor in found.tensors]
    stored = [data.draw(st.integers(1, len(one.variances))) for one in chosen]
    planned = [site_plan(*pair) for pair in zip(chosen, stored, strict=True)]
    layers = [LayerPlan(*pair) for pair in zip(planned[::2], planned[1::2], strict=True)]
    shape = shape_of(tiny_model("llama"))
    expected = sum(multiplications(layers, index, shape, "pre") for index in range(len(layers)))
    step = StepCompute(chosen, found.cached, inf)
    kept = [torch.arange(len(one.variances)) < n for one, n in zip(chosen, stored, strict=True)]
    rows = [one.rows for one in chosen]
    assert step.total(kept, rows) == expected * CONTEXT
    for tensor, of_tensor in enumerate(rows):
        fewer = [x if index != tensor else x & (x.cumsum(0) > 1) for index, x in enumerate(kept)]
        saved = step.total(kept, rows) - step.total(fewer, rows)
        assert saved == pytest.approx(CONTEXT * (float(of_tensor[0]) + step.uses[tensor]))


def test_one_group_of_all_layers_loses_no_more_than_shorter_ones() -> None:
    """Without a limit of compute it has every candidate of theirs."""
    bits = 8 * 0.3 * 3 * 2 * 16 * 2 * CONTEXT
    _, *groups, one_group = (each.best(bits, inf).nats for each in all_candidates())
    assert len(groups) == len(GROUP_LENGTHS)
    assert one_group <= min(groups) * 1.001
    assert one_group < groups[0]  # of two layers

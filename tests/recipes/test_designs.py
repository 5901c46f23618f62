"""Joint moments, and the choices that are made of them."""

from functools import cache
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv.activations.capture import capture
from manifoldkv.activations.fisher import fisher_moments
from manifoldkv.basis import Basis, HeadGrouping
from manifoldkv.coding.mixed import MixedWidths
from manifoldkv.coding.predictor import LinearPredictor, PredictorContext
from manifoldkv.coding.regression import Regression, reduced_rank
from manifoldkv.coding.transform import by_token
from manifoldkv.coding.trellis import GAUSSIAN_DISTORTION
from manifoldkv.models.decoder import Decoder
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.site import SitePlan
from manifoldkv.plan.work import multiplications
from manifoldkv.recipes.bits import BitRecipe
from manifoldkv.recipes.coded_run import CodedRun
from manifoldkv.recipes.compress import started
from manifoldkv.recipes.config import CompressionConfig
from manifoldkv.recipes.designs import CHAINS, ONE_CHAIN, MenuBuilder, Space, _Joint
from manifoldkv.recipes.menu import Choice, Menu, StepWork
from tests.families import tiny_model, tiny_tokens
from tests.plans import shape_of

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


@cache
def run_and_menus() -> tuple[CodedRun, list[Menu]]:
    """Without chains, with `CHAINS` and with one chain; keys in one block."""
    model, tokens = tiny_model("llama"), tiny_tokens(12, 32)
    decoder, recipe = Decoder.of(model), BitRecipe(sinks=1, work=inf)
    run = recipe.coded_run(
        decoder, started(decoder, tokens, CompressionConfig(recipe=recipe, ratio=0.3))
    )
    builder = MenuBuilder(
        decoder,
        run,
        fisher_moments(model, tokens),
        Space((None,), recipe.depth, (*CHAINS, *ONE_CHAIN)),
    )
    for activations in capture(model, tokens):
        pair = [by_token(x) for x in (activations.keys_in("pre"), activations.values_of())]
        builder.add(activations.layer, pair, pair)
    return run, builder.menus(GAUSSIAN_DISTORTION)


def site_plan(choice: Choice, stored: int) -> SitePlan:
    """A site of any numbers, of the structure of a choice."""
    features = len(choice.variances)
    bits = (torch.arange(features) < stored).to(torch.uint8)
    ones = torch.ones(features)
    basis = Basis(*[torch.ones(1, features, features)] * 2, HeadGrouping("all", 2))
    predictor, inputs, rank = None, choice.design.inputs, choice.design.rank
    if inputs:
        weights = torch.ones(len(inputs) * features, rank or features)
        expansion = None if rank is None else torch.ones(rank, features)
        predictor = LinearPredictor(inputs, weights, expansion)
    return SitePlan(basis, MixedWidths(bits, ones, ones, ones), torch.zeros(features), predictor)


@given(data=st.data(), menu=st.sampled_from(range(2 + len(CHAINS))))
def test_the_work_of_choices_is_that_of_their_plan(data: st.DataObject, menu: int) -> None:
    """Whatever predicts what: inputs of inputs are multiplied too."""
    run, menus = run_and_menus()
    sites = menus[menu].sites
    chosen = [data.draw(st.sampled_from(choices)) for choices in sites]
    stored = [data.draw(st.integers(1, len(one.variances))) for one in chosen]
    planned = [site_plan(*pair) for pair in zip(chosen, stored, strict=True)]
    layers = [LayerPlan(*pair) for pair in zip(planned[::2], planned[1::2], strict=True)]
    shape = shape_of(tiny_model("llama"))
    expected = sum(multiplications(layers, index, shape, "pre") for index in range(len(layers)))
    step = StepWork(chosen, menus[menu].cached, inf)
    kept = [torch.arange(len(one.variances)) < n for one, n in zip(chosen, stored, strict=True)]
    assert step.total(kept, [one.rows for one in chosen]) == expected * run.context
    # As many latents at all sites: the uses of a latent are what one more of it costs.
    for site, rows in enumerate(one.rows for one in chosen):
        fewer = [x if index != site else x & (x.cumsum(0) > 1) for index, x in enumerate(kept)]
        saved = step.total(kept, [one.rows for one in chosen]) - step.total(
            fewer, [one.rows for one in chosen]
        )
        assert saved == pytest.approx(run.context * (float(rows[0]) + step.uses[site]))


def test_one_chain_of_all_layers_loses_no_more_than_shorter_ones() -> None:
    """Without a limit of work it has every choice of theirs."""
    run, menus = run_and_menus()
    _, *chains, one_chain = (menu.best(8 * run.budget, inf).nats for menu in menus)
    assert len(chains) == len(CHAINS)
    assert one_chain <= min(chains) * 1.001
    assert one_chain < chains[0]  # of two layers

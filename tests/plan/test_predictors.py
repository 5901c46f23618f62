"""Predictors of a plan: what is counted, and what is refused."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from manifoldkv import CompressionPlan, compress
from manifoldkv.core.basis import Basis, HeadGrouping
from manifoldkv.core.errors import PlanError
from manifoldkv.plan.composition import Composer, sources
from manifoldkv.plan.formats.quantizers import Unquantized
from manifoldkv.plan.layer import LayerPlan
from manifoldkv.plan.predictor import LinearPredictor
from manifoldkv.plan.site import SitePlan
from tests.families import tiny_model, tiny_tokens
from tests.plans import designed_plan
from tests.stored import stored_plan


@cache
def predicted_plan(kind: str, family: str = "llama") -> CompressionPlan:
    return designed_plan(tiny_model(family), kind)


def test_another_weight_or_input_is_another_plan() -> None:
    plan = predicted_plan("keys below")
    layer = plan.layers[2]
    predictor = layer.value.predictor
    for changed in (
        replace(predictor, weights=predictor.weights + 1),
        replace(predictor, inputs=((0, "key"), (1, "key"), (2, "value"))),
    ):
        layers = (*plan.layers[:2], replace(layer, value=replace(layer.value, predictor=changed)))
        assert replace(plan, layers=layers) != plan


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        # Values of three layers, from the keys of one, two and three.
        ("keys below", 16 * 16 * (1 + 2 + 3)),
        # The same from one, three and five sites in factors, and keys from two and four.
        ("low-rank chain", 4 * 16 * (1 + 3 + 5 + 2 + 4) + 4 * 16 * 5),
    ],
)
def test_predictions_are_counted_with_the_bases(kind: str, numbers: int) -> None:
    plan = predicted_plan(kind)
    alone = tuple(
        LayerPlan(replace(layer.key, predictor=None), replace(layer.value, predictor=None))
        for layer in plan.layers
    )
    without = replace(plan, layers=alone)
    assert plan.basis_nbytes() == without.basis_nbytes() + 2 * numbers
    assert plan.nbytes(50) == without.nbytes(50)


def test_inputs_are_layers_that_hold_the_same_tokens() -> None:
    """Of gemma3's layers some have windows: they hold other tokens."""
    for family, depths in (("llama", [0, 1, 2]), ("gemma3", [0, 0, 0])):
        plan = predicted_plan("chain", family)
        assert [layer.value.predictor.depth for layer in plan.layers] == depths


def test_inputs_that_cannot_be_are_refused() -> None:
    plan = predicted_plan("chain")
    weights = torch.ones(16, 16)

    def predicted(site: str, index: int, below: int, of_input: str) -> None:
        layer = plan.layers[index]
        changed = replace(
            dict(layer.sites)[site], predictor=LinearPredictor(((below, of_input),), weights)
        )
        layers = list(plan.layers)
        layers[index] = replace(layer, **{site: changed})
        replace(plan, layers=tuple(layers))

    predicted("value", 2, 2, "value")
    for site, index, below, of_input, bound in (
        ("key", 1, 0, "key", "1 layers below"),
        ("key", 1, 0, "value", "1 layers below"),
        ("key", 1, 2, "key", "1 layers below"),
        ("value", 0, 0, "value", "0 layers below, or the keys of the layer"),
        ("value", 2, 3, "key", "2 layers below, or the keys of the layer"),
    ):
        said = f"layer {index} {site}: predicted from the {of_input}s {below} layers below, must "
        with pytest.raises(PlanError, match=f"{said}be from at most {bound}"):
            predicted(site, index, below, of_input)
    for inputs in (((-1, "key"),), ((True, "key"),), ((1, "query"),), ((2**80, "key"),)):
        with pytest.raises(PlanError, match="predictor has the impossible input"):
            LinearPredictor(inputs, weights)
    for inputs in ((), ((1, "key"), (1, "key"))):
        with pytest.raises(PlanError, match="predictor must have different inputs"):
            LinearPredictor(inputs, weights)


def test_predictors_that_do_not_fit_are_refused() -> None:
    plan = predicted_plan("low-rank chain")
    key, inputs = plan.layers[1].key, ((1, "key"), (1, "value"))

    def changed(**parts: object) -> None:
        layer = replace(plan.layers[1], key=replace(key, **parts))
        replace(plan, layers=(plan.layers[0], layer, *plan.layers[2:]))

    with pytest.raises(PlanError, match="means and predictors need keys stored before rotation"):
        replace(plan, rotary="post")
    narrower = LinearPredictor(inputs, torch.ones(30, 15))
    with pytest.raises(PlanError, match="layer 1 key: the predictor has 15 outputs, must be 16"):
        changed(predictor=narrower)
    with pytest.raises(PlanError, match="a plan with predictors needs coded latents at all sites"):
        changed(quantizer=Unquantized(), predictor=None)
    for weights in (torch.ones(4), torch.ones(0, 4), torch.full((8, 4), torch.nan)):
        with pytest.raises(PlanError, match="predictor must be"):
            LinearPredictor(inputs, weights)
    with pytest.raises(PlanError, match="of 4 features from 2 sites must have 8 rows, got 4"):
        LinearPredictor(inputs, torch.ones(4, 4))
    with pytest.raises(PlanError, match="predictor has rank 3, its expansion 2 rows"):
        LinearPredictor(inputs, torch.ones(8, 3), torch.ones(2, 4))
    with pytest.raises(PlanError, match="rotation"):
        compress(tiny_model("llama"), tiny_tokens(3, 24), recipe="best", rotary="post")


@pytest.mark.parametrize("stored", [False, True])
def test_quantizers_and_means_that_do_not_fit_a_basis_are_refused(stored: bool) -> None:
    plan = stored_plan() if stored else predicted_plan("dense")
    layer = plan.layers[0]
    key = replace(layer.key, predictor=None)

    def changed(**parts: object) -> None:
        changed_layer = replace(layer, key=replace(key, **parts))
        replace(plan, layers=(changed_layer, *plan.layers[1:]))

    quantizer = key.quantizer
    fewer = {
        name: tensor if name == "tables" else tensor[:-1]
        for name, tensor in quantizer.tensors().items()
    }
    if stored:
        fewer["tables"] = torch.cat(quantizer.split_tables()[:-1])
    latents = len(quantizer.gain)
    with pytest.raises(PlanError, match=f"key: a quantizer of {latents - 1} latents does not fit"):
        changed(quantizer=replace(quantizer, **fewer))
    with pytest.raises(PlanError, match=r"layer 0 key: mean must be \(16,\) in float32"):
        changed(mean=key.mean[:-1])
    columns = torch.eye(8).repeat(2, 1, 1)
    with pytest.raises(PlanError, match="need a basis of all heads together"):
        changed(basis=Basis(columns, columns, HeadGrouping(1, 2)))
    if stored:
        mixed = replace(plan.layers[1], key=SitePlan(plan.layers[1].key.basis))
        with pytest.raises(PlanError, match="of all sites must be entropy-coded, or those of no"):
            replace(plan, layers=(plan.layers[0], mixed, *plan.layers[2:]))


def test_many_paths_between_sites_are_composed_once() -> None:
    """The number of paths doubles with every layer, from a plan of a stranger too."""
    first, *_, last = predicted_plan("chain").layers
    depth = last.key.predictor.depth
    layers = [*[first] * depth, *[last] * 30]
    top = len(layers) - 1
    assert {below for below, _ in sources(layers, top, "value")} == set(range(top + 1))
    assert Composer(layers).linear_map(top, "value").mean.isfinite().all()

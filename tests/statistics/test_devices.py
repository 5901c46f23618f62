"""Activations that lie in memory while the layer is elsewhere.

No GPU is needed: on the meta device nothing is computed, and every result says where it would be.
"""

import copy
from dataclasses import replace

import pytest
import torch

from manifoldkv.core import basis as basis_module
from manifoldkv.core.basis import Basis, HeadGrouping, Rotary, Site, identity_basis
from manifoldkv.learn.objectives import OBJECTIVES
from manifoldkv.statistics.capture import capture
from manifoldkv.statistics.layer import Batch, LayerActivations
from manifoldkv.statistics.outputs import compressed_output
from tests.families import tiny_model, tiny_tokens

LARGE = ("inputs", "outputs")


@pytest.fixture(scope="module")
def activations() -> LayerActivations:
    found = next(capture(tiny_model("llama").float(), tiny_tokens(4, 12)))
    module = copy.deepcopy(found.module).to("meta")
    small = {name: getattr(found, name).to("meta") for name in ("cos", "sin", "mask")}
    return replace(found, call=replace(found.call, module=module), **small)


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bases without numbers cannot be found to be orthonormal."""
    monkeypatch.setattr(basis_module, "orthonormality_error", lambda basis: 0.0)


def test_large_tensors_lie_in_memory(activations: LayerActivations) -> None:
    assert activations.device.type == "meta"
    assert {getattr(activations, name).device.type for name in LARGE} == {"cpu"}
    assert activations.keys_in("post").device.type == "meta"
    made = activations.projections("post", Batch(torch.tensor([1]), torch.arange(3)))
    assert {x.device.type for x in made} == {"meta"}


@pytest.mark.parametrize("grouping", ["shared", 1, "all"])
@pytest.mark.parametrize("rotary", ["pre", "post"])
@pytest.mark.parametrize("site", ["key", "value"])
@pytest.mark.parametrize("name", OBJECTIVES.names())
def test_problems_are_solved_where_the_layer_is(
    activations: LayerActivations, name: str, site: Site, rotary: Rotary, grouping: str | int
) -> None:
    objective = OBJECTIVES.get(name)()
    heads = HeadGrouping(grouping, activations.kv_heads)
    metric = None
    if objective.needs_statistics:
        if (site, rotary) == ("key", "post"):
            return  # refused
        metric = torch.eye(activations.kv_heads * activations.head_dim, dtype=torch.float64)
    problem = objective.problem(activations, site, heads, rotary, metric)
    assert problem.initial(4).down.is_meta
    assert problem.statistics().is_meta
    if objective.has_closed_form(site, grouping)[0]:
        assert problem.closed_form(4).down.is_meta
    columns = problem.initial(4).down.clone().requires_grad_()
    basis = Basis(columns, columns, heads)
    for batch in (None, Batch(torch.tensor([0, 2])), Batch(torch.tensor([3]), torch.arange(3))):
        loss = problem.loss(basis, batch)
        loss.backward()
        assert loss.is_meta
        assert columns.grad is not None


@pytest.mark.parametrize("rotary", ["pre", "post"])
def test_layers_are_run_where_they_are(activations: LayerActivations, rotary: Rotary) -> None:
    basis = identity_basis(HeadGrouping("shared", activations.kv_heads), activations.head_dim)
    basis = basis.like(activations.cos)
    assert compressed_output(activations, basis, basis, rotary=rotary).is_meta

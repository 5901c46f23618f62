"""The decoder layer as a function of its bases."""

import math

import pytest
import torch

from manifoldkv.core.basis import Basis, HeadGrouping
from manifoldkv.statistics.layer import Batch, select_rows
from manifoldkv.statistics.outputs import (
    attention_output,
    every_sequence,
    layer_output,
    mixed_values,
    project_mixed_values,
    select_head_rows,
)
from manifoldkv.testing import random_basis
from tests.families import FAMILIES, activations_of

GROUPINGS = ["shared", 1, "all"]
NORM_TOLERANCE = 1e-6


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("rotary", ["pre", "post"])
def test_full_rank_reproduces_the_layer(family, grouping, rotary):
    a = activations_of(family)
    key = random_basis(8, HeadGrouping(grouping, 2), 0)
    value = random_basis(8, HeadGrouping(grouping, 2), 1)
    attention = attention_output(a, key, value, rotary=rotary)
    torch.testing.assert_close(attention, attention_output(a), rtol=0, atol=1e-12)
    output = layer_output(a, attention)
    scale = a.outputs.abs().max()
    assert (output - a.outputs).abs().max() < NORM_TOLERANCE * scale


@pytest.mark.parametrize("family", FAMILIES)
def test_some_rows_are_those_rows_of_the_whole(family):
    a = activations_of(family)
    key = random_basis(3, HeadGrouping("shared", 2), 0)
    value = random_basis(5, HeadGrouping(1, 2), 1)
    batch = Batch(torch.tensor([3, 1]), torch.tensor([0, 4, 5, 11]))
    attention = attention_output(a, key, value)
    some_attention = attention_output(a, key, value, batch=batch)
    expected = select_head_rows(attention, batch)
    torch.testing.assert_close(some_attention, expected, rtol=0, atol=1e-12)
    output = select_rows(layer_output(a, attention), batch)
    some_output = layer_output(a, some_attention, batch)
    assert (some_output - output).abs().max() < NORM_TOLERANCE * output.abs().max()


def naive_attention(a, key, value, rotary):
    """One head, one row, one sum at a time, with the projectors written out."""
    keys = a.keys if rotary == "pre" else a.rotate(a.keys)
    keys = naive_project(keys, key)
    keys = a.rotate(keys) if rotary == "pre" else keys
    values, queries = naive_project(a.values, value), a.projections("post").queries
    output = torch.zeros_like(queries)
    for s in range(a.sequences):
        for head in range(a.query_heads):
            kv_head = head // (a.query_heads // a.kv_heads)
            for row in range(a.length):
                seen = a.mask[0, 0, row]
                scores = keys[s, kv_head, seen] @ queries[s, head, row] * a.settings.scaling
                if a.settings.softcap is not None:
                    scores = a.settings.softcap * torch.tanh(scores / a.settings.softcap)
                total = scores.exp().sum()
                if a.settings.sinks is not None:
                    total = total + a.settings.sinks[head].exp()
                output[s, head, row] = scores.exp() / total @ values[s, kv_head, seen]
    return output


def naive_project(x, basis):
    if basis.grouping.name == "all":
        beside = torch.cat(list(x.unbind(1)), dim=-1)  # (S, n, H·d)
        projected = beside @ basis.down[0] @ basis.up[0].T
        return torch.stack(projected.split(x.shape[-1], dim=-1), dim=1)
    groups = [0] * x.shape[1] if basis.grouping.name == "shared" else range(x.shape[1])
    heads = [x[:, h] @ basis.down[g] @ basis.up[g].T for h, g in enumerate(groups)]
    return torch.stack(heads, dim=1)


@pytest.mark.parametrize("family", ["llama-yarn", "qwen3", "mistral", "gemma2", "phi3", "gpt-oss"])
@pytest.mark.parametrize("rotary", ["pre", "post"])
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_low_rank_agrees_with_naive_loops(family, rotary, grouping):
    a = activations_of(family, layer=0, sequences=1, length=8)
    key = random_basis(3, HeadGrouping(grouping, 2), 0)
    value = random_basis(5, HeadGrouping(grouping, 2), 1)
    found = attention_output(a, key, value, rotary=rotary)
    torch.testing.assert_close(found, naive_attention(a, key, value, rotary))
    assert (found - attention_output(a)).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("grouping", [*GROUPINGS, "oblique"])
def test_mixed_values_give_what_projected_values_give(family, grouping):
    a = activations_of(family)
    oblique = grouping == "oblique"
    basis = random_basis(5, HeadGrouping(1 if oblique else grouping, 2), 1)
    if oblique:
        basis = Basis(basis.down, random_basis(5, basis.grouping, 2).down, basis.grouping)
    batch = every_sequence(a)
    mixed = mixed_values(a, basis.grouping, batch)
    assert mixed.shape == (4, 4, 12, 8 * basis.grouping.width)
    expected = attention_output(a, value_basis=basis)
    torch.testing.assert_close(project_mixed_values(mixed, basis), expected)


@pytest.mark.parametrize("rotary", ["pre", "post"])
def test_attention_is_differentiable_in_the_bases(rotary):
    a = activations_of("llama", sequences=1, length=5)
    key = random_basis(3, HeadGrouping("shared", 2), 0).down.clone().requires_grad_()
    value = random_basis(3, HeadGrouping(1, 2), 1).down.clone().requires_grad_()

    def attention(p, v):
        key_basis = Basis(p, p, HeadGrouping("shared", 2))
        value_basis = Basis(v, v, HeadGrouping(1, 2))
        return attention_output(a, key_basis, value_basis, rotary=rotary)

    assert torch.autograd.gradcheck(attention, (key, value))


def test_gradient_does_not_reach_the_weights():
    a = activations_of("llama")
    for parameter in a.module.parameters():
        parameter.requires_grad_(True)
    columns = random_basis(3, HeadGrouping("shared", 2), 0).down.clone().requires_grad_()
    basis = Basis(columns, columns, HeadGrouping("shared", 2))
    loss = layer_output(a, attention_output(a, basis)).square().sum()
    loss.backward(inputs=[columns])
    assert math.isfinite(columns.grad.abs().sum())
    assert all(parameter.grad is None for parameter in a.module.parameters())

"""Laws of bases that commute with the rotation of keys."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from manifoldkv import CompressionPlan, compressed
from manifoldkv.basis import Basis, HeadGrouping, orthonormality_error
from manifoldkv.commuting import commuting_basis, complex_columns, hermitian_parts
from manifoldkv.errors import PlanError
from manifoldkv.plan.site import SitePlan
from tests.families import tiny_model, tiny_tokens
from tests.plans import any_basis, any_commuting_basis, random_plan

HEAD_DIM, FREQUENCIES = 8, (0, 0, 1, 3)


def angles(tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of stock RoPE at some positions, (1, tokens, head_dim), float64."""
    powers = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    turned = 37.0 * torch.arange(tokens, dtype=torch.float64).unsqueeze(1) / 10000**powers
    both = torch.cat([turned, turned], dim=-1).unsqueeze(0)
    return both.cos(), both.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Keys (B, H, n, d) as a Llama rotates them."""
    return apply_rotary_pos_emb(x, x[:, :0], cos, sin)[0]


def random_keys(heads: int, tokens: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, heads, tokens, HEAD_DIM, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("oblique", [False, True])
@pytest.mark.parametrize(("name", "heads"), [("all", 2), (2, 4), ("all", 3), (1, 2)])
def test_rotation_and_projection_may_be_swapped(name: str | int, heads: int, oblique: bool) -> None:
    grouping = HeadGrouping(name, heads)
    frequencies = {1: (0, 1, 3), 2: FREQUENCIES, 3: (0, 0, 0, 1, 1, 3)}[grouping.width]
    basis = any_commuting_basis(HEAD_DIM, frequencies, grouping, oblique=oblique, seed=1)
    assert orthonormality_error(basis) < 1e-12
    keys, (cos, sin) = random_keys(heads), angles(7, HEAD_DIM)
    before = rotate(basis.project(keys), cos, sin)
    after = basis.project(rotate(keys, cos, sin))
    torch.testing.assert_close(before, after, rtol=0, atol=1e-12)
    assert (after - rotate(keys, cos, sin)).abs().max() > 0.1
    # Latents themselves turn like a head that has these frequencies.
    latents = grouping.split(keys) @ basis.down
    at = [*frequencies, *frequencies]
    turned = rotate(latents, cos[..., at], sin[..., at])
    stored = grouping.split(rotate(keys, cos, sin)) @ basis.down
    torch.testing.assert_close(turned, stored, rtol=0, atol=1e-12)


def test_a_free_basis_does_not_commute() -> None:
    grouping = HeadGrouping("all", 2)
    basis = any_basis(HEAD_DIM, 4, grouping, oblique=False, seed=1)
    keys, (cos, sin) = random_keys(2), angles(7, HEAD_DIM)
    difference = rotate(basis.project(keys), cos, sin) - basis.project(rotate(keys, cos, sin))
    assert difference.abs().max() > 0.1


def test_scores_of_latents_are_those_of_complex_numbers() -> None:
    """Re Σ_j conj(q_{h,j}) A_j[h, :] B_jᴴ z_j, written out with complex numbers."""
    basis = any_commuting_basis(HEAD_DIM, FREQUENCIES, HeadGrouping("all", 2), oblique=True, seed=2)
    down, up = complex_columns(basis)
    keys = random_keys(2)[0, :, 0]  # (2, d)
    query = random_keys(2)[1, 1, 3]
    z, q = torch.complex(*keys.split(4, dim=-1)), torch.complex(*query.split(4, dim=-1))
    score = sum(
        (q[j].conj() * up[0, 1, i] * (down[0, :, i].conj() @ z[:, j])).real
        for i, j in enumerate(FREQUENCIES)
    )
    projected = basis.project(keys.view(1, 2, 1, HEAD_DIM))[0, 1, 0]
    torch.testing.assert_close(query @ projected, score, rtol=1e-12, atol=1e-12)


@given(seed=st.integers(0, 1000), width=st.sampled_from([1, 2, 3]))
def test_hermitian_parts_are_what_rotation_cannot_change(seed: int, width: int) -> None:
    x = torch.randn(50, width, HEAD_DIM, generator=torch.Generator().manual_seed(seed)).double()
    z = torch.complex(*x.split(HEAD_DIM // 2, dim=-1))  # (n, w, d/2)
    flat = x.flatten(1)
    found = hermitian_parts((flat.mT @ flat).unsqueeze(0), width)
    torch.testing.assert_close(found[0], torch.einsum("nwj,nvj->jwv", z, z.conj()))
    cos, sin = angles(50, HEAD_DIM)
    turned = rotate(x.transpose(0, 1).unsqueeze(0), cos, sin)[0].transpose(0, 1).flatten(1)
    torch.testing.assert_close(hermitian_parts((turned.mT @ turned).unsqueeze(0), width), found)


@pytest.mark.parametrize("family", ["llama", "llama-yarn", "qwen2", "qwen3", "mistral", "gemma3"])
def test_a_cache_before_rotation_and_after_it_are_the_same(family: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens()
    plan = commuting_plan(random_plan(model, value_rank=4))
    with compressed(model, plan):
        before = model(input_ids=tokens).logits
    with compressed(model, replace(plan, rotary="post")):
        after = model(input_ids=tokens).logits
    torch.testing.assert_close(before, after, rtol=1e-10, atol=1e-10)
    with compressed(model, random_plan(model, key_rank=4)):
        free = model(input_ids=tokens).logits
    with compressed(model, random_plan(model, key_rank=4, rotary="post")):
        assert not torch.allclose(model(input_ids=tokens).logits, free, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_plan_keeps_it(dtype: torch.dtype, tmp_path: Path) -> None:
    plan = commuting_plan(random_plan(tiny_model("llama"), rotary="post"), dtype)
    plan.save(tmp_path)
    found = CompressionPlan.load(tmp_path)
    assert found == plan
    assert [layer.key.basis.frequencies for layer in found.layers] == [FREQUENCIES] * 3
    assert all(layer.value.basis.frequencies is None for layer in found.layers)
    assert "oblique, commuting" in repr(found.layers[0].key.basis)
    free = replace(plan.layers[0].key.basis, frequencies=None)
    assert free != plan.layers[0].key.basis


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: replace(b, frequencies=(0, 1, 1, 3)), "does not"),
        (lambda b: replace(b, frequencies=(1, 0, 0, 3)), "cannot have frequencies"),
        (lambda b: replace(b, frequencies=(0, 0, 1, 4)), "cannot have frequencies"),
        (lambda b: replace(b, frequencies=(0, 0, 1, 3.0)), "cannot have frequencies"),
        (lambda b: replace(b, frequencies=(0, 0, 1)), "3 frequencies of 8 latents"),
        (lambda b: replace(b, down=1.00001 * b.down), None),
        (lambda b: replace(b, down=b.down + 1e-6 * torch.rand_like(b.down)), "does not"),
        (lambda b: replace(b, up=b.up + 1e-6 * torch.rand_like(b.up)), "does not"),
    ],
)
def test_a_plan_refuses_what_does_not_commute(change, message: str | None) -> None:
    plan = commuting_plan(random_plan(tiny_model("llama")))
    first = plan.layers[0]
    changed = replace(first, key=SitePlan(change(first.key.basis)))
    layers = (changed, *plan.layers[1:])
    if message is None:  # scaled, it still does
        replace(plan, layers=layers)
        return
    with pytest.raises(PlanError, match=f"layer 0 key: .*{message}"):
        replace(plan, layers=layers)


def test_heads_that_share_a_small_basis_have_no_commuting_one() -> None:
    grouping = HeadGrouping("shared", 2)
    columns = commuting_basis(*[torch.ones(1, 1, 1, dtype=torch.complex64)] * 2, (0,), grouping, 8)
    model = tiny_model("llama")
    plan = random_plan(model, key_rank=2)
    layers = tuple(replace(layer, key=SitePlan(columns)) for layer in plan.layers)
    with pytest.raises(PlanError, match="cannot have frequencies"):
        replace(plan, layers=layers)


def commuting_plan(plan: CompressionPlan, dtype: torch.dtype = torch.float64) -> CompressionPlan:
    """The plan with random commuting bases of keys over both heads."""

    def basis(seed: int) -> Basis:
        grouping = HeadGrouping("all", 2)
        made = any_commuting_basis(HEAD_DIM, FREQUENCIES, grouping, oblique=True, seed=seed)
        return made.like(torch.empty(0, dtype=dtype))

    layers = (replace(layer, key=SitePlan(basis(seed))) for seed, layer in enumerate(plan.layers))
    return replace(plan, layers=tuple(layers))

"""Closed forms against NumPy's SVD, which shares no code with ours."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv.core.basis import Basis, HeadGrouping, Site
from manifoldkv.core.errors import ArgumentError
from manifoldkv.learn.objectives import OBJECTIVES
from manifoldkv.learn.objectives.eigen_attention import EigenAttention
from manifoldkv.learn.objectives.k_svd import KSVD
from manifoldkv.learn.objectives.kq_svd import KQSVD
from manifoldkv.learn.objectives.linear_algebra import weighted_closed_form
from manifoldkv.plan.site import check_basis
from manifoldkv.statistics.placement import Placement
from manifoldkv.testing import HEAD_DIM, KV_HEADS, tiny_activations

RANK = 3


def tokens_by_head(x: torch.Tensor) -> np.ndarray:
    """(S, H, n, d) to (H, S·n, d)."""
    return x.transpose(0, 1).flatten(1, 2).numpy()


def leading_projector(stacked: np.ndarray, rank: int) -> np.ndarray:
    right = np.linalg.svd(stacked, full_matrices=False)[2][:rank]
    return right.T @ right


def assert_projectors(basis, expected: list[np.ndarray]) -> None:
    for group, projector in zip(basis.projector().numpy(), expected, strict=True):
        np.testing.assert_allclose(group, projector, atol=1e-7)


@pytest.mark.parametrize("rotary", ["pre", "post"])
@pytest.mark.parametrize("site", ["key", "value"])
@pytest.mark.parametrize("objective", [KSVD(), EigenAttention()])
@pytest.mark.parametrize("name", ["shared", 1, "all"])
def test_a_closed_form_is_the_svd_of_the_stacked_heads(name, objective, site, rotary):
    """Of a shared basis one below the other, of a basis of all heads side by side."""
    activations = tiny_activations()
    problem = objective.problem(activations, site, HeadGrouping(name, KV_HEADS), rotary)
    data = activations.keys_in(rotary) if site == "key" else activations.values
    stacks = [[x] for x in tokens_by_head(data)]
    if site == "key" and isinstance(objective, EigenAttention):
        queries = tokens_by_head(activations.projections(rotary).queries)
        stacks = [[x, *queries[2 * i : 2 * i + 2]] for i, (x,) in enumerate(stacks)]
    by_head = [np.concatenate(stack) for stack in stacks]
    matrices = {"shared": [np.concatenate(by_head)], 1: by_head, "all": [np.hstack(by_head)]}[name]
    rank = RANK * problem.grouping.width
    assert_projectors(problem.closed_form(RANK), [leading_projector(x, rank) for x in matrices])


def test_shared_k_svd_of_keys_is_the_released_eigen_attention_of_llama():
    """The released code decomposes one matrix per layer: the output of k_proj, heads stacked."""
    activations = tiny_activations()
    attention = activations.module.self_attn
    normed = activations.module.input_layernorm(activations.inputs)
    projected = attention.k_proj(normed).unflatten(-1, (-1, HEAD_DIM))  # (S, n, H_kv, d)
    stacked = projected.flatten(0, 2).numpy()
    problem = KSVD().problem(activations, "key", HeadGrouping("shared", KV_HEADS))
    assert_projectors(problem.closed_form(RANK), [leading_projector(stacked, RANK)])


@pytest.mark.parametrize(("site", "rotary"), [("key", "pre"), ("key", "post"), ("value", "pre")])
def test_kq_svd_is_the_truncated_svd_of_scores_and_of_values_times_output_weight(site, rotary):
    activations = tiny_activations()
    problem = KQSVD().problem(activations, site, HeadGrouping(1, KV_HEADS), rotary)
    projectors = problem.closed_form(RANK).projector().numpy()
    if site == "key":
        data = tokens_by_head(activations.keys_in(rotary))
        queries = tokens_by_head(activations.projections(rotary).queries)
        readers = [np.concatenate(queries[i : i + 2]).T for i in (0, 2)]  # (d, 2·S·n)
    else:
        data = tokens_by_head(activations.values)
        weight = activations.module.self_attn.o_proj.weight.numpy().T.reshape(4, HEAD_DIM, -1)
        readers = [np.hstack(weight[i : i + 2]) for i in (0, 2)]  # (d, 2·hidden)
    for x, projector, reader in zip(data, projectors, readers, strict=True):
        u, s, v = np.linalg.svd(x @ reader, full_matrices=False)
        expected = (u[:, :RANK] * s[:RANK]) @ v[:RANK]
        np.testing.assert_allclose(x @ projector @ reader, expected, atol=1e-6 * s[0])


def test_oblique_closed_form_is_biorthogonal():
    problem = KQSVD().problem(tiny_activations(), "key", HeadGrouping("all", KV_HEADS))
    basis = problem.closed_form(RANK)
    assert not basis.orthonormal
    product = basis.up.mT @ basis.down
    torch.testing.assert_close(product[0], torch.eye(RANK * KV_HEADS, dtype=torch.float64))


def test_weighted_closed_form_survives_a_singular_weight():
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(1, 20, 6, generator=generator, dtype=torch.float64)
    gram = data.mT @ data
    weight = torch.diag_embed(torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0, 0.0]], dtype=torch.float64))
    down, up = weighted_closed_form(gram, weight, 4)
    residual = (torch.eye(6, dtype=torch.float64) - down @ up.mT) @ weight.sqrt()
    assert torch.isfinite(down).all()
    assert torch.linalg.vector_norm(data @ residual) < 1e-3 * torch.linalg.vector_norm(data)


@given(
    seed=st.integers(0, 999),
    keys=st.integers(1, 12),
    queries=st.integers(0, 12),
    decay=st.floats(0.0, 3.0),
)
def test_a_weighted_closed_form_of_few_tokens_is_a_basis_and_optimal(
    seed: int, keys: int, queries: int, decay: float
) -> None:
    """However few tokens there are, in float32, at every rank; without queries nothing counts."""
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** -(decay * torch.arange(8, dtype=torch.float64) / 2)
    x = torch.randn(2, keys, 8, generator=generator, dtype=torch.float64) * scales
    y = torch.randn(2, queries, 8, generator=generator, dtype=torch.float64) * scales
    gram, weight = x.mT @ x, y.mT @ y
    singular = torch.linalg.svdvals(x @ y.mT) if queries else torch.zeros(2, 8)
    for rank in range(1, 9):
        down, up = weighted_closed_form(gram, weight, rank)
        basis = Basis(down.float(), up.float(), HeadGrouping(1, 2))
        check_basis("the closed form", basis)
        lost = torch.linalg.vector_norm(x @ (torch.eye(8) - down @ up.mT) @ y.mT, dim=(1, 2))
        least = torch.linalg.vector_norm(singular[:, rank:], dim=1)
        assert (lost <= least + 1e-4 * singular[:, 0] + 1e-12).all()


def test_kq_svd_of_a_shared_basis_says_why_it_has_no_closed_form():
    problem = KQSVD().problem(tiny_activations(), "key", HeadGrouping("shared", KV_HEADS))
    with pytest.raises(ArgumentError, match="no closed form for a basis shared by all heads"):
        problem.closed_form(RANK)


@pytest.mark.parametrize("rank", [0, HEAD_DIM + 1])
def test_impossible_rank_is_refused(rank):
    problem = KSVD().problem(tiny_activations(), "key", HeadGrouping(1, KV_HEADS))
    with pytest.raises(
        ArgumentError, match=f"rank {rank} is not between 1 and head_dim {HEAD_DIM}"
    ):
        problem.closed_form(rank)


@pytest.mark.parametrize("name", ["k-svd", "eigen-attention", "kq-svd"])
@pytest.mark.parametrize("site", ["key", "value"])
def test_no_matrix_of_all_tokens_is_kept(
    name: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    activations = replace(tiny_activations())  # nothing kept

    def refuse(*ignored: object) -> None:
        raise AssertionError("room for all tokens was asked for")

    monkeypatch.setattr(Placement, "empty", refuse)
    problem = OBJECTIVES.get(name)().problem(activations, site, HeadGrouping(1, KV_HEADS))
    for found in (problem.closed_form(RANK), problem.initial(RANK)):
        assert problem.loss(found).isfinite()
    assert problem.statistics().isfinite().all()
    with pytest.raises(AssertionError, match="room"):
        activations.keys  # noqa: B018

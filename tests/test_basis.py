"""Laws of bases and head groupings."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv.core.basis import (
    Basis,
    HeadGrouping,
    fix_signs,
    orthonormal_basis,
    orthonormality_error,
    parse_grouping,
    principal_angles,
    projector_distance,
    rank_from_ratio,
)
from manifoldkv.core.errors import ArgumentError
from manifoldkv.testing import HEAD_DIM, random_basis

GROUPINGS = ["shared", 1, 2, "all"]


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("oblique", [False, True])
def test_like_changes_the_dtype_only(oblique: bool) -> None:
    down = random_tensor(1, 8, 4)
    up = random_tensor(1, 8, 4) if oblique else down
    basis = Basis(down, up, HeadGrouping("shared", 2))
    single = basis.like(torch.zeros(1))
    assert single.down.dtype == single.up.dtype == torch.float32
    assert single.orthonormal != oblique
    assert torch.equal(single.up, up.float())
    assert basis.like(down).down is down


@pytest.mark.parametrize("name", GROUPINGS)
def test_merge_undoes_split(name):
    grouping = HeadGrouping(name, 4)
    x = random_tensor(2, 4, 5, 3)
    runs = grouping.split(x)
    assert runs.shape == (2, 4 // grouping.width, 5, 3 * grouping.width)
    assert torch.equal(grouping.merge(runs), x)


def test_split_concatenates_neighbouring_heads():
    x = random_tensor(1, 4, 5, 3)
    runs = HeadGrouping(2, 4).split(x)
    assert torch.equal(runs[0, 1], torch.cat([x[0, 2], x[0, 3]], dim=-1))


@pytest.mark.parametrize("name", GROUPINGS)
def test_every_grouping_caches_the_same_numbers(name):
    basis = random_basis(3, HeadGrouping(name, 4), 0)
    latents = basis.grouping.split(random_tensor(1, 4, 5, HEAD_DIM)) @ basis.down
    assert latents.numel() == 4 * 5 * 3
    assert basis.rank == 3
    assert basis.head_dim == HEAD_DIM


@pytest.mark.parametrize("name", GROUPINGS)
def test_projection_is_idempotent(name):
    basis = random_basis(3, HeadGrouping(name, 4), 0)
    once = basis.project(random_tensor(2, 4, 5, HEAD_DIM))
    torch.testing.assert_close(basis.project(once), once)


@pytest.mark.parametrize("name", GROUPINGS)
def test_full_rank_projects_onto_everything(name):
    x = random_tensor(2, 4, 5, HEAD_DIM)
    torch.testing.assert_close(random_basis(HEAD_DIM, HeadGrouping(name, 4), 0).project(x), x)


def test_shared_basis_acts_on_every_head_alike():
    basis = random_basis(3, HeadGrouping("shared", 4), 0)
    x = random_tensor(2, 4, 5, HEAD_DIM)
    expected = x @ basis.down[0] @ basis.down[0].T
    torch.testing.assert_close(basis.project(x), expected)


def test_principal_angles_ignore_the_gauge():
    basis = random_basis(3, HeadGrouping(1, 2), 0)
    rotation = torch.linalg.qr(random_tensor(3, 3)).Q
    turned = Basis(basis.down @ rotation, basis.up @ rotation, basis.grouping)
    assert principal_angles(basis, turned).max() < 1e-6
    assert projector_distance(basis, turned) < 1e-12


def test_principal_angles_are_known_in_the_plane():
    grouping = HeadGrouping("shared", 1)
    angle = 0.3
    first = orthonormal_basis(torch.tensor([[[1.0], [0.0]]]), grouping)
    second = orthonormal_basis(torch.tensor([[[math.cos(angle)], [math.sin(angle)]]]), grouping)
    assert principal_angles(first, second).item() == pytest.approx(angle, abs=1e-6)


def test_signs_are_fixed_without_turning_the_span():
    columns = torch.linalg.qr(random_tensor(2, 6, 4)).Q
    fixed = fix_signs(columns)
    assert torch.equal(fixed, fix_signs(-columns))
    torch.testing.assert_close(fixed @ fixed.mT, columns @ columns.mT)


def test_columns_that_are_not_orthonormal_are_refused():
    with pytest.raises(ArgumentError, match="not orthonormal"):
        orthonormal_basis(2 * torch.eye(4).unsqueeze(0), HeadGrouping("shared", 1))
    with pytest.raises(ArgumentError, match="not orthonormal"):
        orthonormal_basis(torch.full((1, 4, 2), float("nan")), HeadGrouping("shared", 1))


def test_grouping_must_divide_the_heads():
    with pytest.raises(
        ArgumentError, match=r"grouping 3 does not divide the 8 KV heads.*1, 2, 4, 8"
    ):
        HeadGrouping(3, 8)


@pytest.mark.parametrize("value", ["some", "0", 0, -1, "1.5"])
def test_unknown_grouping_names_the_known_ones(value):
    with pytest.raises(ArgumentError, match="known: shared, all"):
        parse_grouping(value)


def test_ratios_of_the_paper_round_to_its_ranks():
    assert [rank_from_ratio(r, 128) for r in (0.5, 0.6, 0.7, 0.8, 0.9)] == [64, 77, 90, 102, 115]


@given(st.floats(-2, 2), st.integers(1, 256))
def test_rank_is_possible_or_refused(ratio, head_dim):
    if 1 <= round(ratio * head_dim) <= head_dim:
        assert abs(rank_from_ratio(ratio, head_dim) - ratio * head_dim) <= 0.5
    else:
        with pytest.raises(ArgumentError, match="possible ratios"):
            rank_from_ratio(ratio, head_dim)


def test_orthonormality_is_checked_in_float64() -> None:
    """Whatever precision torch multiplies float32 in."""
    columns = torch.linalg.qr(torch.randn(2, 48, 20, generator=torch.Generator().manual_seed(0))).Q
    basis = Basis(columns, columns, HeadGrouping(2, 4))
    exact = Basis(columns.double(), columns.double(), HeadGrouping(2, 4))
    assert orthonormality_error(basis) == orthonormality_error(exact)

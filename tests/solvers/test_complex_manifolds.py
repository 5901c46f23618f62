"""Laws of the complex Stiefel and Grassmann manifolds; pymanopt is the oracle."""

import geoopt
import numpy as np
import pymanopt
import pytest
import torch
from torch import Tensor

from manifoldkv.solvers.complex_stiefel import ComplexGrassmann, ComplexStiefel

MANIFOLDS = [ComplexStiefel(), ComplexGrassmann()]
SHAPE = (5, 4, 2)
NAMES = [manifold.name for manifold in MANIFOLDS]
on_both = pytest.mark.parametrize("manifold", MANIFOLDS, ids=NAMES)


def noise(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or SHAPE), generator=generator, dtype=torch.complex128)


def point_and_vectors(manifold: ComplexStiefel, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    x = manifold.projx(noise(seed))
    return x, manifold.proju(x, noise(seed + 1)), manifold.proju(x, noise(seed + 2))


def unitary(seed: int) -> Tensor:
    return torch.linalg.qr(noise(seed, *SHAPE[:1], 2, 2)).Q


@on_both
@pytest.mark.parametrize("seed", range(3))
class TestLaws:
    def test_points_and_vectors_are_known(self, manifold: ComplexStiefel, seed: int) -> None:
        x, u, _ = point_and_vectors(manifold, seed)
        assert manifold.check_point_on_manifold(x)
        assert manifold.check_vector_on_tangent(x, u)
        assert not manifold.check_point_on_manifold(1.1 * x)
        assert not manifold.check_vector_on_tangent(x, u + 0.1 * x)
        assert not manifold.check_point(x.mH)

    def test_projections_are_idempotent_and_orthogonal(
        self, manifold: ComplexStiefel, seed: int
    ) -> None:
        x, u, v = point_and_vectors(manifold, seed)
        torch.testing.assert_close(manifold.projx(x), x)
        torch.testing.assert_close(manifold.proju(x, u), u)
        away = noise(seed + 3)
        away = away - manifold.proju(x, away)
        size = torch.zeros(SHAPE[0], dtype=torch.float64)
        torch.testing.assert_close(manifold.inner(x, away, v), size)

    def test_vectors_are_as_many_as_there_are_dimensions(
        self, manifold: ComplexStiefel, seed: int
    ) -> None:
        x = manifold.projx(noise(seed, 4, 2))
        units = torch.eye(8, dtype=torch.complex128).view(8, 4, 2)
        images = manifold.proju(x, torch.cat([units, 1j * units])).flatten(1)
        rank = torch.linalg.matrix_rank(torch.cat([images.real, images.imag], dim=1))
        assert int(rank) == (2 * 4 * 2 - 2 * 2 if manifold.name == "ComplexStiefel" else 8)

    def test_a_retraction_begins_as_its_vector_says(
        self, manifold: ComplexStiefel, seed: int
    ) -> None:
        x, u, _ = point_and_vectors(manifold, seed)
        errors = [float((manifold.retr(x, t * u) - x - t * u).norm()) for t in (1e-3, 1e-4)]
        assert errors[1] < errors[0] / 90  # of second order
        assert manifold.check_point_on_manifold(manifold.retr(x, 3 * u))
        torch.testing.assert_close(manifold.retr(x, 0 * u), x)

    def test_transport_is_linear_and_ends_at_the_new_point(
        self, manifold: ComplexStiefel, seed: int
    ) -> None:
        x, u, v = point_and_vectors(manifold, seed)
        y, moved = manifold.retr_transp(x, u, v)
        assert manifold.check_vector_on_tangent(y, moved)
        torch.testing.assert_close(
            manifold.transp(x, y, 2 * v + u), 2 * moved + manifold.transp(x, y, u)
        )
        torch.testing.assert_close(manifold.transp(x, x, v), v)

    def test_unitary_matrices_on_the_left_change_nothing(
        self, manifold: ComplexStiefel, seed: int
    ) -> None:
        x, u, v = point_and_vectors(manifold, seed)
        turn = torch.linalg.qr(noise(seed + 5, SHAPE[0], 4, 4)).Q
        torch.testing.assert_close(
            manifold.inner(x, u, v), manifold.inner(turn @ x, turn @ u, turn @ v)
        )
        torch.testing.assert_close(turn @ manifold.retr(x, u), manifold.retr(turn @ x, turn @ u))
        torch.testing.assert_close(
            turn @ manifold.proju(x, noise(9)), manifold.proju(turn @ x, turn @ noise(9))
        )

    def test_a_batch_is_its_points(self, manifold: ComplexStiefel, seed: int) -> None:
        x, u, v = point_and_vectors(manifold, seed)
        for i in range(SHAPE[0]):
            torch.testing.assert_close(manifold.retr(x, u)[i], manifold.retr(x[i], u[i]))
            torch.testing.assert_close(manifold.inner(x, u, v)[i], manifold.inner(x[i], u[i], v[i]))


def test_subspaces_do_not_know_their_columns() -> None:
    manifold = ComplexGrassmann()
    x, u, _ = point_and_vectors(manifold)
    turn = unitary(7)
    torch.testing.assert_close(manifold.retr(x @ turn, u @ turn), manifold.retr(x, u) @ turn)
    torch.testing.assert_close(manifold.proju(x, x @ noise(3, 5, 2, 2)), torch.zeros_like(x))


def test_pymanopt_has_the_same_subspaces() -> None:
    ours, theirs = ComplexGrassmann(), pymanopt.manifolds.ComplexGrassmann(4, 2, k=5)
    x, u, v = point_and_vectors(ours)
    away = noise(4)
    point, first, second = (t.numpy() for t in (x, u, v))
    np.testing.assert_allclose(ours.proju(x, away), theirs.projection(point, away.numpy()))
    np.testing.assert_allclose(
        ours.inner(x, u, v).sum(), theirs.inner_product(point, first, second), rtol=1e-12
    )
    np.testing.assert_allclose(
        ours.egrad2rgrad(x, away), theirs.euclidean_to_riemannian_gradient(point, away.numpy())
    )
    spans = (ours.retr(x, u).numpy(), theirs.retraction(point, first))
    projectors = [span @ span.conj().swapaxes(-1, -2) for span in spans]
    np.testing.assert_allclose(*projectors, atol=1e-12)


def test_pymanopts_unitary_group_has_the_same_points_and_vectors() -> None:
    """Square Stiefel matrices; pymanopt has a vector U as Xᴴ U.

    Its `projection` leaves out a conjugate, `to_tangent_space` does not.
    """
    ours, theirs = ComplexStiefel(), pymanopt.manifolds.UnitaryGroup(3)
    x = ours.projx(noise(0, 3, 3))
    away = noise(1, 3, 3)
    product = theirs.to_tangent_space(x.numpy(), (x.mH @ away).numpy())
    expected = theirs.embedding(x.numpy(), product)
    np.testing.assert_allclose(ours.proju(x, away), expected, atol=1e-12)
    polar = pymanopt.manifolds.UnitaryGroup(3, retraction="polar")
    u = ours.proju(x, away)
    np.testing.assert_allclose(
        ours.retr(x, u), polar.retraction(x.numpy(), (x.mH @ u).numpy()), atol=1e-12
    )


@on_both
def test_geoopts_adam_finds_the_leading_eigenvectors(manifold: ComplexStiefel) -> None:
    half = noise(3, 5, 4, 4)
    matrix = half @ half.mH
    best = torch.linalg.eigvalsh(matrix)[:, -2:].sum()
    x = geoopt.ManifoldParameter(manifold.projx(noise(1)), manifold=manifold)
    optimizer = geoopt.optim.RiemannianAdam([x], lr=0.1, betas=(0.9, 0.95), stabilize=10)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)
    for _ in range(300):
        optimizer.zero_grad()
        loss = -(x.conj() * (matrix @ x)).real.sum()
        loss.backward()
        optimizer.step()
        schedule.step()
    assert manifold.check_point_on_manifold(x)
    assert -loss.item() == pytest.approx(float(best), rel=1e-6)

"""Laws of the Grassmann manifold; pymanopt is the oracle."""

import geoopt
import numpy as np
import pymanopt
import pytest
import torch
from torch import Tensor

from manifoldkv.learn.manifolds.grassmann import Grassmann

SHAPE = (5, 4, 2)
MANIFOLD = Grassmann()


def noise(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or SHAPE), generator=generator, dtype=torch.float64)


def point_and_vectors(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    x = MANIFOLD.projx(noise(seed))
    return x, MANIFOLD.proju(x, noise(seed + 1)), MANIFOLD.proju(x, noise(seed + 2))


@pytest.mark.parametrize("seed", range(3))
class TestLaws:
    def test_points_and_vectors_are_known(self, seed: int) -> None:
        x, u, _ = point_and_vectors(seed)
        assert MANIFOLD.check_point_on_manifold(x)
        assert MANIFOLD.check_vector_on_tangent(x, u)
        assert not MANIFOLD.check_point_on_manifold(1.1 * x)
        assert not MANIFOLD.check_vector_on_tangent(x, u + 0.1 * x)
        assert not MANIFOLD.check_point(x.mT)

    def test_projections_are_idempotent_and_orthogonal(self, seed: int) -> None:
        x, u, v = point_and_vectors(seed)
        torch.testing.assert_close(MANIFOLD.projx(x), x)
        torch.testing.assert_close(MANIFOLD.proju(x, u), u)
        away = noise(seed + 3)
        away = away - MANIFOLD.proju(x, away)
        zero = torch.zeros(SHAPE[0], dtype=torch.float64)
        torch.testing.assert_close(MANIFOLD.inner(x, away, v), zero)

    def test_the_dimension_is_that_of_the_tangent_space(self, seed: int) -> None:
        x = MANIFOLD.projx(noise(seed, 4, 2))
        units = torch.eye(8, dtype=torch.float64).view(8, 4, 2)
        images = MANIFOLD.proju(x, units).flatten(1)
        assert int(torch.linalg.matrix_rank(images)) == 2 * (4 - 2)

    def test_a_retraction_is_of_first_order(self, seed: int) -> None:
        x, u, _ = point_and_vectors(seed)
        errors = [float((MANIFOLD.retr(x, t * u) - x - t * u).norm()) for t in (1e-3, 1e-4)]
        assert errors[1] < errors[0] / 90  # the error is of second order
        assert MANIFOLD.check_point_on_manifold(MANIFOLD.retr(x, 3 * u))
        torch.testing.assert_close(MANIFOLD.retr(x, 0 * u), x)

    def test_transport_is_linear_and_ends_at_the_new_point(self, seed: int) -> None:
        x, u, v = point_and_vectors(seed)
        y, moved = MANIFOLD.retr_transp(x, u, v)
        assert MANIFOLD.check_vector_on_tangent(y, moved)
        expected = 2 * moved + MANIFOLD.transp(x, y, u)
        torch.testing.assert_close(MANIFOLD.transp(x, y, 2 * v + u), expected)
        torch.testing.assert_close(MANIFOLD.transp(x, x, v), v)

    def test_orthogonal_matrices_on_the_left_change_nothing(self, seed: int) -> None:
        x, u, v = point_and_vectors(seed)
        turn = torch.linalg.qr(noise(seed + 5, SHAPE[0], 4, 4)).Q
        turned = MANIFOLD.inner(turn @ x, turn @ u, turn @ v)
        torch.testing.assert_close(turned, MANIFOLD.inner(x, u, v))
        torch.testing.assert_close(turn @ MANIFOLD.retr(x, u), MANIFOLD.retr(turn @ x, turn @ u))
        away = noise(9)
        projected = MANIFOLD.proju(turn @ x, turn @ away)
        torch.testing.assert_close(turn @ MANIFOLD.proju(x, away), projected)

    def test_a_batch_is_its_points(self, seed: int) -> None:
        x, u, v = point_and_vectors(seed)
        for i in range(SHAPE[0]):
            torch.testing.assert_close(MANIFOLD.retr(x, u)[i], MANIFOLD.retr(x[i], u[i]))
            torch.testing.assert_close(MANIFOLD.inner(x, u, v)[i], MANIFOLD.inner(x[i], u[i], v[i]))

    def test_the_choice_of_columns_does_not_matter(self, seed: int) -> None:
        x, u, _ = point_and_vectors(seed)
        turn = torch.linalg.qr(noise(seed + 7, SHAPE[0], 2, 2)).Q
        torch.testing.assert_close(MANIFOLD.retr(x @ turn, u @ turn), MANIFOLD.retr(x, u) @ turn)
        within = x @ noise(seed + 3, SHAPE[0], 2, 2)
        torch.testing.assert_close(MANIFOLD.proju(x, within), torch.zeros_like(x))


def test_pymanopt_has_the_same_subspaces() -> None:
    theirs = pymanopt.manifolds.Grassmann(4, 2, k=5)
    x, u, v = point_and_vectors()
    away = noise(4)
    point, first, second = x.numpy(), u.numpy(), v.numpy()
    np.testing.assert_allclose(MANIFOLD.proju(x, away), theirs.projection(point, away.numpy()))
    np.testing.assert_allclose(
        MANIFOLD.inner(x, u, v).sum(), theirs.inner_product(point, first, second), rtol=1e-12
    )
    gradient = theirs.euclidean_to_riemannian_gradient(point, away.numpy())
    np.testing.assert_allclose(MANIFOLD.egrad2rgrad(x, away), gradient)
    spans = (MANIFOLD.retr(x, u).numpy(), theirs.retraction(point, first))
    projectors = [span @ span.swapaxes(-1, -2) for span in spans]
    np.testing.assert_allclose(*projectors, atol=1e-12)


def test_geoopts_adam_finds_the_leading_eigenvectors() -> None:
    half = noise(3, 5, 4, 4)
    matrix = half @ half.mT
    best = torch.linalg.eigvalsh(matrix)[:, -2:].sum()
    x = geoopt.ManifoldParameter(MANIFOLD.projx(noise(1)), manifold=MANIFOLD)
    optimizer = geoopt.optim.RiemannianAdam([x], lr=0.1, betas=(0.9, 0.95), stabilize=10)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)
    for _ in range(300):
        optimizer.zero_grad()
        loss = -(x * (matrix @ x)).sum()
        loss.backward()
        optimizer.step()
        schedule.step()
    assert MANIFOLD.check_point_on_manifold(x)
    assert -loss.item() == pytest.approx(float(best), rel=1e-6)

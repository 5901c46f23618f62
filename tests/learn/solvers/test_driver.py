"""Laws of the training loop, on the leading eigenvectors of a small matrix."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import geoopt
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

from manifoldkv.core.errors import RunError
from manifoldkv.learn.manifolds.grassmann import Grassmann
from manifoldkv.learn.solvers.driver import descend
from manifoldkv.learn.solvers.riemannian_adam import riemannian_adam
from manifoldkv.runs.checkpoints import Checkpoints

STEPS = 25
SCHEDULES = {
    "recursive": lambda optimizer: CosineAnnealingLR(optimizer, T_max=STEPS),
    "closed form": lambda optimizer: LambdaLR(optimizer, lambda step: 1 - step / STEPS),
}


class Problem(NamedTuple):
    points: list[geoopt.ManifoldParameter]
    optimizer: geoopt.optim.RiemannianAdam
    schedule: LRScheduler
    closure: Callable[[int], float]
    calls: list[int]


def problem(
    schedule: Callable = SCHEDULES["recursive"],
    interrupted_at: int | None = None,
    lost_at: int | None = None,
) -> Problem:
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(3, 6, 6, generator=generator)
    matrix = half @ half.mT
    manifolds = [geoopt.Stiefel(), Grassmann()]
    start = torch.linalg.qr(half[..., :2]).Q
    points = [geoopt.ManifoldParameter(start.clone(), manifold=m) for m in manifolds]
    optimizer = riemannian_adam(points, 0.1)
    calls: list[int] = []

    def closure(step: int) -> float:
        calls.append(step)
        if step == interrupted_at:
            raise KeyboardInterrupt
        loss = -sum((x * (matrix @ x)).sum() for x in points)
        loss.backward()
        return float("inf") if step == lost_at else loss.item()

    return Problem(points, optimizer, schedule(optimizer), closure, calls)


def run(problem: Problem, **options) -> list[float]:
    loop = problem.closure, problem.optimizer, problem.schedule
    return descend(*loop, STEPS, label="test", **options)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
class TestLoop:
    def test_it_is_the_loop_written_out(self, schedule: Callable) -> None:
        first, second = problem(schedule), problem(schedule)
        history = []
        for step in range(STEPS):
            second.optimizer.zero_grad()
            history.append(second.closure(step))
            second.optimizer.step()
            second.schedule.step()
        assert run(first) == history
        assert history[-1] < history[0]
        assert all(map(torch.equal, first.points, second.points))

    @pytest.mark.parametrize("step", [0, 9, 14, 24])
    def test_interrupted_it_resumes_to_the_last_bit(
        self, schedule: Callable, step: int, tmp_path: Path
    ) -> None:
        whole = problem(schedule)
        expected = run(whole)
        checkpoints = Checkpoints(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            run(problem(schedule, interrupted_at=step), checkpoints=checkpoints)
        resumed = problem(schedule)
        assert run(resumed, checkpoints=checkpoints) == expected
        assert resumed.calls == [*range(step // 10 * 10, STEPS)]
        assert all(map(torch.equal, resumed.points, whole.points))
        finished = problem(schedule)
        assert run(finished, checkpoints=checkpoints) == expected
        assert finished.calls == []
        assert all(map(torch.equal, finished.points, whole.points))


def test_the_callback_ends_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    stopped = run(problem(), callback=lambda losses: len(losses) == 7, checkpoints=checkpoints)
    assert stopped == run(problem())[:7]
    assert len(checkpoints.read_tensors("test")["history"]) == 7


def test_a_loss_that_is_not_finite_ends_it_before_the_step() -> None:
    lost = problem(lost_at=0)
    with pytest.raises(RunError, match="the loss is inf at step 0 of test; try a smaller learning"):
        run(lost)
    assert all(map(torch.equal, lost.points, problem().points))

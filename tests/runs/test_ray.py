"""Bases found on a real Ray cluster of several nodes on this machine."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from manifoldkv import CompressionPlan, RankRecipe, Recipe, compress
from manifoldkv.core.errors import ArgumentError, RunError
from manifoldkv.runs.executors import Executor, LocalExecutor, RayExecutor, Task
from tests.families import tiny_model, tiny_tokens

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # Ray's own
RECIPE = RankRecipe("layer-output", "riemannian-adam", "shared", 1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that computes nothing, and two nodes of one processor."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture
def executor(cluster: Cluster) -> RayExecutor:
    return RayExecutor(cluster.address)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plan_by(executor: str | Executor, recipe: Recipe = RECIPE, **options) -> CompressionPlan:
    model, tokens = tiny_model("llama"), tiny_tokens(4, 24)
    return compress(model, tokens, recipe=recipe, executor=executor, **options)


def saved(plan: CompressionPlan, folder: Path) -> dict[str, bytes]:
    plan.save(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_plan_is_that_of_one_process(executor: RayExecutor, tmp_path: Path) -> None:
    expected = saved(plan_by("local"), tmp_path / "local")
    assert saved(plan_by(executor), tmp_path / "ray") == expected
    kept = plan_by(executor, folder=tmp_path / "work")
    assert saved(kept, tmp_path / "kept") == expected
    assert saved(plan_by("local", folder=tmp_path / "work"), tmp_path / "read") == expected


@pytest.mark.parametrize("recipe", ["bits", "stored"])
def test_statistics_are_those_of_one_process(executor: RayExecutor, recipe: str) -> None:
    """Of the default recipe too: three tasks of eight sequences or fewer, and one held out."""
    model, tokens = tiny_model("llama"), tiny_tokens(23, 24)
    plans = [
        compress(model, tokens, recipe=recipe, ratio=0.5, context=400, executor=by)
        for by in ("local", executor)
    ]
    assert plans[0].digest() == plans[1].digest()


@pytest.mark.parametrize("rule", ["sequential", "threshold", "optimal"])
def test_the_ranks_are_those_of_one_process(executor: RayExecutor, rule: str) -> None:
    recipe = RankRecipe("kq-svd", "closed-form", "all", "all", rule)
    expected = plan_by("local", recipe, ratio=0.6)
    assert len({basis.rank for layer in expected.layers for _, basis in layer.sites}) > 1
    assert plan_by(executor, recipe, ratio=0.6).digest() == expected.digest()


def ends_its_process_once(activations: object, number: int, mark: Path) -> Iterator[int]:
    if number == 2 and not mark.exists():
        mark.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    yield number


def always_ends_its_process(activations: object, number: int) -> Iterator[int]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield number


def takes_its_time(activations: object, number: int) -> Iterator[tuple[int, str]]:
    time.sleep(0.4)
    yield number, ray.get_runtime_context().get_node_id()


def fails(activations: object, number: int) -> Iterator[int]:
    raise ArgumentError(f"task {number}")


def tasks(count: int, *rest: object) -> list[Task]:
    return [Task(number, f"layer {number // 3}", (number, *rest)) for number in range(count)]


def test_an_error_of_a_task_is_raised_as_it_is(executor: RayExecutor) -> None:
    with pytest.raises(ArgumentError, match="task 0"):
        list(executor.run(fails, tasks(1), 1))


def test_a_killed_worker_is_replaced(executor: RayExecutor, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    found = dict(executor.run(ends_its_process_once, tasks(6, mark), 1))
    assert mark.exists()
    assert found == {number: number for number in range(6)}


def test_a_lost_node_changes_nothing(cluster: Cluster, executor: RayExecutor) -> None:
    lost = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    found, nodes = {}, set()
    for number, (result, node) in executor.run(takes_its_time, tasks(16), 1):
        found[number] = result
        nodes.add(node)
        if len(found) == 3:
            cluster.remove_node(lost, allow_graceful=False)
    assert found == {number: number for number in range(16)}
    assert len(nodes) >= 2


def test_a_task_that_is_lost_again_and_again_ends_the_run(cluster: Cluster) -> None:
    with pytest.raises(RunError, match="task 0 was lost 2 times"):
        list(RayExecutor(cluster.address, retries=1).run(always_ends_its_process, tasks(1), 1))


def test_executors_by_name() -> None:
    with pytest.raises(ArgumentError, match="unknown executor 'slurm'; known: local, ray"):
        plan_by("slurm")


def test_tasks_are_drawn_one_by_one_where_there_is_one_process() -> None:
    drawn = []

    def numbered() -> Iterator[Task]:
        for task in tasks(3):
            drawn.append(task.key)
            yield task

    found = LocalExecutor().run(lambda activations, number: iter((number, -1)), numbered(), 1)
    for count, (number, result) in enumerate(found):
        assert drawn == list(range(number + 1))
        assert result == (-1 if count % 2 else number)  # the first before the second is made

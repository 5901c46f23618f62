"""Executors of independent tasks: in this process, or on a Ray cluster.

Tasks are the bases of a site of a layer on uncompressed activations, and rank sensitivities of the
threshold and the optimal rule. Results do not depend on the executor. The sequential rule and
tuning, in which layers depend on each other, always run in this process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from manifoldkv.core.errors import ArgumentError, RunError

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class Task(NamedTuple, Generic[Key]):
    """A named call ``function(data, *arguments)`` that yields results."""

    key: Key
    data: Any
    arguments: tuple[Any, ...]


class Executor(ABC):
    """Executor of tasks, each on the same number of threads."""

    @abstractmethod
    def run(
        self, function: Callable[..., Iterator[Result]], tasks: Iterable[Task[Key]], threads: int
    ) -> Iterator[tuple[Key, Result]]:
        """Yield keys and results in order of completion; tasks are taken when a worker is free.

        Parameters
        ----------
        function : callable
            Function of the data and arguments of a task that returns an iterator over results.
        tasks : iterable of Task
            Tasks; consecutive ones on the same data hold one object, which is transferred once.
        threads : int
            Number of threads of every task: sums, and so plans, depend on it.

        Raises
        ------
        RunError
            If a task fails more often than it is retried.
        """


class LocalExecutor(Executor):
    """Executor of one task after the other in this process, which yields each result at once."""

    def run(
        self, function: Callable[..., Iterator[Result]], tasks: Iterable[Task[Key]], threads: int
    ) -> Iterator[tuple[Key, Result]]:
        for task in tasks:
            key = task.key
            with on_threads(threads):
                for result in function(task.data, *task.arguments):
                    yield key, result
            del task  # frees its data before the next is taken


LOCAL = LocalExecutor()


class RayExecutor(Executor):
    """Executor on the workers of a Ray cluster, with data transferred once per node.

    Tasks of a dead worker or node run again elsewhere.

    Parameters
    ----------
    address : str, optional
        Address of a running cluster (``"auto"`` finds one on this machine); a cluster of this
        machine is started and stopped if omitted.
    retries : int
        Largest number of retries of a task.

    Raises
    ------
    RunError
        If Ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, address: str | None = None, *, retries: int = 5) -> None:
        try:
            import ray
        except ImportError as error:
            raise RunError(
                'Ray is not installed: pip install -c constraints.txt -e ".[ray]"'
            ) from error
        self._ray = ray
        self._retries = retries
        if not ray.is_initialized():
            try:
                ray.init(address=address, log_to_driver=False, logging_level="warning")
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise RunError(f"no Ray cluster at {address!r}: {error}") from error

    def run(
        self, function: Callable[..., Iterator[Result]], tasks: Iterable[Task[Key]], threads: int
    ) -> Iterator[tuple[Key, Result]]:
        ray, queue = self._ray, iter(tasks)
        remote = ray.remote(_run_on_threads).options(num_cpus=threads, max_retries=self._retries)
        shared = ray.put(function)
        waiting: dict[Any, Key] = {}
        data, reference = None, None
        while True:
            workers = int(ray.cluster_resources().get("CPU", 1) // threads)
            for task in islice(queue, max(0, max(1, 2 * workers) - len(waiting))):
                if task.data is not data:
                    data, reference = task.data, ray.put(task.data)
                waiting[remote.remote(shared, threads, reference, *task.arguments)] = task.key
            if not waiting:
                return
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            key = waiting.pop(done)
            try:
                results = ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayError as error:
                raise RunError(f"task {key} was lost {self._retries + 1} times: {error}") from error
            for result in results:
                yield key, result


def _run_on_threads(
    function: Callable[..., Iterator[Result]], threads: int, data: Any, *arguments: Any
) -> list[Result]:
    with on_threads(threads):
        return list(function(data, *arguments))


def executor_named(executor: str | Executor) -> Executor:
    """Return an executor by its name, ``"local"`` or ``"ray"``, or itself.

    Raises
    ------
    ArgumentError
        If the name is unknown.
    RunError
        If it cannot be started.
    """
    if isinstance(executor, Executor):
        return executor
    by_name: dict[str, type[Executor]] = {"local": LocalExecutor, "ray": RayExecutor}
    if executor not in by_name:
        raise ArgumentError(f"unknown executor {executor!r}; known: {', '.join(by_name)}")
    return by_name[executor]()


MOST_THREADS = 1024
"""Largest number of threads, above the cores of any machine: torch ends the process on failure."""


def set_threads(count: int) -> None:
    """Set the number of threads of torch, or raise `RunError` above `MOST_THREADS` or below 1."""
    if not 1 <= count <= MOST_THREADS:
        raise RunError(f"threads must be from 1 to {MOST_THREADS}, got {count}")
    torch.set_num_threads(count)


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Set the number of threads of torch inside the block.

    Setting the current number has an effect too: before the first call MKL may use fewer threads
    and sum in another order, and a run that resumes everything would end in other bytes.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Where independent tasks run: in this process, or on a Ray cluster.

The bases of a site of a layer are independent of all others (they are found on the clean
activations of that layer), and so are rank sensitivities under the threshold and the optimal rule:
any executor finds the same. What depends on the layers below (the sequential rule, tuning) is not
given to an executor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from manifoldkv.errors import ArgumentError, RunError

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class Task(NamedTuple, Generic[Key]):
    """What yields some results, ``function(data, *arguments)``, and a name for it."""

    key: Key
    data: Any
    arguments: tuple[Any, ...]


class Executor(ABC):
    """Runs tasks, each on the same number of threads wherever it runs."""

    @abstractmethod
    def run(
        self, function: Callable[..., Iterator[Result]], tasks: Iterable[Task[Key]], threads: int
    ) -> Iterator[tuple[Key, Result]]:
        """Yield keys and results as they are finished; tasks are drawn as there is room for them.

        Parameters
        ----------
        function : callable
            Of the data and the arguments of a task; an iterator over its results.
        tasks : iterable of Task
            Consecutive ones that need the same data hold the same object: it travels once.
        threads : int
            Of every task: sums differ between thread counts, plans must not.

        Raises
        ------
        RunError
            If a task is lost for good.
        """


class LocalExecutor(Executor):
    """Runs one task after the other in this process, and yields a result as soon as it is there."""

    def run(
        self, function: Callable[..., Iterator[Result]], tasks: Iterable[Task[Key]], threads: int
    ) -> Iterator[tuple[Key, Result]]:
        for task in tasks:
            key = task.key
            with on_threads(threads):
                for found in function(task.data, *task.arguments):
                    yield key, found
            del task  # its data may go before the next come


LOCAL = LocalExecutor()
MOST_THREADS = 1024
"""No machine needs more; far above it threads cannot be made, which ends the process."""


class RayExecutor(Executor):
    """Tasks on the workers of a Ray cluster; data travel once per node.

    A task whose worker or node dies is run again elsewhere.

    Parameters
    ----------
    address : str, optional
        Of a running cluster (``"auto"`` finds one on this machine); a cluster of this machine is
        started and stopped if omitted.
    retries : int
        How often a task may be lost before the run ends.

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
        ray = self._ray
        remote = ray.remote(_run_on_threads).options(num_cpus=threads, max_retries=self._retries)
        shared = ray.put(function)
        waiting: dict[Any, Key] = {}
        held: tuple[Any, Any] = (None, None)
        for task in self._as_there_is_room(tasks, waiting, threads):
            if task is not None:
                if held[0] is not task.data:
                    held = (task.data, ray.put(task.data))
                waiting[remote.remote(shared, threads, held[1], *task.arguments)] = task.key
                continue
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            key = waiting.pop(done)
            try:
                results = ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayError as error:
                raise RunError(f"task {key} was lost {self._retries + 1} times: {error}") from error
            for found in results:
                yield key, found

    def _as_there_is_room(
        self, tasks: Iterable[Task[Key]], waiting: dict[Any, Key], threads: int
    ) -> Iterator[Task[Key] | None]:
        """Yield tasks to submit, two per worker at a time, or None where one should be awaited."""
        iterator = iter(tasks)
        while True:
            cpus = self._ray.cluster_resources().get("CPU", 1)
            room = max(1, 2 * int(cpus // threads)) - len(waiting)
            drawn = list(islice(iterator, max(0, room)))
            yield from drawn
            if not drawn and not waiting:
                return
            if waiting:
                yield None


def set_threads(count: int) -> None:
    """Set the number of threads of torch.

    Raises
    ------
    RunError
        If that is not between 1 and `MOST_THREADS`.
    """
    if not 1 <= count <= MOST_THREADS:
        raise RunError(f"cannot compute on {count} threads: possible are 1 to {MOST_THREADS}")
    torch.set_num_threads(count)


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Set the number of threads of torch inside the block.

    Until a number is set, though it be the one in use, MKL takes fewer where it likes, and sums in
    another order: a run that finds everything stored would end in other bytes than the first.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
        If there is none of this name.
    RunError
        If it cannot be started.
    """
    if isinstance(executor, Executor):
        return executor
    known: dict[str, type[Executor]] = {"local": LocalExecutor, "ray": RayExecutor}
    if executor not in known:
        raise ArgumentError(f"unknown executor {executor!r}; known: {', '.join(known)}")
    return known[executor]()

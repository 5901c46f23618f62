"""Processor seconds of every step, stored beside its result and read by repeated runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pandas as pd

from manifoldkv.runs.checkpoints import Checkpoints

T = TypeVar("T")


class Steps:
    """A timer of steps that includes those of earlier runs.

    Seconds are processor time, which on one thread does not depend on other processes. Of an
    interrupted step, only the time after it was resumed counts.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], float] = {}

    def frame(
        self, checkpoints: Checkpoints, name: str, step: str, compute: Callable[[], pd.DataFrame]
    ) -> pd.DataFrame:
        """Return a table as `Checkpoints.frame` does, and time the step."""
        frame = checkpoints.frame(name, lambda: self.value(checkpoints, step, compute))
        self._count(checkpoints, step, 0.0)
        return frame

    def value(self, checkpoints: Checkpoints, step: str, compute: Callable[[], T]) -> T:
        """Call a function, and time its first call.

        Parameters
        ----------
        checkpoints : Checkpoints
            Checkpoints keyed by everything that the result depends on.
        step : str
            Name of the step in the table.
        compute : callable
            Function without arguments.
        """
        start = time.process_time()
        result = compute()
        self._count(checkpoints, step, time.process_time() - start)
        return result

    def table(self) -> pd.DataFrame:
        """Return ``step, times, seconds``: runs of each step and their total seconds."""
        rows = [(step, seconds) for (step, _), seconds in self._seconds.items()]
        by_step = pd.DataFrame(rows, columns=["step", "seconds"]).groupby("step", sort=False)
        return by_step.agg(times=("seconds", "size"), seconds=("seconds", "sum")).reset_index()

    def _count(self, checkpoints: Checkpoints, step: str, seconds: float) -> None:
        stored = checkpoints.keyed(step=step)
        frame = stored.frame("seconds", lambda: pd.DataFrame({"seconds": [seconds]}))
        self._seconds[step, stored.digest] = float(frame["seconds"].iloc[0])

"""What every step of a study took: stored beside its result, so that a repeated run knows it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pandas as pd

from manifoldkv.runs.checkpoints import Checkpoints

T = TypeVar("T")


class Steps:
    """Runs steps and knows their seconds, those of earlier runs too.

    They are seconds of the processor: on one thread, what a step takes where nothing else runs. Of
    a step that was interrupted, what came after that counts.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], float] = {}

    def frame(
        self, checkpoints: Checkpoints, name: str, step: str, compute: Callable[[], pd.DataFrame]
    ) -> pd.DataFrame:
        """Return a table as `Checkpoints.frame` does; what it takes counts to a step."""
        found = checkpoints.frame(name, lambda: self.value(checkpoints, step, compute))
        self._count(checkpoints, step, 0.0)
        return found

    def value(self, checkpoints: Checkpoints, step: str, compute: Callable[[], T]) -> T:
        """Return what a function returns; what it takes the first time counts to a step.

        Parameters
        ----------
        checkpoints : Checkpoints
            Keyed by all that the result depends on.
        step : str
            What it is called in the table.
        compute : callable
            Called every time.
        """
        start = time.process_time()
        found = compute()
        self._count(checkpoints, step, time.process_time() - start)
        return found

    def table(self) -> pd.DataFrame:
        """Return ``step, times, seconds``: how often each ran, and its seconds in all."""
        rows = [(step, seconds) for (step, _), seconds in self._seconds.items()]
        by_step = pd.DataFrame(rows, columns=["step", "seconds"]).groupby("step", sort=False)
        return by_step.agg(times=("seconds", "size"), seconds=("seconds", "sum")).reset_index()

    def _count(self, checkpoints: Checkpoints, step: str, seconds: float) -> None:
        stored = checkpoints.keyed(step=step)
        frame = stored.frame("seconds", lambda: pd.DataFrame({"seconds": [seconds]}))
        self._seconds[step, stored.digest] = float(frame["seconds"].iloc[0])

"""What is compared, and on how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manifoldkv import Optimal
from manifoldkv.ranks import PAPER_CANDIDATES

STIEF, EIGEN, GROUPED = "layer-output", "eigen-attention", "grouped kq-svd"
"""The paper's method, its baseline, and our best closed form: all KV heads of a layer in one
oblique basis."""
SERIES = {EIGEN: "release", STIEF: "sequential", GROUPED: "optimal"}
"""How a method's ranks are chosen where methods are compared as they are published."""
SAME_RANKS = "same ranks"
"""The rule of plans that have the ranks which the sequential rule chose for the paper's bases."""


@dataclass(frozen=True)
class Protocol:
    """How much of everything; None is all there is.

    Parameters
    ----------
    sequences, length : int
        Calibration data.
    epochs : int
        Of the predictor, at most.
    ratios : tuple of float
        Asked for.
    error_budgets : tuple of float
        Of EigenAttention's search, which knows no ratio.
    candidates : tuple of float
        Ranks that are trained, as shares of head_dim.
    windows, second_windows : int or None
        Held-out windows of both corpora.
    surface_sequences, surface_rows : int or None
        What the sequential and the threshold rule measure errors on.
    search_sequences : int or None
        What EigenAttention's own search measures errors on.
    items : int or None
        Of each task.
    """

    sequences: int = 32
    length: int = 512
    epochs: int = 8
    ratios: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6, 0.5)
    error_budgets: tuple[float, ...] = (0.02, 0.04, 0.07, 0.11, 0.16, 0.25)
    candidates: tuple[float, ...] = (0.25, 0.375, *PAPER_CANDIDATES)
    windows: int | None = 24
    second_windows: int | None = 24
    surface_sequences: int | None = 16
    surface_rows: int | None = 64
    search_sequences: int | None = 8
    items: int | None = 200

    def caption(self, length: int, windows: Sequence[int]) -> str:
        """Return what was measured on how much, in a sentence."""
        items = "all" if self.items is None else f"the first {self.items}"
        surface = f"{_of(self.surface_sequences, self.sequences)} sequences"
        rows = "" if self.surface_rows is None else f" × {self.surface_rows} query rows"
        return (
            f"calibrated on {self.sequences} × {length} tokens, predictor capped at {self.epochs} "
            f"epochs, {len(self.candidates)} candidate ranks; surfaces of the sequential and the "
            f"threshold rule on {surface}{rows}, EigenAttention's search on "
            f"{_of(self.search_sequences, self.sequences)}, divergences of the optimal rule on "
            f"{Optimal().sequences}; perplexity on "
            f"{' and '.join(map(str, windows))} held-out windows of {length} tokens; {items} items "
            "per task"
        )


def _of(count: int | None, total: int) -> str:
    return f"all {total}" if count is None else str(min(count, total))


PROTOCOLS = {
    "default": Protocol(),
    "paper": Protocol(
        512,
        2048,
        50,
        candidates=PAPER_CANDIDATES,
        windows=None,
        second_windows=256,
        surface_sequences=None,
        surface_rows=None,
        search_sequences=None,
        items=None,
    ),
    "quick": Protocol(
        *(4, 96, 1, (0.8, 0.5), (0.05, 0.2), (0.5, 0.75, 1.0)),
        windows=4,
        second_windows=4,
        items=8,
    ),
}

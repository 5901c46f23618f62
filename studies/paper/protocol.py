"""Methods that are compared, and the amounts of data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manifoldkv import Solver
from manifoldkv.learn.ranks import PAPER_CANDIDATES, Optimal
from manifoldkv.learn.solvers import SOLVERS, Predictor, RiemannianAdam

STIEF, EIGEN, GROUPED = "layer-output", "eigen-attention", "grouped kq-svd"
"""The paper's method, its baseline, and our best closed form: all KV heads of a layer in one
oblique basis."""
SAME_RANKS = "same ranks"
"""Rule of plans with the ranks that the sequential rule chose for the paper's bases."""
RULES = ("sequential", "uniform", "threshold", "optimal")
SURFACE_RULES = ("sequential", "threshold")
"""Rules that measure error surfaces."""


@dataclass(frozen=True)
class Protocol:
    """Amounts of data and settings of a run; None means all of the data.

    Parameters
    ----------
    sequences, length : int
        Size of the calibration data.
    epochs : int
        Maximum epochs of the predictor.
    descent : Solver or None
        Solver of the paper's bases in place of the predictor.
    predicted_layers : tuple of float
        Relative depths, 0 to 1, of the layers that compare the predictor with that solver.
    ratios : tuple of float
        Requested ratios.
    error_budgets : tuple of float
        Error budgets of EigenAttention's search, which has no ratio.
    candidates : tuple of float
        Ranks that are solved for, as shares of head_dim.
    windows, second_windows : int or None
        Number of held-out windows of each corpus.
    window : int or None
        Tokens of a window; those of a calibration sequence if None.
    rules : tuple of str
        Rank rules for the paper's bases; the sequential rule is one of them.
    eigen_rules : tuple of str
        Rank rules for EigenAttention's bases.
    surface_sequences, surface_rows : int or None
        Data of the error surfaces of the sequential and the threshold rule.
    search_sequences : int or None
        Sequences on which EigenAttention's search measures errors.
    items, mmlu_items : int or None
        Items of each task; `mmlu_items` replaces it for MMLU unless None.
    accuracy_ratios : tuple of float or None
        Ratios at which accuracy is measured, with the nearest plan of each method; all if None.
    dtype : str or None
        Data type of the measured model; that of the fitted model if None.
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
    descent: Solver | None = None
    predicted_layers: tuple[float, ...] = ()
    window: int | None = None
    rules: tuple[str, ...] = RULES
    eigen_rules: tuple[str, ...] = RULES
    mmlu_items: int | None = None
    accuracy_ratios: tuple[float, ...] | None = None
    dtype: str | None = None

    @property
    def predictor(self) -> Predictor:
        """Return the paper's solver, capped."""
        return Predictor(epochs=self.epochs)

    @property
    def solver(self) -> Solver:
        """Return the solver of the paper's bases."""
        return self.predictor if self.descent is None else self.descent

    @property
    def series(self) -> dict[str, str]:
        """Return the rank rule that each method is published with.

        Our bases take the ranks of the paper's method where the optimal rule would take hours.
        """
        ours = "optimal" if "optimal" in self.rules else SAME_RANKS
        return {EIGEN: "release", STIEF: "sequential", GROUPED: ours}

    def caption(self, length: int, windows: Sequence[int], *, spread: bool = False) -> str:
        """Return the amounts of data of every measurement, in a sentence.

        `windows` has the number of windows of every corpus; `spread` says whether items are spread
        over a task's file or its first ones.
        """
        rows = "" if self.surface_rows is None else f" × {self.surface_rows} query rows"
        of_surfaces = " and ".join(f"the {r}" for r in SURFACE_RULES if r in self.rules)
        parts = [
            f"calibrated on {self.sequences} × {length} tokens, {self._solvers()}, "
            f"{len(self.candidates)} candidate ranks",
            f"surfaces of {of_surfaces} rule on {_of(self.surface_sequences, self.sequences)} "
            f"sequences{rows}, EigenAttention's search on "
            f"{_of(self.search_sequences, self.sequences)}{self._divergences()}",
            f"perplexity on {' and '.join(map(str, windows))} held-out windows of "
            f"{self.window or length} tokens",
            self._items(spread),
        ]
        if self.dtype is not None:
            parts.append(f"perplexities and accuracies in {self.dtype}")
        return "; ".join(parts)

    def _solvers(self) -> str:
        capped = f"capped at {self.epochs} epochs"
        if self.descent is None:
            return f"predictor {capped}"
        described = SOLVERS.describe(self.descent)
        name = described.pop("name")
        settings = ", ".join(f"{field} {value}" for field, value in described.items())
        text = f"the paper's bases by {name} in the predictor's place ({settings})"
        if self.predicted_layers:
            text += f", the predictor itself, {capped}, in {len(self.predicted_layers)} layers"
        return text

    def _divergences(self) -> str:
        if "optimal" in self.rules:
            return f", divergences of the optimal rule on {Optimal().sequences}"
        return ", no optimal rule"

    def _items(self, spread: bool) -> str:
        items = "all" if self.items is None else f"{'' if spread else 'the first '}{self.items}"
        text = f"{items} items per task"
        if self.mmlu_items is not None:
            text += f", {self.mmlu_items} of MMLU"
        if spread and self.items is not None:
            text += ", spread evenly over its file"
        if self.accuracy_ratios is not None:
            ratios = " and ".join(f"{ratio:g}" for ratio in self.accuracy_ratios)
            text += f", on the plans nearest to {ratios}"
        return text


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
    "real": Protocol(
        *(16, 512, 16, (0.8, 0.6, 0.5), (0.01, 0.04, 0.1), (0.25, 0.5, 0.6, 0.8, 1.0)),
        windows=6,
        second_windows=6,
        surface_sequences=8,
        surface_rows=32,
        search_sequences=4,
        items=500,
        descent=RiemannianAdam(steps=150, sequences_per_step=2, rows=32),
        predicted_layers=(0.0, 0.5, 1.0),
        window=1024,
        rules=("sequential", "uniform"),
        eigen_rules=(),
        mmlu_items=114,
        accuracy_ratios=(0.5,),
        dtype="bfloat16",
    ),
}
"""``real`` is for a model of a hundred million parameters or more on one core: an hour of it."""

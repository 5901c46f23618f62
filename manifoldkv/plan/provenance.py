"""Where the bases of a plan come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Provenance:
    """Where the bases come from.

    Parameters
    ----------
    model : str
        Name or folder of the model, as it was loaded.
    text : str
        Calibration text.
    sequences, length : int
        Size of the calibration text; 0 sequences if bases depend on none (`full_rank_plan`).
    context : int
        Tokens of the text that the requested ratio holds for.
    recipe : dict
        All fields of the recipe; objective, solver and rank rule by their names and fields
        (`Recipe.describe`).
    seed : int
        Seed of all random numbers.
    requested_ratio : float
        Ratio of the budget; `CompressionPlan.ratio` is the achieved one.
    versions : dict
        Versions of the packages that the bases depend on.
    threads : int
        Threads of torch: the same seed gives the same bytes on the same number of threads.
    tuning_steps : int
        Steps of `tune` since then.
    predicted_nats : float or None
        Predicted loss in nats per token, to second order in the errors, of calibration sequences
        that nothing was fitted to; not that after tuning.
    predicted_tokens : int
        Number of tokens of these sequences.
    measured_nats, measured_error : float or None
        Measured divergence from the uncompressed model on the same sequences, in nats per token,
        and its standard error over sequences, of two or more, of a plan that was asked for by its
        loss.
    """

    model: str
    text: str
    sequences: int
    length: int
    context: int
    recipe: dict[str, Any] = field(hash=False)
    seed: int
    requested_ratio: float
    versions: dict[str, str] = field(hash=False)
    threads: int
    tuning_steps: int = 0
    predicted_nats: float | None = None
    predicted_tokens: int = 0
    measured_nats: float | None = None
    measured_error: float | None = None

    @property
    def origin(self) -> str:
        """Return objective, solver and calibration text in words."""
        solver = self.method("solver")
        if not self.sequences:
            return f"{solver}, on no text"
        return (
            f"{self.method('objective')} by {solver} on {self.sequences} × {self.length} tokens of "
            f"{self.text}, seed {self.seed}"
        )

    def method(self, part: Literal["objective", "solver", "ranks"]) -> str:
        """Return the name of a part of the recipe."""
        return str(self.recipe[part]["name"])

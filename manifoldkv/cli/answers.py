"""Output of commands: lines for people, or one JSON object for machines."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """Results of a command.

    Parameters
    ----------
    facts : dict
        For machines.
    lines : list of str
        For people.
    """

    facts: dict[str, Any]
    lines: list[str]


def show(answer: Answer, as_json: bool) -> None:
    """Print an answer in one of its two forms."""
    print(json.dumps(_finite(answer.facts), indent=2) if as_json else "\n".join(answer.lines))


def size(nbytes: float) -> str:
    """Return a number of bytes in its largest fitting unit, never as 1024 of a smaller one."""
    for unit in ("B", "KiB", "MiB"):
        rounded = f"{nbytes:.0f}" if unit == "B" else f"{nbytes:.1f}"
        if float(rounded) < 1024:
            return f"{rounded} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def _finite(value: Any) -> Any:
    """Return a value with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Marks, a colour and a marker, of everything that figures compare: the same in all figures.

Colours are Okabe and Ito's (Color Universal Design, 2008), told apart with every kind of colour
vision, and five of Paul Tol's "muted" ones (SRON/EPS/TN/09-002) where a figure has more lines.
Markers tell lines apart where there is no colour at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BLACK, GREY = "#000000", "#999999"
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
INDIGO, WINE, TEAL, OLIVE, ROSE = "#332288", "#882255", "#44AA99", "#999933", "#CC6677"


@dataclass(frozen=True)
class Mark:
    """Colour, marker and line style of a line.

    Parameters
    ----------
    colour : str
        Hexadecimal code.
    marker : str
        Marker of matplotlib; empty for a reference line.
    line : str
        Line style of matplotlib: solid for methods of this package, broken for others.
    """

    colour: str
    marker: str
    line: str = "-"

    @property
    def style(self) -> dict[str, Any]:
        """Return the keywords of matplotlib's ``plot``."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.line}


REFERENCE = Mark(BLACK, "", ":")
METHODS = {
    "uncompressed": REFERENCE,
    "k-svd": Mark(GREY, "X"),
    "eigen-attention": Mark(ORANGE, "s"),
    "grouped-orthonormal": Mark(ORANGE, "P"),
    "kq-svd": Mark(PURPLE, "d"),
    "fisher": Mark(BLUE, "D"),
    "grouped kq-svd": Mark(PURPLE, "P"),
    "grouped": Mark(PURPLE, "P"),
    "grouped-optimal": Mark(PURPLE, "p"),
    "grouped-4-bit": Mark(INDIGO, "p"),
    "layer-output": Mark(GREEN, "^"),
    "paper": Mark(GREEN, "^"),
    "fast": Mark(GREEN, "v"),
    "fast-separate": Mark(GREEN, "D"),
    "fast-uniform": Mark(GREEN, "<"),
    "fast-optimal-tuned": Mark(GREEN, ">"),
    "grouped-layer-output": Mark(GREEN, "P"),
    "low-rank": Mark(TEAL, "o"),
    "best": Mark(BLUE, "o"),
    "best-rounded": Mark(BLUE, "s"),
    "bits": Mark(SKY, "D"),
    "work-4": Mark(SKY, "v"),
    "work-8": Mark(SKY, "s"),
    "work-16": Mark(SKY, "^"),
    "work-32": Mark(SKY, "P"),
    "dense-bits": Mark(SKY, "o"),
    "own-keys": Mark(BLUE, "^"),
    "one-layer-below": Mark(BLUE, "v"),
    "stored": Mark(BLUE, "*"),
    "integers": Mark(VERMILLION, "v", "--"),
    "kivi": Mark(WINE, ">", "--"),
    "fp8": Mark(OLIVE, "h", "--"),
    "transformers-hqq": Mark(ROSE, "8", "--"),
    "higgs": Mark(YELLOW, "D", "--"),
    "aqua-kv": Mark(TEAL, "P", "--"),
    "kvtc": Mark(INDIGO, "^", "--"),
    "xkv": Mark(ORANGE, "X", "--"),
    "aatc": Mark(ROSE, "D", "--"),
    "turboquant": Mark(OLIVE, "<", "--"),
    "cq": Mark(GREY, "p", "--"),
    "sinks-recent": Mark(BLACK, "x", "--"),
    "snapkv": Mark(GREY, "*", "--"),
    "evicted": Mark(BLUE, "X", "--"),
}
"""Objectives, recipes, and the methods of the benchmark; a method has one mark everywhere."""
SOLVERS = {
    "closed-form": Mark(INDIGO, "o"),
    "predictor": Mark(VERMILLION, "s"),
    "riemannian-adam": Mark(TEAL, "^"),
    "riemannian-l-bfgs": Mark(BLUE, "v"),
    "oblique": Mark(PURPLE, "P"),
    "flag": Mark(GREEN, "*"),
    "oblique-flag": Mark(ROSE, "*"),
}
RULES = {
    "sequential": Mark(GREEN, "s"),
    "uniform": Mark(GREY, "d"),
    "threshold": Mark(ORANGE, "^"),
    "optimal": Mark(BLUE, "P"),
}
ROTATIONS = {
    "none": Mark(GREY, "o"),
    "pca": Mark(ORANGE, "v"),
    "hadamard": Mark(BLUE, "D"),
}
SITES = {"key": Mark(BLUE, "^"), "value": Mark(VERMILLION, "o")}
MARKS = METHODS | SOLVERS | RULES | ROTATIONS | SITES
"""Marks by the names in tables of results."""
SPARE = tuple(map(Mark, (WINE, OLIVE, INDIGO, YELLOW, BLACK), "Xsvo^"))
"""Marks of methods of other packages."""


def mark_of(name: str, among: Sequence[str] = ()) -> Mark:
    """Return the mark of a name out of `MARKS`, or a spare one.

    Parameters
    ----------
    name : str
        Name of a method, a solver, a rank rule, a rotation or a site.
    among : sequence of str
        All names of a figure; those not in `MARKS` take spare marks in this order.
    """
    if name in MARKS:
        return MARKS[name]
    others = [other for other in among if other not in MARKS]
    return SPARE[others.index(name) % len(SPARE)] if name in others else SPARE[0]

"""plotly.js, which draws the charts of a report: a file, or packed into the page."""

from __future__ import annotations

import base64
import gzip
from functools import cache
from typing import NamedTuple

LIBRARY = "plotly.min.js"
"""Name of the file beside a report that is not self-contained."""
_FORBIDDEN, _INSTEAD = b"<&`", b",./"
"""The characters of base 85 that mean something in HTML, and their substitutes."""


class Packed(NamedTuple):
    """gzip in base 85, in characters without meaning in HTML; base 64 would exceed 2 MB."""

    text: str
    nbytes: int
    alphabet: str


def library() -> str:
    """Return the source of plotly.js."""
    import plotly.offline

    return str(plotly.offline.get_plotlyjs())


@cache
def packed_library() -> Packed:
    """Return the source of plotly.js, packed; the same bytes every time."""
    packed = gzip.compress(library().encode(), 9, mtime=0)
    whole = packed + bytes(-len(packed) % 4)
    return Packed(_encoded(whole), len(packed), _alphabet())


def _encoded(data: bytes) -> str:
    return base64.b85encode(data).translate(bytes.maketrans(_FORBIDDEN, _INSTEAD)).decode("ascii")


def _alphabet() -> str:
    """Return the digits from 0 to 84: of five, the last one counts by itself."""
    return "".join(_encoded(bytes([0, 0, 0, digit]))[-1] for digit in range(85))

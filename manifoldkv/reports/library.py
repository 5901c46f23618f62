"""The library that draws in a report: as it is, or packed into the page."""

from __future__ import annotations

import base64
import gzip
from typing import NamedTuple

LIBRARY = "plotly.min.js"
"""Name of the file beside a report that is not self-contained."""
_FORBIDDEN, _INSTEAD = b"<&`", b",./"
"""Of the characters of base 85, those that mean something in HTML, and what stands for them."""


class Packed(NamedTuple):
    """A text that a page unpacks: gzip in base 85, of characters that mean nothing in HTML.

    In base 64 the page would be beyond 2 MB.
    """

    text: str
    nbytes: int
    alphabet: str


def library() -> str:
    """Return the source of plotly.js."""
    import plotly.offline

    return str(plotly.offline.get_plotlyjs())


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

"""plotly.js, which draws the charts of a report: a file, or packed into the page."""

from __future__ import annotations

import base64
import gzip
from functools import cache

LIBRARY = "plotly.min.js"
"""Name of the file beside a report that is not self-contained."""


def library() -> str:
    """Return the source of plotly.js."""
    import plotly.offline

    return str(plotly.offline.get_plotlyjs())


@cache
def packed_library() -> str:
    """Return the source of plotly.js by gzip, in base 64; the same text every time."""
    return base64.b64encode(gzip.compress(library().encode(), 9, mtime=0)).decode("ascii")

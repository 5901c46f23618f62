"""What a study wrote into its folder, as one HTML file that needs no network."""

from __future__ import annotations

import base64
from pathlib import Path

import pandas as pd

from manifoldkv.errors import OutputError
from manifoldkv.reports.plan import template
from manifoldkv.runs.files import write_whole

SUMMARIES = ("summary.md", "README.md")
MOST_ROWS = 500
"""Of a table that is shown; the file has the others."""


def write_study_report(folder: str | Path, path: str | Path) -> None:
    """Put the summary, the figures and the tables of a study into one page.

    Needs ``pip install manifoldkv[report]``.

    Parameters
    ----------
    folder : str or Path
        With ``summary.md``, figures (``*.png``) and tables (``*.csv``), as studies leave it.
    path : str or Path
        Of the HTML file.

    Raises
    ------
    OutputError
        If a library is not installed, there is no summary, a file cannot be read, or the page
        cannot be written.
    """
    page = template("study.html")
    from markdown_it import MarkdownIt

    folder = Path(folder)
    summary = next((folder / name for name in SUMMARIES if (folder / name).is_file()), None)
    if summary is None:
        raise OutputError(
            f"{folder} is no folder of a study: it has no {' and no '.join(SUMMARIES)}"
        )
    try:
        # Without HTML of its own, and without images, which come below.
        markdown = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
        html = page.render(
            title=folder.resolve().name,
            summary=_scrolling(markdown.render(summary.read_text(encoding="utf-8"))),
            figures=[(p.stem, _encoded(p)) for p in sorted(folder.glob("*.png"))],
            tables=[_table(p) for p in sorted(folder.glob("*.csv"))],
        )
    except (OSError, UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise OutputError(f"cannot read the study in {folder}: {error}") from error
    write_whole(Path(path), html.encode())


def _scrolling(html: str) -> str:
    """Let every table of a page scroll by itself, so that text keeps the width of a phone."""
    opened = html.replace("<table>", '<div class="scroll"><table>')
    return opened.replace("</table>", "</table></div>")


def _encoded(figure: Path) -> str:
    return base64.b64encode(figure.read_bytes()).decode("ascii")


def _table(path: Path) -> tuple[str, int, str]:
    """Return the name, the number of rows, and the first of them as HTML."""
    frame = pd.read_csv(path)
    return path.name, len(frame), frame.head(MOST_ROWS).to_html(index=False, border=0)

"""The page of a study, from what studies have left in figures/."""

import base64
import re
from pathlib import Path

import pandas as pd
import pytest

from manifoldkv import OutputError
from manifoldkv.reports.study import write_study_report

FIGURES = Path(__file__).parents[1] / "figures"
STUDIES = [path.parent for path in sorted(FIGURES.rglob("summary.md"))]


@pytest.mark.parametrize("study", [*STUDIES, FIGURES], ids=lambda path: path.name)
def test_everything_is_in_one_file(study: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    write_study_report(study, out)
    text = out.read_text(encoding="utf-8")
    for figure in study.glob("*.png"):
        assert base64.b64encode(figure.read_bytes()).decode() in text
    for table in study.glob("*.csv"):
        assert f"{table.name}, {len(pd.read_csv(table))} rows" in text
    assert not re.search(r'<(script|link|img|iframe)[^>]+(src|href)="(?!data:)', text)
    assert "<table>" in text
    assert text.startswith("<!doctype html>")


def test_html_in_a_summary_is_only_text(tmp_path: Path) -> None:
    (tmp_path / "summary.md").write_text(
        "# Found\n\n<script>alert(1)</script>\n\n![x](http://x/y.png)\n"
    )
    pd.DataFrame({"a": ["<b>bold</b>"]}).to_csv(tmp_path / "results.csv", index=False)
    write_study_report(tmp_path, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<script>" not in text
    assert "<b>" not in text
    assert "<img" not in text


def test_a_folder_without_a_study_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"is no folder of a study: it has no summary.md"):
        write_study_report(tmp_path, tmp_path / "r.html")


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "summary.md").write_text("# Found\n")
    (tmp_path / "results.csv").write_bytes(b"\xff\xfe,1\n")
    with pytest.raises(OutputError, match=f"cannot read the study in {tmp_path}"):
        write_study_report(tmp_path, tmp_path / "r.html")

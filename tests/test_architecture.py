"""The directions of imports, which CONTRIBUTING.md draws and pyproject.toml states."""

import re
import tomllib
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]


@pytest.mark.filterwarnings("default")  # the linter's own
def test_imports_point_along_the_road(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    failed = lint_imports(cache_dir=None)
    assert not failed, capsys.readouterr().out


def test_the_architecture_page_has_every_room_in_its_place() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawn = re.search(r"```text\n(.*?)```", page, re.DOTALL)
    assert drawn is not None
    rows = [re.split(r"  +", row.strip())[0] for row in drawn[1].strip().splitlines()]
    layers = SETTINGS["importlinter"]["contracts"][0]["layers"]
    assert [row.replace(", ", " | ") for row in rows] == layers

"""The directions of imports, which CONTRIBUTING.md draws and pyproject.toml states."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]


def test_imports_point_along_the_road() -> None:
    """In a process of its own: the linter silences every logger of the one it runs in."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_architecture_page_has_every_room_in_its_place() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawn = re.search(r"```text\n(.*?)```", page, re.DOTALL)
    assert drawn is not None
    rows = [row[:22].strip() for row in drawn[1].strip().splitlines()]
    layers = SETTINGS["importlinter"]["contracts"][0]["layers"]
    assert rows == [layer for layer in layers if layer != "__main__"]

"""What is imported before anything is asked for: nothing that takes seconds."""

import json
import subprocess
import sys

import typer

from manifoldkv.cli.app import app

SLOW = (
    "torch",
    "transformers",
    "geoopt",
    "numpy",
    "pandas",
    "matplotlib",
    "datasets",
    "scipy",
    "triton",
    "numba",
)
REPORT = f"""
import json, sys
print("\\n" + json.dumps(sorted(set({SLOW!r}) & set(sys.modules))))
"""
PACKAGE = "import manifoldkv\n"
FIRST_USE = "manifoldkv.CompressionPlan\n"
CALLS = """
import sys
from manifoldkv.cli import main

for call in {calls!r}:
    sys.argv = ["manifoldkv", *call]
    try:
        main()
    except SystemExit as ended:
        assert bool(ended.code) == (call == ("evaluate",)), call
"""


def slow_ones(program: str) -> tuple[list[str], str]:
    """The slow libraries that a program has imported at its end, and what it has printed."""
    command = [sys.executable, "-c", program + REPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed, _, found = done.stdout.strip().rpartition("\n")
    return json.loads(found), printed


def test_the_package_imports_none_of_them() -> None:
    assert slow_ones(PACKAGE) == ([], "")


def test_a_name_that_is_used_imports_what_it_needs() -> None:
    """The others would be empty if slow libraries were not noticed."""
    assert {"torch", "transformers"} <= set(slow_ones(PACKAGE + FIRST_USE)[0])


def test_help_the_version_and_missing_arguments_import_none_of_them() -> None:
    helps = [("--help",), *((name, "--help") for name in typer.main.get_command(app).commands)]
    imported, printed = slow_ones(CALLS.format(calls=[*helps, ("--version",), ("evaluate",)]))
    assert imported == []
    assert printed.count("Usage: manifoldkv") == len(helps)

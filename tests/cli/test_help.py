"""Help, and the defaults it names.

Nothing of the library is imported for help: defaults stand there as words, which must be those of
the library.
"""

import inspect
import re
from typing import Any, get_args

import pytest
import torch
import typer

from manifoldkv import RECIPES
from manifoldkv.cli.app import app
from manifoldkv.cli.generating import NEW_TOKENS
from manifoldkv.cli.measuring import TASK_LENGTH
from manifoldkv.cli.options import Dtype
from manifoldkv.evaluate import decode_speed
from manifoldkv.evaluate.questions import TASKS
from manifoldkv.evaluate.speed import PROMPT
from manifoldkv.plan.formats.integers import BITS
from manifoldkv.recipes.config import CompressionConfig
from manifoldkv.recipes.named import DEFAULT_RECIPE
from manifoldkv.text import sources
from manifoldkv.text.tokens import LENGTH, SEQUENCES
from tests.cli.running import lines

COMMANDS = typer.main.get_command(app).commands
OPTIONS = {name: {p.name: p for p in command.params} for name, command in COMMANDS.items()}


def default(command: str, name: str) -> Any:
    return OPTIONS[command][name].show_default


def test_every_command_is_named() -> None:
    out = lines("--help")
    assert lines("-h") == out
    commands = "compress generate evaluate compare inspect bench report pack"
    assert list(COMMANDS) == commands.split()
    assert all(f"  {command} " in out for command in COMMANDS)
    assert "Exit codes: 0" in out
    assert "..." not in out.replace("[ARGS]...", "")  # every line of a command is whole


@pytest.mark.parametrize("command", COMMANDS)
def test_every_default_is_shown_and_every_help_is_a_sentence(command: str) -> None:
    """What takes a value is required or tells its default; the others are off."""
    out, parameters = lines(command, "-h"), OPTIONS[command].values()
    takes_value = [p for p in parameters if not getattr(p, "is_flag", False)]
    two_ways = [p for p in parameters if p.secondary_opts]
    shown = out.count("[required") + out.count("[default:")
    assert shown == len(takes_value) + len(two_ways)
    assert not [p.name for p in parameters if not re.fullmatch(r"[A-Z].* .*[.)]", p.help)]
    optional = [not p.required for p in parameters]
    assert optional == sorted(optional)  # arguments and required options stand first


def test_a_run_has_twenty_options_at_most() -> None:
    options = [p for p in OPTIONS["compress"].values() if p.param_type_name == "option"]
    assert len(options) <= 20


@pytest.mark.parametrize("command", ["compress", "evaluate", "compare", "report"])
def test_texts(command: str) -> None:
    assert default(command, "length") == f"{LENGTH}, or all the model takes"
    said = OPTIONS[command]["text"].help
    said, own, _ = said.partition(". 'own' is text that the model itself")
    assert sources.HELP.startswith(said.removeprefix("Text: ").removesuffix("."))
    assert bool(own) == (command == "compress")
    assert default(command, "text").endswith("docstrings for the reference models")


def test_defaults_of_a_run() -> None:
    config, options = CompressionConfig(), OPTIONS["compress"]
    assert options["recipe"].default == DEFAULT_RECIPE == config.recipe
    assert default("compress", "ratio") == f"{config.ratio:g}"
    bits, best = RECIPES["bits"].compute, RECIPES["best"].compute
    assert default("compress", "compute") == f"{bits:g} with recipe bits, {best:g} with best"
    assert default("compress", "sequences") == str(SEQUENCES)
    for name in ("sequences", "length", "context"):
        assert options[name].default == getattr(config, name), name
    bits = options["settings"].help.partition("to integers of ")[2]
    assert sorted(map(int, re.findall(r"\d+", bits))) == sorted(BITS)


def test_defaults_of_measurements() -> None:
    assert default("bench", "tokens") == f"{PROMPT}, or what the model takes"
    assert default("generate", "max_new_tokens") == f"{NEW_TOKENS}, or all the model takes"
    of_library = inspect.signature(decode_speed).parameters
    for name in ("tokens", "new_tokens", "rounds"):
        assert OPTIONS["bench"][name].default == of_library[name].default
    said = OPTIONS["evaluate"]["tasks"].help
    assert all(task in said for task in TASKS)
    assert f"({TASK_LENGTH}, or half of what the model takes)" in said


def test_dtypes() -> None:
    assert {type(getattr(torch, name)) for name in get_args(Dtype)} == {torch.dtype}

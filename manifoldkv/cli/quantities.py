"""Sizes as options of commands."""

from __future__ import annotations

import typer

from manifoldkv.core import quantities
from manifoldkv.core.errors import ArgumentError


def parse_bytes(text: str | int) -> int:
    """Return a number of bytes; typer calls it on defaults too."""
    try:
        return quantities.parse_bytes(text)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error


def parse_tokens(text: str | int) -> int:
    """Return a number of tokens; typer calls it on defaults too."""
    try:
        return quantities.parse_tokens(text)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error

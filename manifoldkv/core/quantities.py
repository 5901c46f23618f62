"""Sizes as people write them: ``1GiB``, ``32k``."""

from __future__ import annotations

import re

from manifoldkv.core.errors import ArgumentError

DECIMAL = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
TOKENS = {"": 1, "k": 2**10, "m": 2**20}


def parse_bytes(text: str | int) -> int:
    """Return a number of bytes: 500MB, 1.5GiB; a number alone is bytes."""
    return _parsed(text, DECIMAL | BINARY | {"": 1}, "bytes: write 1GiB, 500MB or 1000000")


def parse_tokens(text: str | int) -> int:
    """Return a number of tokens: 4000, 32k (32,768), 1M."""
    return _parsed(text, TOKENS, "tokens: write 4000 or 32k, which is 32768")


def _parsed(text: str | int, units: dict[str, int], expected: str) -> int:
    """Return a number above 0 times its unit."""
    parts = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) ?([A-Za-z]*)", str(text).strip())
    unit = 0 if parts is None else units.get(parts[2].lower(), 0)
    number = 0 if parts is None else int(float(parts[1]) * unit)
    if number < 1:
        raise ArgumentError(f"'{text}' is not a number of {expected}")
    return number

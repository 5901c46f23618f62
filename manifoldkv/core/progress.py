"""Progress bars."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def follow(items: Iterable[T], total: int, label: str = "layers") -> Iterator[T]:
    """Yield items with a progress bar, drawn on terminals only."""
    yield from tqdm(items, total=total, desc=label, disable=None, leave=False)

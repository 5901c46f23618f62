"""Progress bars: drawn on terminals only, and removed at the end."""

import io
from collections.abc import Iterator
from contextlib import redirect_stderr

import pytest

from manifoldkv.core.progress import follow


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_items_are_computed_one_by_one_under_a_bar_that_is_removed() -> None:
    """A layer, say, of which there is memory for one at a time."""
    computed = []

    def items() -> Iterator[int]:
        for number in range(3):
            computed.append(number)
            yield number

    with redirect_stderr(Terminal()) as terminal:
        for number in follow(items(), 3, "sequences"):
            assert computed == list(range(number + 1))
            assert "sequences:   0%" in terminal.getvalue()
            assert "0/3" in terminal.getvalue()
    assert computed == [0, 1, 2]
    *_, drawn, over_it, end = terminal.getvalue().split("\r")
    assert "3" in drawn
    assert over_it == " " * len(over_it)
    assert end == ""


def test_nothing_is_printed_without_a_terminal(capsys: pytest.CaptureFixture) -> None:
    assert list(follow(range(5), 5)) == list(range(5))
    assert capsys.readouterr() == ("", "")

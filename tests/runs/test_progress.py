"""What a person sees of long work, and what nobody sees where nobody watches."""

import io
from collections.abc import Iterator
from contextlib import redirect_stderr

import pytest

from manifoldkv.runs.progress import follow


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_all_items_come_in_their_order() -> None:
    with redirect_stderr(Terminal()):
        assert list(follow(iter("abc"), 3)) == ["a", "b", "c"]


def test_an_item_is_made_when_it_is_asked_for() -> None:
    """As a layer is, of which there is memory for one at a time."""
    made = []

    def items() -> Iterator[int]:
        for number in range(3):
            made.append(number)
            yield number

    for number in follow(items(), 3):
        assert made == list(range(number + 1))


def test_a_person_sees_how_many_there_are_of_what() -> None:
    with redirect_stderr(Terminal()) as terminal:
        next(follow(iter("abcde"), 5, "sequences"))
    assert "sequences:   0%" in terminal.getvalue()
    assert "0/5" in terminal.getvalue()


def test_the_bar_is_gone_when_all_is_done() -> None:
    with redirect_stderr(Terminal()) as terminal:
        list(follow(iter("ab"), 2))
    *_, drawn, over_it, end = terminal.getvalue().split("\r")
    assert "2" in drawn
    assert over_it == " " * len(over_it)
    assert end == ""


def test_nothing_is_printed_where_nobody_watches(capsys: pytest.CaptureFixture) -> None:
    assert list(follow(range(5), 5)) == list(range(5))
    assert capsys.readouterr() == ("", "")

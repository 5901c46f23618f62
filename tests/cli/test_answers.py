"""What a command prints: sizes, and JSON that every reader takes."""

import io
import json
import math
from contextlib import redirect_stdout
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from manifoldkv.cli.answers import Answer, show, size

BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def read(text: str) -> tuple[float, float, str]:
    """Return the number that a text shows, half a step of its last digit, and the unit."""
    number, unit = text.split()
    digits = len(number.partition(".")[2])
    return float(number), 0.5 * 10**-digits * BYTES[unit], unit


@given(st.floats(0, 2**45) | st.integers(0, 2**45))
@example(1023.6)
@example(2**20 - 1)
@example(2**30 - 1)
def test_a_size_is_its_rounded_number_in_the_largest_unit_of_which_there_is_one(
    nbytes: float,
) -> None:
    number, half_a_step, unit = read(size(nbytes))
    assert abs(number * BYTES[unit] - nbytes) <= half_a_step * (1 + 1e-9)
    assert number >= 1 or unit == "B"
    assert number < 1024 or unit == "GiB"


def printed(answer: Answer, as_json: bool) -> str:
    with redirect_stdout(io.StringIO()) as out:
        show(answer, as_json)
    return out.getvalue()


def strictly(text: str) -> Any:
    """Read JSON that has no words of its own for numbers that are none."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def agree(found: Any, given: Any) -> bool:
    """Whether a value read back is the one given, null where that is not finite."""
    if isinstance(given, dict):
        return found.keys() == given.keys() and all(agree(found[k], given[k]) for k in given)
    if isinstance(given, list | tuple):
        return len(found) == len(given) and all(map(agree, found, given))
    if isinstance(given, float) and not math.isfinite(given):
        return found is None
    return type(found) is type(given) and found == given


@given(st.dictionaries(st.text(), values))
@example({"losses": [{"first": math.nan}, (math.inf, -math.inf, 0.5)]})
def test_facts_are_one_json_object_with_null_for_what_is_not_finite(facts: dict[str, Any]) -> None:
    assert agree(strictly(printed(Answer(facts, ["for people"]), as_json=True)), facts)


@pytest.mark.parametrize("lines", [["one"], ["one", "two"]])
def test_people_get_the_lines_alone(lines: list[str]) -> None:
    assert printed(Answer({"fact": 1}, lines), as_json=False).splitlines() == lines

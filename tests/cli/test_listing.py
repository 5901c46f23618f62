"""What `manifoldkv objectives`, `solvers` and `recipes` list."""

import re
from collections.abc import Callable
from itertools import chain

import pytest

from manifoldkv import OBJECTIVES, RECIPES, SOLVERS
from manifoldkv.cli import listing
from manifoldkv.cli.answers import Answer
from manifoldkv.registry import Registry


@pytest.mark.parametrize(
    ("listed", "registry"), [(listing.objectives, OBJECTIVES), (listing.solvers, SOLVERS)]
)
def test_every_registered_name_stands_with_the_first_line_of_its_docstring(
    listed: Callable[[], Answer], registry: Registry
) -> None:
    answer = listed()
    assert list(answer.facts) == registry.names()
    for line, (name, first) in zip(answer.lines, answer.facts.items(), strict=True):
        assert first == (registry.get(name).__doc__ or "").split("\n")[0] != ""
        assert line.split(maxsplit=1) == [name, first]


def test_what_a_user_registers_is_listed_in_a_column_as_wide_as_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine: Registry = Registry("objective", "nobody.registers.here")

    @mine.register("short")
    class Documented:
        """

        Begins a line below the quotes.

        And goes on.
        """

    @mine.register("a-name-that-is-long")
    class Silent:
        pass

    monkeypatch.setattr(listing, "OBJECTIVES", mine)
    answer = listing.objectives()
    assert answer.facts == {
        "short": "Begins a line below the quotes.",
        "a-name-that-is-long": "",
    }
    assert answer.lines == [
        "short                Begins a line below the quotes.",
        "a-name-that-is-long  ",
    ]


def test_recipes_stand_with_all_their_parts() -> None:
    answer = listing.recipes()
    assert answer.facts == {name: recipe.describe() for name, recipe in RECIPES.items()}
    parts = [[name, *(f"  {part}" for part in facts)] for name, facts in answer.facts.items()]
    assert [re.match(r" *\S+", line)[0] for line in answer.lines] == [*chain(*parts)]


def test_a_part_of_a_recipe_is_its_name_and_its_fields() -> None:
    lines = listing.recipes().lines
    assert "  objective       layer-output" in lines
    epochs = RECIPES["paper"].describe()["solver"]["epochs"]
    assert any(
        line.startswith("  solver          predictor(") and f"epochs={epochs}" in line
        for line in lines
    )
    assert not any("{" in line for line in lines)

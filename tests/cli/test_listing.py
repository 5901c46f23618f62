"""What `manifoldkv inspect` lists."""

import pytest

from manifoldkv import RECIPES
from manifoldkv.cli import listing
from manifoldkv.objectives import OBJECTIVES
from manifoldkv.ranks import RANK_RULES
from manifoldkv.registry import Registry
from manifoldkv.solvers import SOLVERS
from tests.cli.running import facts, lines


@pytest.mark.parametrize(("kind", "registry"), [("objectives", OBJECTIVES), ("solvers", SOLVERS)])
def test_every_registered_name_stands_with_the_first_line_of_its_docstring(
    kind: str, registry: Registry
) -> None:
    answer = listing.listed()
    assert list(answer.facts[kind]) == registry.names()
    for name, first in answer.facts[kind].items():
        assert first == (registry.get(name).__doc__ or "").split("\n")[0] != ""
        assert any(line.split(maxsplit=1) == [name, first] for line in answer.lines)


def test_a_class_that_a_user_registers_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setitem(listing.REGISTRIES, "objective", mine)
    answer = listing.listed()
    assert answer.facts["objectives"] == {
        "short": "Begins a line below the quotes.",
        "a-name-that-is-long": "",
    }
    assert "  short                Begins a line below the quotes." in answer.lines


def test_the_command_prints_the_list() -> None:
    listed = facts("inspect")
    names = [list(RECIPES), OBJECTIVES.names(), SOLVERS.names(), RANK_RULES.names()]
    assert [list(of_kind) for of_kind in listed.values()] == names
    out = lines("inspect")
    assert all(f"\n  {name}" in out for of_kind in names for name in of_kind)


def test_recipes_stand_with_their_fields() -> None:
    answer = listing.listed()
    assert answer.facts["recipes"] == {name: r.describe() for name, r in RECIPES.items()}
    assert "    objective       layer-output" in answer.lines
    epochs = RECIPES["paper"].describe()["solver"]["epochs"]
    assert any("predictor(" in line and f"epochs={epochs}" in line for line in answer.lines)
    assert not any("{" in line for line in answer.lines)

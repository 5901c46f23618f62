"""The laws of recipes, for all of ours and for one of somebody else's."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from manifoldkv import RECIPES, BitRecipe, register_recipe
from manifoldkv.core.errors import ArgumentError
from manifoldkv.recipes import named
from manifoldkv.testing import RecipeConformance
from tests.short_recipes import short

OURS = {name: short(name) for name in RECIPES}


@pytest.mark.parametrize("name", OURS)
class TestOurs(RecipeConformance):
    @pytest.fixture(autouse=True)
    def chosen(self, name: str) -> None:
        self.recipe = OURS[name]


@dataclass(frozen=True)
class Mine(BitRecipe):
    """A recipe of another package."""

    sinks: int = 1


def test_recipes_are_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "RECIPES", dict(RECIPES))
    register_recipe("mine", Mine())
    register_recipe("mine", Mine())
    assert named.recipe_named("mine") == Mine()
    with pytest.raises(ValueError, match="recipe 'mine' is already Mine"):
        register_recipe("mine", Mine(sinks=2))


def test_recipes_of_other_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = EntryPoint("theirs", f"{__name__}:THEIRS", named.GROUP)
    monkeypatch.setattr(named, "RECIPES", dict(RECIPES))
    monkeypatch.setattr(named, "entry_points", lambda **asked: EntryPoints([found]).select(**asked))
    assert named.recipe_names() == [*RECIPES, "theirs"]
    assert named.recipe_named("theirs") is THEIRS
    with pytest.raises(ArgumentError, match=r"unknown recipe 'nobody'; known: .*, theirs"):
        named.recipe_named("nobody")


THEIRS = Mine(sinks=3)

"""Parts of a recipe that a command line sets."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from manifoldkv.errors import RankError
from manifoldkv.pipeline.recipes import AnyRecipe, Recipe, recipe_named
from manifoldkv.ranks import RANK_RULES


@dataclass(frozen=True)
class Parts:
    """Fields of a recipe that are not to be as it has them; None leaves one as it is.

    They have the names and the meaning of the fields of recipes; a rank rule has a multiple beside
    its name.
    """

    objective: str | None = None
    solver: str | None = None
    key_grouping: str | None = None
    value_grouping: str | None = None
    ranks: str | None = None
    rank_multiple: int | None = None
    sinks: int | None = None
    tuning_steps: int | None = None

    def put_into(self, name: str) -> AnyRecipe:
        """Return a recipe with these parts.

        Raises
        ------
        UnknownNameError
            If there is no recipe, objective, solver or rank rule of a name.
        RankError
            If the recipe has no such part, or the part no such value.
        """
        recipe = recipe_named(name)
        known = {field.name for field in fields(recipe)}
        asked = {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None
        }
        for part in asked:
            if part not in known and (part != "rank_multiple" or "ranks" not in known):
                own = ", ".join(map(_option, (f.name for f in fields(self) if f.name in known)))
                raise RankError(f"recipe {name} has no part {_option(part)}: of its own are {own}")
        multiple = asked.pop("rank_multiple", None)
        if multiple is not None and isinstance(recipe, Recipe):
            rule = RANK_RULES.resolve(asked.get("ranks", recipe.ranks))
            asked["ranks"] = replace(rule, multiple=multiple)
        return replace(recipe, **asked)


def _option(part: str) -> str:
    return f"--{part.replace('_', '-')}"

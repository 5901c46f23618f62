"""One colour and one marker for everything that figures compare."""

from itertools import combinations

import pytest
from matplotlib.colors import is_color_like
from matplotlib.markers import MarkerStyle

from manifoldkv import RECIPES
from manifoldkv.evaluate.diagnostics.figures import MARKS, mark_of, palette
from manifoldkv.learn.objectives import OBJECTIVES
from manifoldkv.learn.solvers import SOLVERS
from manifoldkv.recipes.rounding import ROTATIONS

KINDS = (palette.METHODS, palette.SOLVERS, palette.RULES, palette.ROTATIONS, palette.SITES)
SAME = (
    {"grouped", "grouped kq-svd"},
    {"layer-output", "paper"},
)
"""Names of one method: the recipe of the paper is its objective."""


def test_a_name_has_one_mark() -> None:
    assert len(MARKS) == sum(len(kind) for kind in KINDS)
    for mark in MARKS.values():
        assert is_color_like(mark.colour)
        MarkerStyle(mark.marker)


@pytest.mark.parametrize("kind", KINDS)
def test_no_two_methods_look_the_same(kind: dict[str, palette.Mark]) -> None:
    looks = {name: (mark.colour, mark.marker) for name, mark in kind.items()}
    for first, second in combinations(kind, 2):
        assert (looks[first] == looks[second]) == ({first, second} in SAME), (first, second)


OURS = {
    "objectives": OBJECTIVES.names(),
    "solvers": SOLVERS.names(),
    "recipes": list(RECIPES),
    "rotations": list(ROTATIONS),
}


@pytest.mark.parametrize("kind", OURS)
def test_everything_of_ours_has_a_mark(kind: str) -> None:
    assert not set(OURS[kind]) - set(MARKS)


def test_names_of_others_get_spare_marks() -> None:
    among = ["mine", "k-svd", "yours"]
    marks = [mark_of(name, among) for name in among]
    assert marks[1] == MARKS["k-svd"]
    assert len(set(marks)) == 3
    assert not {marks[0], marks[2]} & set(MARKS.values())
    assert mark_of("mine") == mark_of("mine", ["mine"])

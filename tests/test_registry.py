"""Names of objectives and solvers."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from manifoldkv.core import registry
from manifoldkv.core.errors import ArgumentError
from manifoldkv.core.registry import Registry
from manifoldkv.learn.objectives import OBJECTIVES
from manifoldkv.learn.objectives.k_svd import KSVD
from manifoldkv.learn.solvers import SOLVERS


@pytest.fixture
def shapes():
    return Registry("shape", "manifoldkv.shapes")


def test_ours_are_known():
    assert set(OBJECTIVES.names()) >= {
        "k-svd",
        "eigen-attention",
        "kq-svd",
        "layer-output",
        "fisher",
    }
    first = {"closed-form", "predictor", "riemannian-adam", "riemannian-l-bfgs"}
    assert set(SOLVERS.names()) == first | {"oblique", "flag", "oblique-flag"}
    assert OBJECTIVES.get("k-svd") is KSVD


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ArgumentError, match="unknown objective 'svd'; known: k-svd, eigen-"):
        OBJECTIVES.get("svd")


def test_taken_name_is_refused(shapes):
    shapes.register("round")(int)
    shapes.register("round")(int)  # the same class again, as on a reload
    with pytest.raises(ValueError, match="'round' is already"):
        shapes.register("round")(str)


def test_entry_points_are_loaded_on_demand(shapes, monkeypatch):
    entry_point = EntryPoint("square", "fractions:Fraction", "manifoldkv.shapes")

    def entry_points(group):
        return EntryPoints([entry_point]).select(group=group)

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert shapes.names() == ["square"]
    from fractions import Fraction

    assert shapes.get("square") is Fraction

"""Manifolds of bases: geoopt's Stiefel, and Grassmann, oblique pairs and flags, which it lacks."""

from manifoldkv.learn.manifolds.base import BasisManifold
from manifoldkv.learn.manifolds.flag import Flags, ObliqueFlags, OrthonormalFlags
from manifoldkv.learn.manifolds.grassmann import Grassmann
from manifoldkv.learn.manifolds.oblique import Oblique
from manifoldkv.learn.manifolds.orthonormal import Orthonormal

MANIFOLDS: dict[str, type[BasisManifold]] = {
    "grassmann": Orthonormal,
    "oblique": Oblique,
    "flag": OrthonormalFlags,
    "oblique-flag": ObliqueFlags,
}
"""Manifolds by the names that solvers take."""

__all__ = [
    "MANIFOLDS",
    "BasisManifold",
    "Flags",
    "Grassmann",
    "Oblique",
    "ObliqueFlags",
    "Orthonormal",
    "OrthonormalFlags",
]

"""Manifolds of bases: geoopt's Stiefel, and Grassmann, oblique pairs and flags, which it lacks."""

from manifoldkv.manifolds.base import BasisManifold
from manifoldkv.manifolds.flag import Flags, ObliqueFlags, OrthonormalFlags
from manifoldkv.manifolds.grassmann import Grassmann
from manifoldkv.manifolds.oblique import Oblique
from manifoldkv.manifolds.orthonormal import Orthonormal

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

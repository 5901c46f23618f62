"""What a token's keys and values are predicted from, in the order that predictions read it."""

from __future__ import annotations

from torch import Tensor


class Below:
    """Reconstructions of the same tokens at the sites before one site.

    Parameters
    ----------
    depth : int or None
        How many layers below something is predicted from; None if nothing is.
    """

    def __init__(self, depth: int | None) -> None:
        self._depth = depth
        self._keys: Tensor | None = None
        self.given: list[Tensor] = []
        """As `Coding.prediction` has them for the next site: the keys of its own layer where that
        is one of values, then the keys and the values of the layer below, and so on."""

    def add(self, x: Tensor) -> None:
        """Add the reconstruction of the next site: keys and values of a layer take turns."""
        if self._depth is None:
            return
        if self._keys is None:
            self._keys, self.given = x, [x, *self.given]
            return
        keys, *older = self.given
        self._keys, self.given = None, [keys, x, *older][: 2 * self._depth]

    def forget(self) -> None:
        """Forget all: the layers from here on hold other tokens."""
        self._keys, self.given = None, []

"""Results of long steps, in files named by all that they depend on, for runs to resume from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from manifoldkv.core.errors import RunError
from manifoldkv.core.files import write_whole
from manifoldkv.runs.source import digest_of_code

DIGEST = "sha256"


class Checkpoints:
    """Results of the steps of a run, in files named by all that they depend on.

    Parameters
    ----------
    folder : Path, optional
        Folder of the files, created if missing; nothing is stored if omitted.
    settings : dict, optional
        Settings that all results depend on, of JSON's types.
    force : bool
        Whether stored results are recomputed, once.
    """

    def __init__(
        self,
        folder: Path | None = None,
        settings: dict[str, Any] | None = None,
        *,
        force: bool = False,
    ) -> None:
        self.folder = folder
        self._settings = settings or {}
        self._force = force
        self._computed: set[Path] = set()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def digest(self) -> str:
        """Return the SHA-256 of all settings, part of the names of files."""
        return hashlib.sha256(json.dumps(self._settings, sort_keys=True).encode()).hexdigest()

    def keyed(self, **settings: Any) -> Checkpoints:
        """Return the checkpoints of results that depend on further settings."""
        keyed = Checkpoints(self.folder, self._settings | settings, force=self._force)
        keyed._computed = self._computed
        return keyed

    def made_by(self, *parts: Callable[..., Any]) -> Checkpoints:
        """Return the checkpoints of results that depend on the code of classes and functions.

        Raises
        ------
        RunError
            If there is a folder, and a source cannot be read (`digest_of_code`).
        """
        return self if self.folder is None else self.keyed(code=digest_of_code(*parts))

    def frame(self, name: str, compute: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        """Return a table, read if it is stored, else computed and stored."""
        path = self._path(name, "csv")
        if path is None:
            return pd.read_csv(BytesIO(compute().to_csv(index=False).encode()))
        if self._is_missing(path):
            self._write(path, compute().to_csv(index=False).encode())
        # Always read from its file: a first run and a resumed one have the same values.
        return pd.read_csv(BytesIO(path.read_bytes()))

    def has_frame(self, name: str) -> bool:
        """Return whether a table is stored."""
        path = self._path(name, "csv")
        return path is not None and not self._is_missing(path)

    def tensors(self, name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return named tensors, read if they are stored, else computed and stored."""
        tensors = self.read_tensors(name)
        if tensors is None:
            tensors = compute()
            self.write_tensors(name, tensors)
        return tensors

    def read_tensors(self, name: str) -> dict[str, Tensor] | None:
        """Return named tensors, or None if they are not stored.

        Raises
        ------
        RunError
            If the file is damaged.
        """
        path = self._path(name, "safetensors")
        if path is None or self._is_missing(path):
            return None
        try:
            return _tensors_from_bytes(path.read_bytes())
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise RunError(f"{path} is damaged ({error}); delete it to compute it again") from error

    def write_tensors(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Store named tensors, if there is a folder."""
        path = self._path(name, "safetensors")
        if path is not None:
            self._write(path, _tensors_to_bytes(tensors))

    def _write(self, path: Path, content: bytes) -> None:
        write_whole(path, content)
        self._computed.add(path)

    def _is_missing(self, path: Path) -> bool:
        return not path.exists() or (self._force and path not in self._computed)

    def _path(self, name: str, suffix: str) -> Path | None:
        if self.folder is None:
            return None
        return self.folder / f"{name}-{self.digest[:16]}.{suffix}"


def digest_of_tokens(tokens: Tensor) -> str:
    """Return the SHA-256 of token ids and their shape."""
    content = tokens.cpu().contiguous().numpy().tobytes()
    return hashlib.sha256(repr(tuple(tokens.shape)).encode() + content).hexdigest()


def _tensors_to_bytes(tensors: dict[str, Tensor]) -> bytes:
    return save_tensors(tensors, metadata={DIGEST: _digest(tensors)})


def _tensors_from_bytes(content: bytes) -> dict[str, Tensor]:
    tensors = load_tensors(content)
    size = int.from_bytes(content[:8], "little")
    if json.loads(content[8 : 8 + size])["__metadata__"][DIGEST] != _digest(tensors):
        raise ValueError("its numbers have changed")
    return tensors


def _digest(tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256(save_tensors(dict(sorted(tensors.items())))).hexdigest()

"""Results of long steps, stored by what they depend on: an interrupted run resumes from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.basis import Basis, HeadGrouping, parse_grouping
from manifoldkv.errors import ManifoldKVError, RunError
from manifoldkv.models.offloading import named_weights
from manifoldkv.runs.files import write_whole
from manifoldkv.runs.source import digest_of_code

DESCRIPTION = "manifoldkv"

T = TypeVar("T")


class Checkpoints:
    """Results of a run's steps, each in a file that is named by what it depends on.

    Parameters
    ----------
    folder : Path, optional
        Made if need be; nothing is stored if omitted.
    settings : dict, optional
        What everything that is stored depends on; values as JSON has them.
    force : bool
        Whether results that are there are computed again, once.
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
        """Return the SHA-256 of all settings, which files are named by."""
        return hashlib.sha256(json.dumps(self._settings, sort_keys=True).encode()).hexdigest()

    def keyed(self, **settings: Any) -> Checkpoints:
        """Return the same checkpoints for what depends on further settings."""
        found = Checkpoints(self.folder, self._settings | settings, force=self._force)
        found._computed = self._computed
        return found

    def made_by(self, *parts: Callable[..., Any]) -> Checkpoints:
        """Return the same checkpoints for what the code of some classes and functions makes.

        Raises
        ------
        RunError
            If there is a folder, and the source of one cannot be read (`digest_of_code`).
        """
        return self if self.folder is None else self.keyed(code=digest_of_code(*parts))

    def frame(self, name: str, compute: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        """Return a table: read if it is stored, else computed and stored."""
        path = self._path(name, "csv")
        if path is None:
            return pd.read_csv(BytesIO(compute().to_csv(index=False).encode()))
        if self._is_missing(path):
            self._write(path, compute().to_csv(index=False).encode())
        # Always read back: a first run and a repeated one see the same values.
        return pd.read_csv(BytesIO(path.read_bytes()))

    def has_frame(self, name: str) -> bool:
        """Return whether a table is stored."""
        path = self._path(name, "csv")
        return path is not None and not self._is_missing(path)

    def tensors(self, name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return named tensors: read if they are stored, else computed and stored.

        Raises
        ------
        RunError
            As in `read_tensors`.
        """
        known = self.read_tensors(name)
        if known is None:
            known = compute()
            self.write_tensors(name, known)
        return known

    def read_tensors(self, name: str) -> dict[str, Tensor] | None:
        """Return named tensors, or None if they are not stored.

        Raises
        ------
        RunError
            If the file is damaged; it is named, and computed again once it is deleted.
        """
        return self._read(name, lambda content: _tensors_from_bytes(content)[0])

    def write_tensors(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Store named tensors, if there is a folder."""
        path = self._path(name, "safetensors")
        if path is not None:
            self._write(path, _tensors_to_bytes(tensors, {}))

    def read_basis(self, name: str, heads: int) -> Basis | None:
        """Return a basis over `heads` KV heads, or None; raises what `read_tensors` does."""
        return self._read(name, lambda content: _basis_from_bytes(content, heads))

    def write_basis(self, name: str, basis: Basis) -> None:
        """Store a basis, if there is a folder."""
        path = self._path(name, "safetensors")
        if path is not None:
            self._write(path, _basis_to_bytes(basis))

    def _read(self, name: str, parse: Callable[[bytes], T]) -> T | None:
        path = self._path(name, "safetensors")
        if path is None or self._is_missing(path):
            return None
        try:
            return parse(path.read_bytes())
        except (SafetensorError, KeyError, ValueError, OSError, ManifoldKVError) as error:
            raise RunError(f"{path} is damaged ({error}); delete it to compute it again") from error

    def _write(self, path: Path, content: bytes) -> None:
        write_whole(path, content)
        self._computed.add(path)

    def _is_missing(self, path: Path) -> bool:
        return not path.exists() or (self._force and path not in self._computed)

    def _path(self, name: str, suffix: str) -> Path | None:
        if self.folder is None:
            return None
        return self.folder / f"{name}-{self.digest[:16]}.{suffix}"


def digest_of_model(model: PreTrainedModel) -> str:
    """Return the SHA-256 of the configuration and of all weights: of all that a model computes.

    The weights alone say neither how keys are rotated nor where scores are capped.
    """
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, tensor in named_weights(model):
        digest.update(name.encode())
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(content.numpy().data)
    return digest.hexdigest()


def digest_of_tokens(tokens: Tensor) -> str:
    """Return the SHA-256 of token ids and their shape."""
    content = tokens.cpu().contiguous().numpy().tobytes()
    return hashlib.sha256(repr(tuple(tokens.shape)).encode() + content).hexdigest()


def _basis_to_bytes(basis: Basis) -> bytes:
    tensors = {"down": basis.down.contiguous()}
    if not basis.orthonormal:
        tensors["up"] = basis.up.contiguous()
    return _tensors_to_bytes(tensors, {"grouping": str(basis.grouping.name)})


def _basis_from_bytes(content: bytes, heads: int) -> Basis:
    tensors, description = _tensors_from_bytes(content)
    grouping = HeadGrouping(parse_grouping(description["grouping"]), heads)
    return Basis(tensors["down"], tensors.get("up", tensors["down"]), grouping)


def _tensors_to_bytes(tensors: dict[str, Tensor], description: dict[str, Any]) -> bytes:
    # One entry: with several, their order in the file is another in every process.
    text = json.dumps(description | {"sha256": _digest(tensors)})
    return save_tensors(tensors, metadata={DESCRIPTION: text})


def _tensors_from_bytes(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = load_tensors(content)
    size = int.from_bytes(content[:8], "little")
    description = json.loads(json.loads(content[8 : 8 + size])["__metadata__"][DESCRIPTION])
    if description["sha256"] != _digest(tensors):
        raise ValueError("its numbers have changed")
    return tensors, description


def _digest(tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256(save_tensors(dict(sorted(tensors.items())))).hexdigest()

"""Results of long steps, kept by what they depend on: an interrupted run goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
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
from manifoldkv.errors import ManifoldKVError, OutputError
from manifoldkv.offloading import named_weights
from manifoldkv.output import write_whole

DESCRIPTION = "manifoldkv"

T = TypeVar("T")


class Steps:
    """A folder of results, each under the hash of its settings.

    Parameters
    ----------
    folder : Path
        Made if need be.
    force : bool
        Whether results that are there are computed again.
    """

    def __init__(self, folder: Path, *, force: bool = False) -> None:
        self._folder = folder
        self._force = force
        self._computed: set[Path] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def frame(
        self, name: str, settings: dict[str, Any], compute: Callable[[], pd.DataFrame]
    ) -> pd.DataFrame:
        """The table of a step: read if its settings are known, else computed and kept."""
        path = self._path(name, settings, "csv")
        if self._is_missing(path):
            write_whole(path, compute().to_csv(index=False).encode())
            self._computed.add(path)
        # Always read back: a first run and a repeated one see the same numbers.
        return pd.read_csv(BytesIO(path.read_bytes()))

    def bases(
        self,
        name: str,
        settings: dict[str, Any],
        heads: int,
        compute: Callable[[], dict[str, Basis]],
    ) -> dict[str, Basis]:
        """Named bases over `heads` KV heads, likewise; raises what `read_bases` does."""
        known = self.read_bases(name, settings, heads)
        if known is not None:
            return known
        self.write_bases(name, settings, compute())
        known = self.read_bases(name, settings, heads)
        assert known is not None
        return known

    def read_bases(
        self, name: str, settings: dict[str, Any], heads: int
    ) -> dict[str, Basis] | None:
        """Bases that are kept; None if there are none.

        Raises
        ------
        OutputError
            If the file is damaged; it is named, and computed again once it is deleted.
        """
        return self._read(name, settings, partial(_bases_from_bytes, heads=heads))

    def write_bases(self, name: str, settings: dict[str, Any], bases: dict[str, Basis]) -> None:
        self._write(name, settings, _bases_to_bytes(bases))

    def read_tensors(self, name: str, settings: dict[str, Any]) -> dict[str, Tensor] | None:
        """Named tensors that are kept, as `read_bases` bases."""
        return self._read(name, settings, lambda content: _tensors_from_bytes(content)[0])

    def write_tensors(
        self, name: str, settings: dict[str, Any], tensors: dict[str, Tensor]
    ) -> None:
        self._write(name, settings, _tensors_to_bytes(tensors, {}))

    def _read(self, name: str, settings: dict[str, Any], parse: Callable[[bytes], T]) -> T | None:
        path = self._path(name, settings, "safetensors")
        if self._is_missing(path):
            return None
        try:
            return parse(path.read_bytes())
        except (SafetensorError, KeyError, ValueError, OSError, ManifoldKVError) as error:
            raise OutputError(
                f"{path} is damaged ({error}); delete it to compute it again"
            ) from error

    def _write(self, name: str, settings: dict[str, Any], content: bytes) -> None:
        path = self._path(name, settings, "safetensors")
        write_whole(path, content)
        self._computed.add(path)

    def _is_missing(self, path: Path) -> bool:
        return not path.exists() or (self._force and path not in self._computed)

    def _path(self, name: str, settings: dict[str, Any], suffix: str) -> Path:
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        return self._folder / f"{name}-{digest[:16]}.{suffix}"


class Kept:
    """What a run has finished: in a folder, under all that it depends on, or nowhere.

    Parameters
    ----------
    folder : Path, optional
        Made if need be; nothing is kept if omitted.
    settings : dict, optional
        What everything that is kept depends on.
    """

    def __init__(self, folder: Path | None = None, settings: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self._steps = None if folder is None else Steps(folder)
        self._settings = settings or {}

    def under(self, **settings: Any) -> Kept:
        """The same folder for what depends on further settings."""
        return Kept(self.folder, self._settings | settings)

    def read(self, name: str) -> dict[str, Tensor] | None:
        """Named tensors; None if they are not kept. Raises what `Steps.read_bases` does."""
        return None if self._steps is None else self._steps.read_tensors(name, self._settings)

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        if self._steps is not None:
            self._steps.write_tensors(name, self._settings, tensors)

    def tensors(self, name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Read, or computed and written."""
        known = self.read(name)
        if known is None:
            known = compute()
            self.write(name, known)
        return known

    def read_basis(self, name: str, heads: int) -> Basis | None:
        """A basis over `heads` KV heads, likewise."""
        if self._steps is None:
            return None
        known = self._steps.read_bases(name, self._settings, heads)
        return None if known is None else known["basis"]

    def write_basis(self, name: str, basis: Basis) -> None:
        if self._steps is not None:
            self._steps.write_bases(name, self._settings, {"basis": basis})


NOWHERE = Kept()


def digest_of_model(model: PreTrainedModel) -> str:
    """SHA-256 of all weights."""
    digest = hashlib.sha256()
    for name, tensor in named_weights(model):
        digest.update(name.encode())
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(content.numpy().data)
    return digest.hexdigest()


def digest_of_tokens(tokens: Tensor) -> str:
    """SHA-256 of token ids and their shape."""
    content = tokens.cpu().contiguous().numpy().tobytes()
    return hashlib.sha256(repr(tuple(tokens.shape)).encode() + content).hexdigest()


def _bases_to_bytes(bases: dict[str, Basis]) -> bytes:
    tensors = {}
    described = {}
    for name, basis in bases.items():
        tensors[f"{name}.down"] = basis.down.contiguous()
        if not basis.orthonormal:
            tensors[f"{name}.up"] = basis.up.contiguous()
        described[name] = str(basis.grouping.name)
    return _tensors_to_bytes(tensors, {"groupings": described})


def _bases_from_bytes(content: bytes, heads: int) -> dict[str, Basis]:
    tensors, description = _tensors_from_bytes(content)
    found = {}
    for name, grouping in description["groupings"].items():
        down = tensors[f"{name}.down"]
        up = tensors.get(f"{name}.up", down)
        found[name] = Basis(down, up, HeadGrouping(parse_grouping(grouping), heads))
    return found


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

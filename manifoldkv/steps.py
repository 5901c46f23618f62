"""Results of long steps, kept by what they depend on: an interrupted run goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.basis import Basis, HeadGrouping
from manifoldkv.errors import OutputError
from manifoldkv.output import write_whole
from manifoldkv.surfaces import LayerBases


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
        self, name: str, settings: dict[str, Any], heads: int, compute: Callable[[], LayerBases]
    ) -> LayerBases:
        """The bases of a layer, likewise."""
        path = self._path(name, settings, "safetensors")
        if self._is_missing(path):
            write_whole(path, _bases_to_bytes(compute()))
            self._computed.add(path)
        try:
            return _bases_from_bytes(path.read_bytes(), heads)
        except (SafetensorError, KeyError, ValueError) as error:
            raise OutputError(
                f"{path} is damaged ({error}); delete it to compute it again"
            ) from error

    def _is_missing(self, path: Path) -> bool:
        return not path.exists() or (self._force and path not in self._computed)

    def _path(self, name: str, settings: dict[str, Any], suffix: str) -> Path:
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        return self._folder / f"{name}-{digest[:16]}.{suffix}"


def digest_of_model(model: PreTrainedModel) -> str:
    """SHA-256 of all weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def digest_of_tokens(tokens: Tensor) -> str:
    """SHA-256 of token ids and their shape."""
    content = tokens.cpu().contiguous().numpy().tobytes()
    return hashlib.sha256(repr(tuple(tokens.shape)).encode() + content).hexdigest()


def _bases_to_bytes(bases: LayerBases) -> bytes:
    tensors, groupings = {}, {}
    for site, by_rank in (("key", bases.keys), ("value", bases.values)):  # noqa: PD011
        for rank, basis in by_rank.items():
            tensors[f"{site}.{rank}.down"] = basis.down.contiguous()
            if not basis.orthonormal:
                tensors[f"{site}.{rank}.up"] = basis.up.contiguous()
            groupings[site] = str(basis.grouping.name)
    return save_tensors(tensors, metadata=groupings)


def _bases_from_bytes(content: bytes, heads: int) -> LayerBases:
    tensors = load_tensors(content)
    size = int.from_bytes(content[:8], "little")
    groupings = json.loads(content[8 : 8 + size])["__metadata__"]
    found: dict[str, dict[int, Basis]] = {"key": {}, "value": {}}
    for name, down in tensors.items():
        site, rank, part = name.split(".")
        if part == "down":
            grouping = groupings[site]
            grouping = HeadGrouping(int(grouping) if grouping.isdecimal() else grouping, heads)
            up = tensors.get(f"{site}.{rank}.up", down)
            found[site][int(rank)] = Basis(down, up, grouping)
    return LayerBases(dict(sorted(found["key"].items())), dict(sorted(found["value"].items())))

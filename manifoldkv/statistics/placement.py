"""Large tensors on the device of the model, in memory, or in a file."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

from manifoldkv.core.errors import RunError

SHARE = 0.5
"""Largest share of free bytes for the inputs and outputs of a layer; solvers need the others."""


class Placement:
    """Allocator of tensors on a device if they fit there, else in memory, else in files.

    Parameters
    ----------
    nbytes : int
        Total size of the tensors in bytes.
    device : torch.device
        Device on which the tensors are used.
    folder : Path, optional
        Folder of the files; the system's temporary one if omitted. Files are unlinked at once, and
        vanish with their tensors, even if the process is killed.
    """

    def __init__(self, nbytes: int, device: torch.device, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.gettempdir())
        self._device = device
        self.in_files = False
        if device.type != "meta" and nbytes > SHARE * free_bytes(device):
            self._device = torch.device("cpu")
            self.in_files = nbytes > SHARE * free_bytes(self._device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor, or raise `RunError` if the folder cannot hold it."""
        if not self.in_files:
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)
        elements = math.prod(shape)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, path = tempfile.mkstemp(prefix="activations-", dir=self.folder)
            try:
                _reserve(descriptor, max(1, elements * dtype.itemsize))
                tensor = torch.from_file(path, shared=True, size=elements, dtype=dtype)
            finally:
                os.close(descriptor)
                os.unlink(path)
        except OSError as error:
            raise RunError(
                f"activations of {elements * dtype.itemsize / 2**30:.1f} GiB fit neither into "
                f"memory nor into {self.folder}: {error.strerror}; use fewer calibration "
                "sequences, or a folder (TMPDIR) on another disk"
            ) from error
        return tensor.view(tuple(shape))


def _reserve(descriptor: int, nbytes: int) -> None:
    """Set the size of a file and allocate its blocks: writing to a full disk kills the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:
        os.ftruncate(descriptor, nbytes)


def free_bytes(device: torch.device) -> int:
    """Return the number of free bytes of a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)

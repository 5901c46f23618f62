"""Memory of constants, and of a step: its peak beyond the memory in use before it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.cache import compressed
from manifoldkv.plan.plan import CompressionPlan

MMAP_THRESHOLD = -3
"""Number of the parameter for glibc's mallopt."""
SMALLEST_MAPPING = 1 << 16
LARGEST_THRESHOLD = 32 << 20
"""Limit up to which glibc raises the threshold as a process runs."""


@torch.no_grad()
def constant_bytes(model: PreTrainedModel, plan: CompressionPlan, tokens: Tensor) -> int:
    """Return the bytes that attention holds beside caches once a few tokens were decoded.

    The tensors of the plan itself are not counted.

    Parameters
    ----------
    model : PreTrainedModel
        The model the plan was made for.
    plan : CompressionPlan
        From `compress`.
    tokens : Tensor
        Token ids of the model, (sequences, length).
    """
    with compressed(model, plan) as new_cache:
        cache = new_cache()
        for token in tokens[:1, : plan.sinks + 2].to(model.device).split(1, dim=1):
            model(input_ids=token, past_key_values=cache)
        return new_cache.constant_nbytes()


def peak_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak of the memory in use during a step, less that before it, in bytes.

    On a GPU this is memory allocated by torch. On a CPU it is the resident memory of the process,
    from the kernel's high-water mark (``VmHWM``), which is reset before the step, while the C
    library releases freed memory at once.

    Parameters
    ----------
    step : callable
        Called once, without arguments.
    device : torch.device
        Device of the step.

    Returns
    -------
    int or None
        None on a CPU where the operating system is not Linux with glibc.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    libc = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(libc, "mallopt"):
        return None
    with _freed_at_once(libc):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = _resident("VmRSS")
        step()
        return max(0, _resident("VmHWM") - before)


@contextmanager
def _freed_at_once(libc: ctypes.CDLL) -> Iterator[None]:
    """Release freed memory to the operating system inside the block."""
    libc.mallopt(MMAP_THRESHOLD, SMALLEST_MAPPING)
    libc.malloc_trim(0)
    try:
        yield
    finally:
        libc.mallopt(MMAP_THRESHOLD, LARGEST_THRESHOLD)


def _resident(name: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])

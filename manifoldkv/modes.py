"""Global modes of torch: those of callers, and the one set that the package runs in."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import isgeneratorfunction
from threading import Lock
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

AUTOCAST_DEVICES = "cpu", "cuda", "mps", "xpu"
CPU = torch.device("cpu")


@contextmanager
def own_modes(*, gradients: bool = True) -> Iterator[None]:
    """Run the block in torch's own defaults, whatever modes the caller has set.

    No autocast and no inference mode; tensors are made on the CPU, in float32. Results then do not
    depend on the caller, and tensors that outlive the block can be used in any mode.

    Parameters
    ----------
    gradients : bool
        Whether gradients are recorded.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        for device in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device() != CPU:
            stack.enter_context(CPU)
        if _DTYPE.differs():
            stack.enter_context(_DTYPE.restored())
        stack.enter_context(torch.set_grad_enabled(gradients))
        yield


def in_own_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function, or a generator function, that runs in `own_modes`.

    The modes of the caller are back between the items of a generator.
    """
    if not isgeneratorfunction(function):

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            with own_modes():
                return function(*args, **kwargs)

        return called

    @wraps(function)
    def generated(*args: P.args, **kwargs: P.kwargs) -> Generator[Any, None, None]:
        items: Generator[Any, None, None] = function(*args, **kwargs)
        try:
            while True:
                with own_modes():
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                yield item
        finally:
            with own_modes():
                items.close()

    return generated  # type: ignore[return-value]  # a generator, as T is


class _DefaultDtype:
    """The default dtype of torch, which all threads share, unlike the other modes.

    The first block to be entered sets float32, and the last one to be left sets the caller's again.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._blocks = 0
        self._of_caller = torch.float32

    def differs(self) -> bool:
        """Return whether the caller has another default than float32."""
        return self._blocks > 0 or torch.get_default_dtype() != torch.float32

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set float32 inside the block."""
        with self._lock:
            if not self._blocks:
                self._of_caller = torch.get_default_dtype()
                torch.set_default_dtype(torch.float32)
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks:
                    torch.set_default_dtype(self._of_caller)


_DTYPE = _DefaultDtype()

"""Threads for compiled kernels, which release the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch


def run_in_parts(count: int, kernel: Callable[[int, int], None], most: int) -> None:
    """Run a kernel over ``range(count)`` in parts, on torch's number of threads.

    Parameters
    ----------
    count : int
        Number of items.
    kernel : callable
        Takes the first item of a part and its end.
    most : int
        Most threads that are worth their start.
    """
    threads = max(1, min(torch.get_num_threads(), most))
    if threads == 1:
        kernel(0, count)
        return
    bounds = [count * part // threads for part in range(threads + 1)]
    others = [
        _pool(threads - 1).submit(kernel, first, stop) for first, stop in pairwise(bounds[1:])
    ]
    kernel(0, bounds[1])
    for other in others:
        other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="manifoldkv")

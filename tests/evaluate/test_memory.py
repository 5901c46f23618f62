import sys

import pytest
import torch

from manifoldkv.evaluate.memory import peak_bytes

MEBIBYTE = 1 << 20
LARGE = 40 * MEBIBYTE
"""Above the 32 MiB from which glibc maps every tensor by itself, whatever was freed before."""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
@pytest.mark.parametrize("tensors", [1, 3])
def test_the_peak_is_what_is_held_at_once(tensors: int) -> None:
    held = torch.ones(LARGE, dtype=torch.uint8)  # not counted

    def step() -> None:
        for _ in range(2):  # what is freed is not counted twice
            made = [held + n for n in range(tensors)]
            del made

    # Other threads of the process, and pages that were swapped out, may add to a measurement.
    found = min(peak_bytes(step, held.device) for _ in range(3))
    assert found == pytest.approx(tensors * LARGE, abs=2 * MEBIBYTE)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_what_stays_is_counted() -> None:
    kept = []
    found = peak_bytes(lambda: kept.append(torch.ones(4 * MEBIBYTE)), torch.device("cpu"))
    assert found == pytest.approx(16 * MEBIBYTE, abs=2 * MEBIBYTE)

"""`train_codes.py` as a user runs it, on few codes."""

import re

from manifoldkv.plan.formats.trellis import GAUSSIAN_DISTORTION
from tests.studies.running import finished


def test_codes_are_printed_and_those_of_the_package_are_no_worse() -> None:
    done = finished("train_codes", "--codes", 40)
    rows = re.findall(r"Code\((\d+), (\d+), ([\d.e-]+)\),  # (\d): ([\d.e-]+)", done.out)
    assert [int(row[3]) for row in rows] == [1, 0, *range(2, 9)]
    assert all(0 < int(row[0]) < 1 << 32 and float(row[2]) > 0 for row in rows)
    for row in rows:
        assert float(row[4]) > 0.97 * GAUSSIAN_DISTORTION[int(row[3]) or 0.5]
    halves = re.findall(r"^([\d.]+) bits: ([\d.e-]+)", done.out, re.MULTILINE)
    assert [float(bits) for bits, _ in halves] == [half / 2 for half in range(1, 16, 2)]
    assert all(float(error) > 0.95 * GAUSSIAN_DISTORTION[float(bits)] for bits, error in halves)

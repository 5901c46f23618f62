"""`train_codes.py` as a user runs it, on few codes."""

import re

from manifoldkv.coding.trellis import GAUSSIAN_DISTORTION
from tests.studies.running import finished


def test_codes_are_printed_and_those_of_the_package_are_no_worse() -> None:
    done = finished("train_codes", "--codes", 40)
    rows = re.findall(r"Code\((\d+), (\d+), ([\d.e-]+)\),  # (\d) bits: ([\d.e-]+)", done.out)
    assert [int(row[3]) for row in rows] == [*range(1, 9)]
    assert all(0 < int(row[0]) < 1 << 32 and float(row[2]) > 0 for row in rows)
    for row, distortion in zip(rows, GAUSSIAN_DISTORTION[1:], strict=True):
        assert float(row[4]) > 0.97 * distortion

"""What the digest of code sees."""

import importlib
import sys
from pathlib import Path

import pytest

from manifoldkv.runs.source import digest_of_code

MEASURING = """
import constants


def measure():
    return constants.SCALE


class Measure:
    pass
"""


@pytest.mark.parametrize("name", ["measure", "Measure"])
def test_functions_and_classes_are_known_by_all_the_code_they_refer_to(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)

    def digest(measuring: str = MEASURING, constants: str = "SCALE = 1") -> str:
        (tmp_path / "measuring.py").write_text(measuring)
        (tmp_path / "constants.py").write_text(constants)
        for module in ("measuring", "constants"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        importlib.invalidate_caches()
        return digest_of_code(getattr(importlib.import_module("measuring"), name))

    found = [digest(), digest(MEASURING + "EDITED = True\n"), digest(constants="SCALE = 2 * 10")]
    assert len(set(found)) == 3
    assert digest() == found[0]

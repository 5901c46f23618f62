"""Coverage-guided fuzzing of plan loading; needs atheris, which the test suite does not.

    pip install atheris
    python -m tests.fuzz_plan -max_total_time=60

The bytes are a description, a zero byte, and tensors; the checksums of both are made right.
Anything but our own error ends the run with the input that caused it.
"""

import json
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["manifoldkv"]):
    from manifoldkv import CompressionPlan
    from manifoldkv.core.errors import PlanError
    from manifoldkv.plan.files import DESCRIPTION, TENSORS

from tests.families import tiny_model
from tests.plan.test_hardening import with_tensors
from tests.plans import random_plan

FOLDER = Path(tempfile.mkdtemp())


def try_to_load(content: bytes) -> None:
    said, _, payload = content.partition(b"\0")
    try:
        description = json.loads(said)
        said = json.dumps(with_tensors(description, payload)).encode()
    except (ValueError, TypeError, RecursionError):
        pass  # what is no JSON object is tried as it is
    (FOLDER / DESCRIPTION).write_bytes(said)
    (FOLDER / TENSORS).write_bytes(payload)
    try:
        CompressionPlan.load(FOLDER)
    except PlanError:
        return


def main() -> None:
    corpus = Path(tempfile.mkdtemp())
    for number, options in enumerate(({}, {"oblique": True}, {"sinks": 2, "rotary": "post"})):
        plan = random_plan(tiny_model("llama"), **options)
        plan.save(FOLDER)
        content = (FOLDER / DESCRIPTION).read_bytes() + b"\0" + (FOLDER / TENSORS).read_bytes()
        (corpus / str(number)).write_bytes(content)
    atheris.Setup([*sys.argv, "-max_len=40000", "-rss_limit_mb=4096", str(corpus)], try_to_load)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

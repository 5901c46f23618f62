"""vLLM serves packed pages on a CPU; the package must be installed, for its entry point."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_texts_are_those_of_transformers_and_bad_input_is_refused(tmp_path: Path) -> None:
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": os.getcwd()}
    run = [sys.executable, "-m", "tests.serve.engines.vllm_run", str(tmp_path)]
    subprocess.run(run, env=environment, check=True, timeout=900)
    found = json.loads((tmp_path / "found.json").read_text())
    for name in ("together", "again", "alone"):
        assert found[name] == found["expected"]
    assert sum(found["preemptions"]) > 0
    sentences = ["needs a plan", "other weights", "tensor parallelism over 2", "1024", "fp8"]
    assert len(found["refused"]) == len(sentences)
    for error, sentence in zip(found["refused"], sentences, strict=True):
        assert sentence in error

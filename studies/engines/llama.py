"""llama.cpp, in an environment of its own, on GGUF files of both checkpoints."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from engines.base import Asked, Engine, EngineError, installed_version

WORKER = Path(__file__).with_name("llama_worker.py")
CACHES = ("f16", "q8_0", "q4_0")
"""Types of caches, as llama.cpp names them."""
CACHE_TOKENS = 4096
"""Tokens of the caches whose sizes are read from the log, which rounds to 0.01 MiB."""


class LlamaCpp(Engine):
    """Both models as GGUF files of the same type, with caches of every type.

    Parameters
    ----------
    asked : Asked
        The texts and how they are measured.
    python : str
        An interpreter that has llama-cpp-python.
    write : callable
        Writes the GGUF file of every checkpoint, and returns their paths.
    """

    name = "llama.cpp"
    install = "pip install llama-cpp-python  # builds llama.cpp"
    apart = (WORKER,)

    def __init__(self, asked: Asked, python: str, write: Callable[[], dict[str, Path]]) -> None:
        super().__init__(asked)
        self.python, self._write = python, write

    @cached_property
    def files(self) -> dict[str, Path]:
        return self._write()

    def version(self) -> str:
        return installed_version(self.python, "llama-cpp-python")

    def caches(self) -> pd.DataFrame:
        found = self._ask("caches", types=CACHES, tokens=CACHE_TOKENS)
        return found.assign(tokens_held=None)

    def texts(self) -> pd.DataFrame:
        return self._ask(
            "texts",
            prompts=self.asked.prompts,
            new_tokens=self.asked.new_tokens,
            threads=self.asked.threads,
        )

    def speeds(self, tokens: int) -> pd.DataFrame:
        return self._ask(
            "speeds",
            types=CACHES,
            ids=self.asked.long_text[:tokens],
            steps=self.asked.steps,
            rounds=self.asked.rounds,
            threads=self.asked.threads,
        )

    def losses(self, windows: list[list[int]]) -> pd.DataFrame:
        """Return ``checkpoint``, ``cache``, ``window`` (its number) and ``nll``, nats per token."""
        return self._ask("losses", types=CACHES, windows=windows, threads=self.asked.threads)

    def close(self) -> None:
        """Nothing is held between two questions."""

    def _ask(self, task: str, **given: Any) -> pd.DataFrame:
        models = {name: str(path) for name, path in self.files.items()}
        done = subprocess.run(
            [self.python, str(WORKER)],
            input=json.dumps({"task": task, "models": models, **given}),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise EngineError(f"llama.cpp has failed: {said[-1]}")
        return pd.DataFrame(json.loads(done.stdout.strip().splitlines()[-1]))

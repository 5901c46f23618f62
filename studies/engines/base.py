"""What every engine is asked, and how it answers."""

from __future__ import annotations

import json
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from manifoldkv import ManifoldKVError

ORIGINAL, EXPORTED = "original", "exported"
SECONDS_TO_ANSWER = 60
"""How long an interpreter may take to say which packages it has."""

_VERSION = """
import importlib.metadata as metadata, sys
for name in sys.argv[1:]:
    try:
        print(name, metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
"""


class EngineError(ManifoldKVError):
    """An engine is not installed, or has failed; the others can still be asked."""


@dataclass(frozen=True)
class Asked:
    """What all engines are asked.

    Parameters
    ----------
    folders : dict of str to str
        The checkpoints, as transformers loads them, by `ORIGINAL` and `EXPORTED`.
    dtype : str
        That transformers and vLLM compute in.
    prompts : list of list of int
        Token ids that greedy texts go on from.
    new_tokens : int
        Of each greedy text.
    long_text : list of int
        Token ids whose first fill a cache whose speed is measured.
    steps, rounds : int
        Every checkpoint takes so many steps in a turn, and so many turns.
    threads : int
        Of every engine.
    """

    folders: dict[str, str]
    dtype: str
    prompts: list[list[int]]
    new_tokens: int
    long_text: list[int]
    steps: int
    rounds: int
    threads: int


class Engine(ABC):
    """An engine with both checkpoints; it is closed when it has answered."""

    name: str
    install: str
    """The line that installs it."""
    apart: tuple[Path, ...] = ()
    """Files of this folder that run in the environment of the engine."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked

    @abstractmethod
    def version(self) -> str:
        """Return package and version.

        Raises
        ------
        EngineError
            If the engine is not there.
        """

    @abstractmethod
    def caches(self) -> pd.DataFrame:
        """Return ``checkpoint``, ``cache`` (dtype), ``bytes_per_token`` and ``tokens_held``.

        These are what the engine itself reports; tokens held are those of a cache whose size in
        bytes is given to the engine, empty for others.
        """

    @abstractmethod
    def texts(self) -> pd.DataFrame:
        """Return ``checkpoint``, ``prompt`` (its number) and ``ids`` of greedy texts."""

    @abstractmethod
    def speeds(self, tokens: int) -> pd.DataFrame:
        """Return ``checkpoint``, ``cache``, ``round`` and ``tokens_per_second``.

        What is timed is the decoding of one sequence over a cache of so many tokens. Within a round
        all checkpoints take turns.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what is held; a later question takes it again."""


def installed_version(python: str, *packages: str) -> str:
    """Return name and version of the first of some packages that an interpreter has.

    Raises
    ------
    EngineError
        If it has none, or there is no such interpreter.
    """
    try:
        done = subprocess.run(
            [python, "-c", _VERSION, *packages],
            capture_output=True,
            text=True,
            check=True,
            timeout=SECONDS_TO_ANSWER,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"{python} is no Python that runs: {error}") from error
    if not done.stdout.strip():
        raise EngineError(f"{' or '.join(packages)} is not installed for {python}")
    return done.stdout.strip()


def text_rows(checkpoint: str, texts: Iterable[Sequence[int]]) -> Iterator[dict[str, object]]:
    """Yield rows of `Engine.texts`; ids are a JSON list in one cell."""
    for number, ids in enumerate(texts):
        yield {"checkpoint": checkpoint, "prompt": number, "ids": json.dumps(list(map(int, ids)))}

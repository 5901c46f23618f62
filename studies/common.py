"""What the studies share: how they read folders, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manifoldkv.errors import ManifoldKVError


def folder_named(name: str) -> Path:
    """Refuse an empty name as a folder, which pathlib takes for the current one."""
    if not name.strip():
        raise argparse.ArgumentTypeError("the name is empty; the current folder is '.'")
    return Path(name)


@contextmanager
def ends_in_one_line(study: str, *, resumes: bool = True) -> Iterator[None]:
    """End the process with a sentence and an exit code where the block cannot go on.

    Parameters
    ----------
    study : str
        Which the sentence begins with.
    resumes : bool
        Whether the same command goes on where it was when Ctrl-C has met it.
    """
    try:
        yield
    except ManifoldKVError as error:
        print(f"{study}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt as interruption:
        left = "the same command goes on from there" if resumes else "nothing is saved"
        print(f"\n{study}: interrupted; {left}", file=sys.stderr)
        raise SystemExit(130) from interruption

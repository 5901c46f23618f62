"""Text sources: what a user may calibrate and measure on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifoldkv.errors import ArgumentError
from manifoldkv.text.docstrings import HELD_OUT_FRACTION, Split, read_docstrings, read_pydoc_topics

HELP = (
    "a .txt file, a .jsonl file with a 'text' field, 'docstrings' (of installed packages), "
    "'pydoc-topics', or a Hub data set as NAME[:CONFIG[:SPLIT]] "
    "(wikitext:wikitext-2-raw-v1, allenai/c4:en), read as a stream"
)


OWN = "own"
"""The name of what a model writes itself, which no source has."""

LONGEST_LINE = 2000
"""How far back, in characters, the split of a .txt file looks for the end of a line."""


WIKITEXT = ("wikitext", "Salesforce/wikitext")
"""Data sets whose rows are the lines of one text; perplexities are quoted for rows joined by two
line feeds."""


_HELD_OUT_EVERY = round(1 / HELD_OUT_FRACTION)


@dataclass(frozen=True)
class TextSource:
    """A text that can be read from the start as often as needed.

    Parameters
    ----------
    name : str
        As the user typed it.
    documents : callable
        Given ``"calibration"``, ``"held-out"`` or None for the whole text, yields documents (str).
    """

    name: str
    documents: Callable[[Split | None], Iterator[str]]


def open_text(name: str) -> TextSource:
    """Return a text source, checked that it can be read.

    Four fifths of a text are its calibration split, the rest is held out: of ``docstrings`` by a
    hash of each document, of a ``.txt`` file and of WikiText the last fifth of the characters (cut
    at a line), of everything else every fifth document.

    Parameters
    ----------
    name : str
        A ``.txt`` file, a ``.jsonl`` file with a ``text`` field in every line, ``docstrings``,
        ``pydoc-topics``, or a Hub data set as ``name[:config[:split]]`` with a ``text`` column
        (``wikitext:wikitext-2-raw-v1``), its training split if none is named.

    Raises
    ------
    ArgumentError
        If the file is missing, unreadable or empty, or the name is not a text source.
    """
    if not name.strip():
        raise ArgumentError(f"the name of the text is empty; a text is {HELP}")
    if name == OWN:
        raise ArgumentError(
            f"{OWN} is calibration text that a model writes itself "
            "(manifoldkv.recipes.own.own_text): name another one"
        )
    if name == "docstrings":
        return TextSource(name, read_docstrings)
    if name == "pydoc-topics":
        return TextSource(name, _every_fifth(read_pydoc_topics))
    path = Path(name)
    if path.suffix == ".txt":
        _check_file(path)
        return TextSource(name, lambda split: _read_txt(path, split))
    if path.suffix == ".jsonl":
        _check_file(path)
        return TextSource(name, _every_fifth(lambda: _read_jsonl(path)))
    if path.exists() or name.startswith((".", "/", "~")):
        raise ArgumentError(f"{name} is neither a .txt nor a .jsonl file; a text is {HELP}")
    if name.count(":") > 2:
        raise ArgumentError(f"{name} has more than a name, a configuration and a split")
    if name.partition(":")[0] in WIKITEXT:
        return TextSource(name, lambda split: _cut("\n\n".join(_read_hub(name)), split))
    return TextSource(name, _every_fifth(lambda: _read_hub(name)))


def _check_file(path: Path) -> None:
    try:
        with path.open(encoding="utf-8") as file:
            start = file.read(1 << 16)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 ({error.reason})"
        raise ArgumentError(f"cannot read text {path}: {reason}") from error
    if not start.strip():
        raise ArgumentError(f"text {path} is empty")


def _read_txt(path: Path, split: Split | None) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"cannot read text {path}: not UTF-8 ({error.reason})") from error
    yield from _cut(text, split)


def _cut(text: str, split: Split | None) -> Iterator[str]:
    cut = round(len(text) * (1 - HELD_OUT_FRACTION))
    cut = text.rfind("\n", max(0, cut - LONGEST_LINE), cut) + 1 or cut
    yield {None: text, "calibration": text[:cut], "held-out": text[cut:]}[split]


def _read_jsonl(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text_field(path, number, line)
    except UnicodeDecodeError as error:
        raise ArgumentError(f"cannot read text {path}: not UTF-8 ({error.reason})") from error


def _text_field(path: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    # Not JSON, or JSON with too long a number, too many brackets, or no such field.
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ArgumentError(f"{path}, line {number}: no JSON with a 'text' field") from error
    if not isinstance(text, str):
        raise ArgumentError(f"{path}, line {number}: 'text' is not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"{path}, line {number}: 'text' holds \\u{ord(text[error.start]):04x}, half of a "
            "character: write both halves, or none"
        ) from error
    return text


def _read_hub(name: str) -> Iterator[str]:
    import datasets  # slow to import, needed by nothing else

    data_set, config, split = (*name.split(":"), None, None)[:3]
    try:
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(
            data_set, config, split=split or "train", streaming=True
        )
        for row in rows:
            if isinstance(row["text"], str):  # some data sets have rows without text
                yield row["text"]
    except KeyError as error:
        raise ArgumentError(f"data set {name} has no column 'text'") from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ArgumentError(
            f"cannot read data set {name} from the Hub: {reason}; a text is {HELP}"
        ) from error


def _every_fifth(
    read: Callable[[], Iterator[str]],
) -> Callable[[Split | None], Iterator[str]]:
    def documents(split: Split | None) -> Iterator[str]:
        for index, document in enumerate(document for document in read() if document.strip()):
            held_out = index % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
            if split is None or held_out == (split == "held-out"):
                yield document

    return documents

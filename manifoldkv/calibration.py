"""From a text source to token ids: text, split, sampler."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv.docstrings import HELD_OUT_FRACTION, Split, read_docstrings, read_pydoc_topics
from manifoldkv.errors import TextError

HELP = (
    "a .txt file, a .jsonl file with a 'text' field, 'docstrings' (of installed packages), "
    "'pydoc-topics', or a Hub data set as NAME[:CONFIG[:SPLIT]] "
    "(wikitext:wikitext-2-raw-v1, allenai/c4:en), read as a stream"
)
SEQUENCES = 64
LENGTH = 512
"""Calibration windows drawn from a text source that is given as such."""
LONGEST_LINE = 2000
"""How far back, in characters, the split of a .txt file looks for the end of a line."""
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

WIKITEXT = ("wikitext", "Salesforce/wikitext")
"""Data sets whose rows are the lines of one text; perplexities are quoted for rows joined by two
line feeds."""

LOG = logging.getLogger(__name__)
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
    """Find a text source and check that it can be read.

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
    TextError
        If the file is missing, unreadable or empty, or the name is not a text source.
    """
    if not name.strip():
        raise TextError(f"the name of the text is empty; a text is {HELP}")
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
        raise TextError(f"{name} is neither a .txt nor a .jsonl file; a text is {HELP}")
    if name.count(":") > 2:
        raise TextError(f"{name} has more than a name, a configuration and a split")
    if name.partition(":")[0] in WIKITEXT:
        return TextSource(name, lambda split: _cut("\n\n".join(_read_hub(name)), split))
    return TextSource(name, _every_fifth(lambda: _read_hub(name)))


def sample_tokens(
    source: TextSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequences: int | None,
    length: int,
    split: Split | None = None,
) -> Tensor:
    """The sampler ``consecutive``: the first windows of the text, one after the other.

    Every document begins with what the tokenizer puts before a text (Llama's start token); where
    it puts nothing, a document ends with the end-of-sequence token, if there is one. A model that
    is shown other bounds than it was trained with predicts far worse. Windows do not overlap and
    may begin inside a document. No more of the text is read than is needed.

    Parameters
    ----------
    source : TextSource
        From `open_text`.
    tokenizer : PreTrainedTokenizerBase
        The model's.
    sequences : int or None
        How many windows; None for all that the text has.
    length : int
        Tokens in each.
    split : {"calibration", "held-out"}, optional
        The whole text if omitted.

    Returns
    -------
    Tensor
        (sequences, length), int64.

    Raises
    ------
    TextError
        If the text is empty or too short; the message says how much there is.
    """
    if length < 1 or (sequences is not None and sequences < 1):
        raise TextError(
            f"cannot read {sequences} sequences of {length} tokens: both must be at least 1"
        )
    wanted = math.inf if sequences is None else sequences * length
    needs_end = not tokenizer("")["input_ids"] and tokenizer.eos_token_id is not None
    end = [tokenizer.eos_token_id] if needs_end else []
    ids: list[int] = []
    for document in source.documents(split):
        if document.strip():
            ids += tokenizer(document, verbose=False)["input_ids"] + end
        if len(ids) >= wanted:
            return torch.tensor(ids[: int(wanted)]).view(-1, length)
    if sequences is None and len(ids) >= length:
        return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    part = f"{split} part of " if split else ""
    if not ids:
        raise TextError(f"the {part}text {source.name} is empty")
    if len(ids) < length:
        raise TextError(
            f"the {part}text {source.name} has {len(ids):,} tokens, too few for even one sequence "
            f"of {length:,}: ask for sequences of at most {len(ids):,} tokens"
        )
    raise TextError(
        f"the {part}text {source.name} has {len(ids):,} tokens, too few for {sequences or 1} "
        f"sequences of {length}: ask for at most {len(ids) // length} sequences, or for shorter "
        "ones"
    )


def positions(model: PreTrainedModel) -> int:
    """Count the tokens of one text that a model takes."""
    return model.config.get_text_config().max_position_embeddings


def check_length(model: PreTrainedModel, length: int) -> None:
    """Raise `TextError` if a sequence of so many tokens is longer than the model takes."""
    if length > positions(model):
        raise TextError(
            f"sequences of {length:,} tokens are longer than the {positions(model):,} positions of "
            "the model: ask for shorter ones"
        )


def checked_tokens(model: PreTrainedModel, tokens: Tensor, *, shortest: int = 1) -> Tensor:
    """Refuse token ids that a model cannot read, and return the others.

    Parameters
    ----------
    model : PreTrainedModel
        Whose vocabulary and positions count.
    tokens : Tensor
        (sequences, length), of any integer dtype.
    shortest : int
        The least length that makes sense.

    Returns
    -------
    Tensor
        The same ids as int64.

    Raises
    ------
    TextError
        If they are not such a tensor, or an id or the length is more than the model takes.
    """
    wanted = f"(sequences, length{f' > {shortest - 1}' if shortest > 1 else ''})"
    if not isinstance(tokens, Tensor):
        raise TextError(
            f"tokens must be a tensor of shape {wanted}, not {type(tokens).__name__}: "
            "torch.tensor makes one of a list"
        )
    shaped = tokens.ndim == 2 and tokens.numel() > 0 and tokens.shape[1] >= shortest
    if tokens.dtype not in INTEGERS or not shaped:
        raise TextError(
            f"tokens must be integers of shape {wanted}, not {tokens.dtype} {tuple(tokens.shape)}"
        )
    check_length(model, tokens.shape[1])
    tokens = tokens.long()
    vocabulary = model.get_input_embeddings().num_embeddings
    smallest, largest = (int(end) for end in tokens.aminmax())
    if smallest < 0 or largest >= vocabulary:
        outside = smallest if smallest < 0 else largest
        raise TextError(
            f"token id {outside} is not one of the model's, which are 0 to {vocabulary - 1}: read "
            "the text with the tokenizer of this model"
        )
    return tokens


def calibration_tokens(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    sequences: int | None = None,
    length: int | None = None,
) -> tuple[str, Tensor]:
    """Name and token ids of the calibration data; of a text, so many windows of such a length.

    Raises
    ------
    TextError
        If the tokens are not a (sequences, length) tensor of the model's ids, the text is too
        short, or the sequences are longer than the model takes.
    """
    if not isinstance(tokens, str | TextSource):
        return "tokens", checked_tokens(model, tokens)
    source = open_text(tokens) if isinstance(tokens, str) else tokens
    if length is None:
        length = min(LENGTH, positions(model))
    check_length(model, length)
    sequences = SEQUENCES if sequences is None else sequences
    LOG.info("reading %d × %d tokens of %s", sequences, length, source.name)
    ids = sample_tokens(
        source, _tokenizer(model), sequences=sequences, length=length, split="calibration"
    )
    return source.name, checked_tokens(model, ids)


def read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Read the tokenizer that is saved with a model, in a folder or on the Hub.

    Raises
    ------
    TextError
        If there is none, or it is damaged.
    """
    missing = "no tokenizer is saved with it (tokenizer.save_pretrained writes one)"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].strip()
        if reason.endswith(":"):  # a list of all that was looked for follows
            raise TextError(missing) from error
        raise TextError(f"its tokenizer cannot be read: {reason}") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # Where some families find no file, they make a tokenizer that knows no word.
        raise TextError(missing)
    return tokenizer


def _tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    name = model.config._name_or_path
    try:
        return read_tokenizer(name)
    except TextError as error:
        raise TextError(f"model {name!r}: {error}; or pass token ids instead of a text") from error


def _check_file(path: Path) -> None:
    try:
        with path.open(encoding="utf-8") as file:
            start = file.read(1 << 16)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 ({error.reason})"
        raise TextError(f"cannot read text {path}: {reason}") from error
    if not start.strip():
        raise TextError(f"text {path} is empty")


def _read_txt(path: Path, split: Split | None) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"cannot read text {path}: not UTF-8 ({error.reason})") from error
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
        raise TextError(f"cannot read text {path}: not UTF-8 ({error.reason})") from error


def _text_field(path: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise TextError(f"{path}, line {number}: no JSON with a 'text' field") from error
    if not isinstance(text, str):
        raise TextError(f"{path}, line {number}: 'text' is not a string")
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
        raise TextError(f"data set {name} has no column 'text'") from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TextError(
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

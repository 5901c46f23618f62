"""Token ids of text sources: windows of a split, and checks."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv.errors import ArgumentError, first_line
from manifoldkv.modes import in_own_modes
from manifoldkv.text.docstrings import Split
from manifoldkv.text.sources import TextSource, open_text

SEQUENCES = 64
LENGTH = 512
"""Default number and length of calibration windows."""
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

LOG = logging.getLogger(__name__)


@in_own_modes
def sample_tokens(
    source: TextSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequences: int | None,
    length: int,
    split: Split | None = None,
) -> Tensor:
    """Return the first windows of a text, (sequences, length), int64.

    Documents begin with the tokenizer's start token or, if it has none, end with its
    end-of-sequence token, if any: a model has a far higher loss without the bounds of its training.
    Windows do not overlap and may begin inside a document. The text is read only as far as needed.

    Parameters
    ----------
    source : TextSource
        Source of the documents.
    tokenizer : PreTrainedTokenizerBase
        Tokenizer of the model.
    sequences : int or None
        Number of windows; None for all of the text.
    length : int
        Number of tokens of a window.
    split : {"calibration", "held-out"}, optional
        Split of the text; the whole text if omitted.

    Raises
    ------
    ArgumentError
        If the text is empty or too short; the message has its length.
    """
    check_size(sequences, length)
    needed = math.inf if sequences is None else sequences * length
    needs_end = not tokenizer("")["input_ids"] and tokenizer.eos_token_id is not None
    end = [tokenizer.eos_token_id] if needs_end else []
    ids: list[int] = []
    with tqdm(total=sequences, desc="sequences", disable=None, leave=False) as bar:
        for document in source.documents(split):
            if document.strip():
                ids += tokenizer(document, verbose=False)["input_ids"] + end
            bar.update(int(min(len(ids), needed)) // length - bar.n)
            if len(ids) >= needed:
                return torch.tensor(ids[: int(needed)]).view(-1, length)
    if sequences is None and len(ids) >= length:
        return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    part = f"{split} part of " if split else ""
    if not ids:
        raise ArgumentError(f"the {part}text {source.name} is empty")
    if len(ids) < length:
        raise ArgumentError(
            f"the {part}text {source.name} has {len(ids):,} tokens, too few for even one sequence "
            f"of {length:,}: ask for sequences of at most {len(ids):,} tokens"
        )
    raise ArgumentError(
        f"the {part}text {source.name} holds {len(ids) // length:,} sequences of {length:,} tokens "
        f"({len(ids):,} tokens), not {sequences or 1:,}: ask for fewer or shorter sequences"
    )


def positions(model: PreTrainedModel) -> int:
    """Return the largest number of tokens of a sequence of a model."""
    return model.config.get_text_config().max_position_embeddings


def check_size(sequences: int | None, length: int) -> None:
    """Raise `ArgumentError` unless both are at least 1; `sequences` may be None."""
    if length < 1:
        raise ArgumentError(f"length must be >= 1, got {length}")
    if sequences is not None and sequences < 1:
        raise ArgumentError(f"sequences must be >= 1, got {sequences}")


def check_length(model: PreTrainedModel, length: int) -> None:
    """Raise `ArgumentError` if `length` exceeds the positions of the model."""
    if length > positions(model):
        raise ArgumentError(
            f"sequences of {length:,} tokens are longer than the {positions(model):,} positions of "
            "the model: ask for shorter ones"
        )


def checked_tokens(model: PreTrainedModel, tokens: Tensor, *, shortest: int = 1) -> Tensor:
    """Return token ids as int64.

    Parameters
    ----------
    model : PreTrainedModel
        Model with a vocabulary and positions.
    tokens : Tensor
        Token ids, (sequences, length), of any integer dtype.
    shortest : int
        Smallest length.

    Raises
    ------
    ArgumentError
        If they are not such a tensor, or an id or the length exceeds those of the model.
    """
    shape = f"(sequences, length{f' > {shortest - 1}' if shortest > 1 else ''})"
    if not isinstance(tokens, Tensor):
        raise ArgumentError(
            f"tokens must be a tensor of shape {shape}, not {type(tokens).__name__}: "
            "torch.tensor makes one of a list"
        )
    shaped = tokens.ndim == 2 and tokens.numel() > 0 and tokens.shape[1] >= shortest
    if tokens.dtype not in INTEGERS or not shaped:
        raise ArgumentError(
            f"tokens must be integers of shape {shape}, not {tokens.dtype} {tuple(tokens.shape)}"
        )
    check_length(model, tokens.shape[1])
    tokens = tokens.long()
    vocabulary = model.get_input_embeddings().num_embeddings
    smallest, largest = int(tokens.min()), int(tokens.max())
    if smallest < 0 or largest >= vocabulary:
        outside = smallest if smallest < 0 else largest
        raise ArgumentError(
            f"token id {outside} is not one of the model's, which are 0 to {vocabulary - 1}: read "
            "the text with the tokenizer of this model"
        )
    return tokens


def calibration_length(
    model: PreTrainedModel, tokens: Tensor | TextSource | str, length: int | None = None
) -> int:
    """Return the length of the windows of `calibration_tokens`, without reading a text.

    Raises
    ------
    ArgumentError
        As `calibration_tokens`, except for texts that are too short.
    """
    if not isinstance(tokens, str | TextSource):
        return checked_tokens(model, tokens).shape[1]
    if length is None:
        length = min(LENGTH, positions(model))
    check_length(model, length)
    return length


def calibration_tokens(
    model: PreTrainedModel,
    tokens: Tensor | TextSource | str,
    sequences: int | None = None,
    length: int | None = None,
) -> tuple[str, Tensor]:
    """Return name and token ids of calibration data, (sequences, length), int64.

    Of a text, these are the first windows, by default 64 of 512 tokens or of the positions of the
    model.

    Raises
    ------
    ArgumentError
        If the tokens are not a (sequences, length) tensor of the model's ids, the text is too
        short, or the sequences are longer than the positions of the model.
    """
    if not isinstance(tokens, str | TextSource):
        return "tokens", checked_tokens(model, tokens)
    source = open_text(tokens) if isinstance(tokens, str) else tokens
    length = calibration_length(model, source, length)
    sequences = SEQUENCES if sequences is None else sequences
    LOG.info("reading %d × %d tokens of %s", sequences, length, source.name)
    ids = sample_tokens(
        source, _tokenizer(model), sequences=sequences, length=length, split="calibration"
    )
    return source.name, checked_tokens(model, ids)


def read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model in a folder or on the Hub.

    Raises
    ------
    ArgumentError
        If it is missing or damaged.
    """
    missing = "no tokenizer is saved with it (tokenizer.save_pretrained writes one)"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = first_line(error)
        if reason.endswith(":"):  # a list of candidate files follows
            raise ArgumentError(missing) from error
        raise ArgumentError(f"its tokenizer cannot be read: {reason}") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # Without a file, some families return a tokenizer without words.
        raise ArgumentError(missing)
    return tokenizer


def _tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    name = model.config._name_or_path
    try:
        return read_tokenizer(name)
    except ArgumentError as error:
        raise ArgumentError(
            f"model {name!r}: {error}; or pass token ids instead of a text"
        ) from error

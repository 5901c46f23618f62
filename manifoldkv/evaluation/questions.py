"""Questions whose answers stand far back in a prompt: passkeys, copying, key-value recall."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from transformers import PreTrainedTokenizerBase

from manifoldkv.errors import ArgumentError
from manifoldkv.evaluation.ruler import RULER, ruler_documents
from manifoldkv.text.sources import TextSource
from manifoldkv.text.tokens import sample_tokens

CUE, COPIED = 16, 8
"""Tokens of a passage that are repeated, and that are to follow."""


@dataclass(frozen=True)
class Question:
    """A prompt, and what should be written after it.

    Parameters
    ----------
    task : str
        What kind of question it is.
    prompt : tuple of int
        Token ids.
    answers : tuple of str
        Texts that all belong into what is written.
    continuation : tuple of int
        Token ids of the answers, as they should follow the prompt.
    new_tokens : int
        Tokens that may be written.
    depth : float
        Where the answer stands: 0 at the beginning of the prompt, 1 at its end; NaN if it stands
        in many places.
    """

    task: str
    prompt: tuple[int, ...]
    answers: tuple[str, ...]
    continuation: tuple[int, ...]
    new_tokens: int
    depth: float = math.nan


@dataclass(frozen=True)
class _Request:
    """What questions are asked for."""

    tokenizer: PreTrainedTokenizerBase
    text: TextSource
    length: int
    items: int
    seed: int

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text that stands inside of another."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def start(self, text: str) -> list[int]:
        """Return the tokens of a text with what the tokenizer puts before one."""
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return ids

    def filler(self, length: int) -> list[list[int]]:
        """Return held-out tokens of the text for every question."""
        tokens = sample_tokens(
            self.text, self.tokenizer, sequences=self.items, length=length, split="held-out"
        )
        return tokens.tolist()

    def room(self, *parts: Sequence[int]) -> int:
        """Return how many tokens a prompt has beside some parts.

        Raises
        ------
        ArgumentError
            If there is none.
        """
        room = self.length - sum(map(len, parts))
        if room < 1:
            raise ArgumentError(
                f"a prompt of {self.length} tokens has no room for anything but the question: ask "
                f"for more than {self.length - room} tokens"
            )
        return room


def questions(
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    text: TextSource,
    *,
    length: int,
    items: int,
    seed: int = 0,
) -> list[Question]:
    """Return questions of a task; the same seed gives the same ones.

    Parameters
    ----------
    task : str
        ``"passkey"`` (Mohtashami and Jaggi, 2023): five digits hidden in a text, at depths that are
        spread evenly over it. ``"copying"``: 16 tokens of a text are repeated, and the 8 that
        followed them are asked for. ``"key-value"`` (after Liu et al., 2024): one of many pairs of
        numbers. Or a name out of `RULER` (Hsieh et al., 2024), as the LM Evaluation Harness makes
        it, of whose tasks these need no download.
    tokenizer : PreTrainedTokenizerBase
        The model's.
    text : TextSource
        From `open_text`. Passkeys hide in its held-out part, passages are copied from it.
    length : int
        Tokens of a prompt; of `RULER` with those that may be written, as the harness counts.
    items : int
        How many questions.
    seed : int
        Of numbers and places.

    Raises
    ------
    ArgumentError
        If there is no such task.
        If the text is too short for the questions, or the length for a single one.
    """
    request = _Request(tokenizer, text, length, items, seed)
    if task in RULER:
        return _ruler(request, task)
    if task not in _MADE_HERE:
        raise ArgumentError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
    return _MADE_HERE[task](request, random.Random(f"{task} {length} {seed}"))


def _passkey(request: _Request, numbers: random.Random) -> list[Question]:
    start = request.start("Somewhere in the following text a pass key is hidden. Remember it.\n\n")
    end = request.ids("\n\nWhat is the pass key? The pass key is")

    found = []
    for item, filler in enumerate(request.filler(request.room(start, end))):
        digits = str(numbers.randrange(10_000, 100_000))
        needle = request.ids(f"\n\nThe pass key is {digits}. Remember it: {digits}.\n\n")
        room = request.room(start, needle, end)
        depth = (item + 0.5) / request.items
        place = round(depth * room)
        prompt = [*start, *filler[:place], *needle, *filler[place:room], *end]
        answer = request.ids(f" {digits}")
        found.append(_recalled("passkey", prompt, digits, answer, depth))
    return found


def _copying(request: _Request, numbers: random.Random) -> list[Question]:
    start, gap = request.start(""), request.ids("\n\n")
    room = request.room(start, gap, [0] * CUE)
    if room < CUE + COPIED:
        raise ArgumentError(f"a prompt of {request.length} tokens is too short to copy from")
    found = []
    for filler in request.filler(room):
        place = numbers.randrange(room - CUE - COPIED + 1)
        cue, copied = filler[place : place + CUE], filler[place + CUE : place + CUE + COPIED]
        text = request.tokenizer.decode(copied)
        prompt = [*start, *filler, *gap, *cue]
        found.append(_recalled("copying", prompt, text, copied, place / len(prompt)))
    return found


def _key_value(request: _Request, numbers: random.Random) -> list[Question]:
    start = request.start("Every key has a value.\n")
    end = [request.ids(f"\nThe value of key {key} is") for key in (1000, 9999)]
    room = request.room(start, max(end, key=len))
    found = []
    for _ in range(request.items):
        lines: list[list[int]] = []
        keys = numbers.sample(range(1000, 10_000), 9000)
        values = [numbers.randrange(10_000, 100_000) for _ in keys]
        left = room
        for key, value in zip(keys, values, strict=True):
            line = request.ids(f"\nThe value of key {key} is {value}.")
            if len(line) > left:
                break
            lines.append(line)
            left -= len(line)
        if not lines:
            raise ArgumentError(f"a prompt of {request.length} tokens has no room for a key")
        wanted = numbers.randrange(len(lines))
        asked = request.ids(f"\nThe value of key {keys[wanted]} is")
        prompt = [*start, *chain.from_iterable(lines), *asked]
        digits = str(values[wanted])
        depth = (wanted + 0.5) / len(lines)
        found.append(_recalled("key-value", prompt, digits, request.ids(f" {digits}"), depth))
    return found


_MADE_HERE: dict[str, Callable[[_Request, random.Random], list[Question]]] = {
    "passkey": _passkey,
    "copying": _copying,
    "key-value": _key_value,
}
TASKS = (*_MADE_HERE, *RULER)


def _recalled(
    task: str, prompt: list[int], answer: str, continuation: list[int], depth: float
) -> Question:
    """Return a question whose answer has to follow at once, token by token."""
    return Question(task, tuple(prompt), (answer,), tuple(continuation), len(continuation), depth)


def _ruler(request: _Request, task: str) -> list[Question]:
    found = []
    for document in ruler_documents(
        task, request.tokenizer, length=request.length, items=request.items, seed=request.seed
    ):
        prompt = request.start(document.prompt)
        whole = request.start(document.prompt + document.continuation)
        continuation = tuple(whole[len(prompt) :])
        found.append(
            Question(task, tuple(prompt), document.answers, continuation, document.new_tokens)
        )
    return found

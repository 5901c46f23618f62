"""Questions whose answers stand far back in a prompt: passkeys, copies, pairs, mappings."""

from __future__ import annotations

import itertools
import math
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from transformers import PreTrainedTokenizerBase

from manifoldkv.errors import ArgumentError
from manifoldkv.text.sources import TextSource
from manifoldkv.text.tokens import sample_tokens

CUE, COPIED = 16, 8
"""Tokens of a passage that are repeated, and that are to follow."""
LONG, LISTED = 64, 4
"""Digits of a long passkey, and numbers of a list that are to follow."""
KINDS = (
    "apple pear plum cherry grape lemon peach melon",
    "dog cat horse cow sheep goat pig wolf",
    "red blue green black white brown pink grey",
    "spoon fork knife cup plate bowl pan pot",
)
"""Words by kind."""
Secret = Callable[[random.Random], str]


@dataclass(frozen=True)
class Question:
    """A prompt and its expected answer.

    Parameters
    ----------
    task : str
        Name of the task.
    prompt : tuple of int
        Token ids.
    answers : tuple of str
        Texts that are all expected in the generated text.
    continuation : tuple of int
        Token ids of the answers, as expected directly after the prompt.
    new_tokens : int
        Largest number of tokens to generate.
    depth : float
        Position of the answer: 0 at the beginning of the prompt, 1 at its end; NaN if it has
        several.
    """

    task: str
    prompt: tuple[int, ...]
    answers: tuple[str, ...]
    continuation: tuple[int, ...]
    new_tokens: int
    depth: float = math.nan


@dataclass(frozen=True)
class _Request:
    """Arguments of `questions`."""

    tokenizer: PreTrainedTokenizerBase
    text: TextSource
    length: int
    items: int
    seed: int

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text in the middle of another."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def start(self, text: str) -> list[int]:
        """Return the tokens of a text, the start token included."""
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return ids

    def filler(self, length: int) -> list[list[int]]:
        """Return held-out tokens of the text, (items, length)."""
        tokens = sample_tokens(
            self.text, self.tokenizer, sequences=self.items, length=length, split="held-out"
        )
        return tokens.tolist()

    def room(self, *parts: Sequence[int]) -> int:
        """Return the number of tokens of a prompt beside some parts, refused if not positive."""
        room = self.length - sum(map(len, parts))
        if room < 1:
            raise ArgumentError(
                f"a prompt of {self.length} tokens has no room for anything but the question: "
                f"length must be > {self.length - room}"
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
    """Return questions of a task, determined by the seed.

    Parameters
    ----------
    task : str
        ``"passkey"`` (Mohtashami and Jaggi, 2023): five digits hidden in a text, at evenly spread
        depths; ``"long-passkey"``: 64 digits; ``"uuid"``: a UUID; ``"four-passkeys"``: five digits
        each, all asked for at once. ``"copying"``: 16 tokens of a text are repeated, and the 8
        after them are asked for; ``"number-list"``: the same of a list of random numbers.
        ``"key-value"`` (after Liu et al., 2024): one of many pairs of numbers. ``"mapping"``:
        words with the labels of their kinds, and a word that is new.
    tokenizer : PreTrainedTokenizerBase
        The model's.
    text : TextSource
        From `open_text`; passkeys are hidden in its held-out part, passages are copied from it.
    length : int
        Tokens of a prompt.
    items : int
        Number of questions.
    seed : int
        Seed of numbers and positions.

    Raises
    ------
    ArgumentError
        If the task is unknown, the text too short for the questions, or the length for one.
    """
    request = _Request(tokenizer, text, length, items, seed)
    if task not in TASKS:
        raise ArgumentError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
    return TASKS[task](request, random.Random(f"{task} {length} {seed}"))


def _passkey(
    request: _Request, numbers: random.Random, task: str = "passkey", secret: Secret | None = None
) -> list[Question]:
    start = request.start("Somewhere in the following text a pass key is hidden. Remember it.\n\n")
    end = request.ids("\n\nWhat is the pass key? The pass key is")
    result = []
    for item, filler in enumerate(request.filler(request.room(start, end))):
        key = (secret or _five_digits)(numbers)
        needle = request.ids(f"\n\nThe pass key is {key}. Remember it: {key}.\n\n")
        room = request.room(start, needle, end)
        depth = (item + 0.5) / request.items
        cut = round(depth * room)
        prompt = [*start, *filler[:cut], *needle, *filler[cut:room], *end]
        result.append(_recall(task, prompt, key, request.ids(f" {key}"), depth))
    return result


def _five_digits(numbers: random.Random) -> str:
    return str(numbers.randrange(10_000, 100_000))


def _long_passkey(request: _Request, numbers: random.Random) -> list[Question]:
    def digits(numbers: random.Random) -> str:
        return "".join(numbers.choices("0123456789", k=LONG))

    return _passkey(request, numbers, "long-passkey", digits)


def _uuid(request: _Request, numbers: random.Random) -> list[Question]:
    def identifier(numbers: random.Random) -> str:
        return str(uuid.UUID(int=numbers.getrandbits(128), version=4))

    return _passkey(request, numbers, "uuid", identifier)


def _four_passkeys(request: _Request, numbers: random.Random) -> list[Question]:
    names = ("red", "blue", "green", "black")
    start = request.start("Four pass keys are hidden in the following text. Remember them.\n\n")
    end = request.ids(
        f"\n\nWhat are the pass keys {', '.join(names[:-1])} and {names[-1]}? They are"
    )
    result = []
    for filler in request.filler(request.room(start, end)):
        keys = [_five_digits(numbers) for _ in names]
        needles = [
            request.ids(f"\n\nThe pass key {name} is {key}. Remember it: {key}.\n\n")
            for name, key in zip(names, keys, strict=True)
        ]
        room = request.room(start, end, *needles)
        edges = [part * room // len(names) for part in range(len(names) + 1)]
        prompt = [*start]
        for low, high, needle in zip(edges, edges[1:], numbers.sample(needles, 4), strict=False):
            cut = numbers.randint(low, high)
            prompt += [*filler[low:cut], *needle, *filler[cut:high]]
        answer = request.ids(f" {', '.join(keys[:-1])} and {keys[-1]}")
        prompt += end
        known = tuple(prompt), tuple(keys), tuple(answer)
        result.append(Question("four-passkeys", *known, new_tokens=len(answer)))
    return result


def _copying(request: _Request, numbers: random.Random) -> list[Question]:
    start, gap = request.start(""), request.ids("\n\n")
    room = request.room(start, gap, [0] * CUE)
    if room < CUE + COPIED:
        raise ArgumentError(f"a prompt of {request.length} tokens is too short to copy from")
    result = []
    for filler in request.filler(room):
        position = numbers.randrange(room - CUE - COPIED + 1)
        cue = filler[position : position + CUE]
        copied = filler[position + CUE : position + CUE + COPIED]
        text = request.tokenizer.decode(copied)
        prompt = [*start, *filler, *gap, *cue]
        result.append(_recall("copying", prompt, text, copied, position / len(prompt)))
    return result


def _number_list(request: _Request, numbers: random.Random) -> list[Question]:
    start, again = request.start("A list of numbers:"), request.ids("\n\nThe same list again:")
    result = []
    for _ in range(request.items):
        listed = numbers.sample(range(1000, 10_000), 9000)
        tokens = [request.ids(f" {number},") for number in listed[: request.length]]
        copied, left = LISTED, request.room(start, again)
        count = sum(size <= left // 2 for size in accumulate(map(len, tokens)))
        if count <= copied:
            raise ArgumentError(f"a prompt of {request.length} tokens is too short for a list")
        asked = numbers.randrange(1, count - copied + 1)
        whole = chain.from_iterable(tokens[:count])
        prompt = [*start, *whole, *again, *chain.from_iterable(tokens[:asked])]
        rest = tuple(chain.from_iterable(tokens[asked : asked + copied]))
        answers = tuple(map(str, listed[asked : asked + copied]))
        result.append(
            Question("number-list", tuple(prompt), answers, rest, len(rest), asked / count / 2)
        )
    return result


def _mapping(request: _Request, numbers: random.Random) -> list[Question]:
    start = request.start("Every word has a label.\n")
    result = []
    for _ in range(request.items):
        labels = numbers.sample("ABCDEFGH", len(KINDS))
        words = [
            (word, label)
            for kind, label in zip(KINDS, labels, strict=True)
            for word in kind.split()
        ]
        asked, label = numbers.choice(words)
        shown = [(word, given) for word, given in words if word != asked]
        query = request.ids(f"\n{asked}:")
        once = numbers.sample(shown, len(shown))
        left, lines = request.room(start, query), list[int]()
        for count in itertools.count():
            word, given = once[count] if count < len(once) else numbers.choice(shown)
            line = request.ids(f"\n{word}: {given}")
            if len(lines) + len(line) > left:
                break
            lines += line
        if count < len(once):
            raise ArgumentError(f"a prompt of {request.length} tokens has no room for all words")
        answer = request.ids(f" {label}")
        prompt = (*start, *lines, *query)
        result.append(Question("mapping", prompt, (label,), tuple(answer), len(answer)))
    return result


def _key_value(request: _Request, numbers: random.Random) -> list[Question]:
    start = request.start("Every key has a value.\n")
    end = [request.ids(f"\nThe value of key {key} is") for key in (1000, 9999)]
    room = request.room(start, max(end, key=len))
    result = []
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
        chosen = numbers.randrange(len(lines))
        query = request.ids(f"\nThe value of key {keys[chosen]} is")
        prompt = [*start, *chain.from_iterable(lines), *query]
        digits = str(values[chosen])
        depth = (chosen + 0.5) / len(lines)
        result.append(_recall("key-value", prompt, digits, request.ids(f" {digits}"), depth))
    return result


def _recall(
    task: str, prompt: list[int], answer: str, continuation: list[int], depth: float
) -> Question:
    """Return a question whose answer has to follow at once, token by token."""
    return Question(task, tuple(prompt), (answer,), tuple(continuation), len(continuation), depth)


TASKS: dict[str, Callable[[_Request, random.Random], list[Question]]] = {
    "passkey": _passkey,
    "long-passkey": _long_passkey,
    "uuid": _uuid,
    "four-passkeys": _four_passkeys,
    "copying": _copying,
    "number-list": _number_list,
    "key-value": _key_value,
    "mapping": _mapping,
}

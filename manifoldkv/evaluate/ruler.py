"""RULER's tasks of the LM Evaluation Harness, at any length and without a download.

Hsieh et al., 2024 (arXiv 2404.06654). The harness's task files begin at 4,096 tokens and read a
tokenizer by its name; its functions below them take a length and a tokenizer.
"""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from manifoldkv.core.errors import ArgumentError

SHORTEST = 1024
"""Below it some tasks have no room for their examples, and the harness loops forever."""
EXAMPLE_LENGTH = 500
"""Tokens of the example that variable tracking begins with."""


class RulerDocument(NamedTuple):
    """A document of a task: prompt, texts expected in the answer, the whole answer, its length."""

    prompt: str
    answers: tuple[str, ...]
    continuation: str
    new_tokens: int


def ruler_documents(
    task: str, tokenizer: PreTrainedTokenizerBase, *, length: int, items: int, seed: int
) -> list[RulerDocument]:
    """Return documents of a task of `RULER`; arguments as those of `questions`.

    Raises
    ------
    ArgumentError
        If the length is below `SHORTEST`, or the extra ``manifoldkv[eval]`` is not installed.
    """
    if length < SHORTEST:
        raise ArgumentError(f"{task} needs prompts of at least {SHORTEST} tokens, not {length}")
    maker = RULER[task]
    with _quiet(), _seeded(seed):
        try:
            documents = maker.documents(tokenizer, length, items)
        except ImportError as error:
            raise ArgumentError(f"{task} needs packages that are missing: {error}") from error
    return [
        RulerDocument(
            f"{document['input']}{maker.delimiter}{document['gen_prefix']}",
            tuple(document["outputs"]),
            maker.answer(document["outputs"]),
            maker.new_tokens,
        )
        for document in documents
    ]


@dataclass(frozen=True)
class _Maker:
    """How the harness writes documents and answers of a task."""

    documents: Callable[[PreTrainedTokenizerBase, int, int], list[dict[str, Any]]]
    new_tokens: int
    answer: Callable[[Sequence[str]], str]
    delimiter: str = " "


def _needles(haystack: str, keys: str, values: str) -> _Maker:
    def documents(
        tokenizer: PreTrainedTokenizerBase, length: int, items: int
    ) -> list[dict[str, Any]]:
        from lm_eval.tasks.ruler.niah_utils import TEMPLATE
        from lm_eval.tasks.ruler.prepare_niah import generate_samples, get_haystack

        return generate_samples(
            get_haystack(type_haystack=haystack),
            max_seq_length=length,
            template=TEMPLATE,
            type_haystack=haystack,
            type_needle_k=keys,
            type_needle_v=values,
            num_samples=items,
            TOKENIZER=tokenizer,
        )

    return _Maker(documents, 128, _in_a_row)


def _chains(tokenizer: PreTrainedTokenizerBase, length: int, items: int) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler.vt_utils import sys_vartrack_w_noise_random

    (example,) = sys_vartrack_w_noise_random(
        tokenizer=tokenizer, num_samples=1, max_seq_length=EXAMPLE_LENGTH, incremental=5
    )
    return sys_vartrack_w_noise_random(
        tokenizer=tokenizer, num_samples=items, max_seq_length=length, icl_example=example
    )


def _common_words(
    tokenizer: PreTrainedTokenizerBase, length: int, items: int
) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler import cwe_utils

    cwe_utils.WORDS.sort()  # shuffled at import
    cwe_utils.RNG.seed(random.random())
    return cwe_utils.sys_word_pair_random(
        num_samples=items, max_seq_length=length, tokenizer=tokenizer
    )


def _frequent_words(
    tokenizer: PreTrainedTokenizerBase, length: int, items: int
) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler.fwe_utils import sys_kwext

    return sys_kwext(tokenizer=tokenizer, max_seq_length=length, num_samples=items)


def _in_a_row(answers: Sequence[str]) -> str:
    return " " + " ".join(answers)


def _with_commas(answers: Sequence[str]) -> str:
    return " " + ", ".join(answers)


def _numbered(answers: Sequence[str]) -> str:
    return " " + " ".join(f"{i}. {answer}" for i, answer in enumerate(answers, 1))


RULER: dict[str, _Maker] = {
    "niah_single_1": _needles("repeat", "words", "numbers"),
    "niah_multikey_2": _needles("needle", "words", "numbers"),
    "niah_multikey_3": _needles("needle", "uuids", "uuids"),
    "ruler_vt": _Maker(_chains, 30, _in_a_row),
    "ruler_cwe": _Maker(_common_words, 120, _numbered, delimiter="\n\n"),
    "ruler_fwe": _Maker(_frequent_words, 50, _with_commas),
}
"""The tasks of the harness that consist of words and numbers alone."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the harness from printing, and from fetching a data set that these tasks do not need."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = "1"  # only the first process of several would fetch it
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators that the harness uses, and restore them."""
    before, numpy_before = random.getstate(), np.random.get_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)  # noqa: NPY002

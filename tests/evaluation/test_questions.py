"""Questions: what is asked for stands in the prompt, once, where it should, at the length."""

import random
import re
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerBase

from manifoldkv import open_text
from manifoldkv.errors import ArgumentError
from manifoldkv.evaluation.questions import CUE, KINDS, TASKS, Question, questions
from manifoldkv.text.tokens import read_tokenizer

Ask = Callable[..., list[Question]]
UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return read_tokenizer("studies/reference_models/reference-llama")


@pytest.fixture(scope="module")
def ask(tokenizer: PreTrainedTokenizerBase) -> Ask:
    def asked(task: str, length: int = 1024, items: int = 5, seed: int = 0) -> list[Question]:
        text = open_text("pydoc-topics")
        return questions(task, tokenizer, text, length=length, items=items, seed=seed)

    return asked


@pytest.mark.parametrize("task", TASKS)
def test_every_task(task: str, ask: Ask, tokenizer: PreTrainedTokenizerBase) -> None:
    found = ask(task)
    assert len(found) == 5
    for question in found:
        assert question.task == task
        prompt = tokenizer.decode(question.prompt)
        continuation = tokenizer.decode(question.continuation)
        assert all(answer in prompt for answer in question.answers)
        assert all(answer in continuation for answer in question.answers)
        assert 256 < len(question.prompt) <= 1024
        assert len(question.continuation) <= question.new_tokens


@pytest.mark.parametrize("task", TASKS)
def test_the_seed_decides(task: str, ask: Ask) -> None:
    random.seed(1)
    first = ask(task)
    random.seed(2)
    assert ask(task) == first
    assert ask(task, seed=1) != first
    assert len({question.answers for question in first}) > 1


def test_a_passkey_stands_at_its_depth_and_prompts_are_as_long_as_asked(
    ask: Ask, tokenizer: PreTrainedTokenizerBase
) -> None:
    found = ask("passkey", length=300, items=10)
    assert [q.depth for q in found] == pytest.approx([(i + 0.5) / 10 for i in range(10)])
    for question in found:
        assert len(question.prompt) == 300
        text = tokenizer.decode(question.prompt)
        assert text.count(question.answers[0]) == 2  # "is 12345. Remember it: 12345."
        place = text.index(question.answers[0]) / len(text)
        assert abs(place - question.depth) < 0.25
        assert len(question.answers[0]) == 5


@pytest.mark.parametrize(("task", "form"), [("long-passkey", r"\d{64}"), ("uuid", UUID)])
def test_long_secrets_are_hidden_as_passkeys_are(
    task: str, form: str, ask: Ask, tokenizer: PreTrainedTokenizerBase
) -> None:
    found = ask(task, length=600, items=4)
    assert [q.depth for q in found] == [0.125, 0.375, 0.625, 0.875]
    for question in found:
        (secret,) = question.answers
        assert re.fullmatch(form, secret)
        assert len(question.prompt) == 600
        assert tokenizer.decode(question.prompt).count(secret) == 2


def test_four_passkeys_stand_in_a_quarter_each(
    ask: Ask, tokenizer: PreTrainedTokenizerBase
) -> None:
    for question in ask("four-passkeys", length=700):
        text, names = tokenizer.decode(question.prompt), ("red", "blue", "green", "black")
        assert len(question.prompt) == 700
        for name, key in zip(names, question.answers, strict=True):
            assert text.count(f"The pass key {name} is {key}. Remember it: {key}.") == 1
        places = sorted(text.index(key) / len(text) for key in question.answers)
        assert all(0.2 * i - 0.1 < place < 0.3 * i + 0.4 for i, place in enumerate(places))


def test_a_list_goes_on_as_it_did_before(ask: Ask, tokenizer: PreTrainedTokenizerBase) -> None:
    for question in ask("number-list", length=300):
        first, again = tokenizer.decode(question.prompt).split("\n\nThe same list again:")
        copy = f"{again} {', '.join(question.answers)},"
        assert first.partition("numbers:")[2].startswith(copy)
        numbers = re.findall(r"\d+", first)
        assert len(set(numbers)) == len(numbers) > 10


def test_a_mapping_is_that_of_kinds_and_the_asked_word_is_new(
    ask: Ask, tokenizer: PreTrainedTokenizerBase
) -> None:
    for question in ask("mapping", length=400):
        *lines, asked = tokenizer.decode(question.prompt).splitlines()[1:]
        kind = next(kind.split() for kind in KINDS if asked[:-1] in kind.split())
        known = dict(line.split(": ") for line in lines if line)
        assert asked[:-1] not in known
        assert {known[word] for word in kind if word in known} == set(question.answers)
        assert len(set(known.values())) == len(KINDS)
        assert len(known) == 8 * len(KINDS) - 1


def test_a_passage_is_copied_from_its_depth(ask: Ask) -> None:
    for question in ask("copying", length=200):
        prompt, place = question.prompt, round(question.depth * len(question.prompt))
        cue = prompt[-CUE:]
        starts = [i for i in range(len(prompt) - CUE) if prompt[i : i + CUE] == cue]
        assert any(
            prompt[i + CUE : i + CUE + len(question.continuation)] == question.continuation
            and abs(i - place) <= 2
            for i in starts
        )


def test_every_key_has_one_value(ask: Ask, tokenizer: PreTrainedTokenizerBase) -> None:
    for question in ask("key-value", length=400):
        text = tokenizer.decode(question.prompt)
        *pairs, last = [line for line in text.splitlines() if line.startswith("The value of key")]
        keys = [pair.split()[4] for pair in pairs]
        assert len(set(keys)) == len(keys) > 5
        asked = last.split()[4]
        assert pairs[keys.index(asked)].endswith(f"{question.answers[0]}.")


def test_what_cannot_be_asked(ask: Ask) -> None:
    with pytest.raises(ArgumentError, match="unknown task 'nothing'; known: passkey"):
        ask("nothing")
    for task in TASKS:
        with pytest.raises(ArgumentError, match="a prompt of 16 tokens"):
            ask(task, length=16)
    with pytest.raises(ArgumentError, match="ask for fewer or shorter"):
        ask("passkey", length=1000, items=100_000)

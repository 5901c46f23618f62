"""Questions of RULER: those of the harness, by the seed, without a trace."""

import random

import numpy as np
import pytest
from measurements.ruler import RULER, ruler_questions
from transformers import PreTrainedTokenizerBase

from manifoldkv.errors import ArgumentError
from manifoldkv.evaluation.questions import Question, prompt_ids
from manifoldkv.text.tokens import read_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return read_tokenizer("studies/reference_models/reference-llama")


@pytest.mark.parametrize("task", RULER)
def test_every_task(task: str, tokenizer: PreTrainedTokenizerBase) -> None:
    def ask(seed: int) -> list[Question]:
        return ruler_questions(task, tokenizer, length=1024, items=5, seed=seed)

    random.seed(1)
    first = ask(0)
    random.seed(2)
    assert ask(0) == first
    assert ask(1) != first
    assert len({question.answers for question in first}) > 1
    assert len(first) == 5
    for question in first:
        assert question.task == task
        prompt = tokenizer.decode(question.prompt)
        continuation = tokenizer.decode(question.continuation)
        assert all(answer in prompt for answer in question.answers)
        assert all(answer in continuation for answer in question.answers)
        assert 256 < len(question.prompt) <= 1024
        assert len(question.continuation) <= question.new_tokens


def test_a_short_prompt_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ArgumentError, match="niah_single_1 needs prompts of at least 1024 tokens"):
        ruler_questions("niah_single_1", tokenizer, length=512, items=1, seed=0)


def test_the_harness_neither_prints_nor_leaves_a_trace(
    tokenizer: PreTrainedTokenizerBase, capfd: pytest.CaptureFixture[str]
) -> None:
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    expected = random.random(), np.random.random()  # noqa: NPY002
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    for task in RULER:
        ruler_questions(task, tokenizer, length=1024, items=1, seed=0)
    assert capfd.readouterr() == ("", "")
    assert (random.random(), np.random.random()) == expected  # noqa: NPY002


def test_prompts_are_the_harness_own(tokenizer: PreTrainedTokenizerBase) -> None:
    """Of the task as the harness asks it, its task file and all, at the length of that file."""
    from lm_eval.tasks import TaskManager, ruler

    metadata = {"tokenizer": tokenizer.name_or_path, "max_seq_lengths": [1024]}
    manager = TaskManager(
        include_path=next(iter(ruler.__path__)), include_defaults=False, metadata=metadata
    )
    random.seed(5)
    task = manager.load(["niah_multikey_2"])["tasks"]["niah_multikey_2"]
    task.build_all_requests(limit=2)
    theirs = [request.args[0] for request in task.instances[:2]]
    ours = ruler_questions("niah_multikey_2", tokenizer, length=1024, items=2, seed=5)
    assert [tuple(prompt_ids(tokenizer, text)) for text in theirs] == [q.prompt for q in ours]

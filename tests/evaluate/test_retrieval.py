"""Answers from a cache: those of decoding token by token, whatever the batch and the prefill."""

import copy
import math
from collections.abc import Callable

import pandas as pd
import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv import compressed, load_model, open_text
from manifoldkv.core.errors import ArgumentError
from manifoldkv.evaluate.questions import Question, questions
from manifoldkv.evaluate.retrieval import retrieval, retrieval_through, summarize, uncompressed
from manifoldkv.plan.plan import CompressionPlan
from tests.plans import random_plan

Model = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("studies/reference_models/reference-qwen3")


@pytest.fixture(scope="module")
def plan(model: Model) -> CompressionPlan:
    return random_plan(model[0], key_rank=20, value_rank=20)


@pytest.fixture(scope="module")
def asked(model: Model) -> list[Question]:
    """Of several lengths, which do not run together."""
    text = open_text("pydoc-topics")
    return [
        question
        for task, length in (("passkey", 120), ("copying", 97), ("key-value", 110))
        for question in questions(task, model[1], text, length=length, items=2)
    ]


@torch.no_grad()
def by_hand(model: Model, question: Question, new_cache: Callable[[], Cache]) -> tuple:
    """Share of the answers in the text of a model, and their NLL, one token at a time."""
    network, tokenizer = model
    cache = new_cache()
    network(input_ids=torch.tensor([question.prompt[:-1]]), past_key_values=cache)
    again, last = copy.deepcopy(cache), torch.tensor([[question.prompt[-1]]])
    token, ids = last, []
    for _ in range(question.new_tokens):
        token = network(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(dim=-1)
        ids.append(int(token))
    token, loss = last, 0.0
    for expected in question.continuation:
        logits = network(input_ids=token, past_key_values=again).logits[0, -1].double()
        loss -= float(torch.log_softmax(logits, dim=-1)[expected]) / len(question.continuation)
        token = torch.tensor([[expected]])
    text = tokenizer.decode(ids)
    return sum(a in text for a in question.answers) / len(question.answers), loss


@pytest.mark.parametrize("prefill", ["exact", "compressed", None])
def test_it_is_that_of_decoding_token_by_token(
    model: Model, asked: list[Question], plan: CompressionPlan, prefill: str | None
) -> None:
    if prefill is None:  # the uncompressed model
        found = retrieval(*model, asked)
        expected = [by_hand(model, q, lambda: DynamicCache(config=model[0].config)) for q in asked]
    else:
        found = retrieval(*model, asked, plan, prefill=prefill, batch_size=6)
        with compressed(model[0], plan, prefill=prefill) as new_cache:
            expected = [by_hand(model, question, new_cache) for question in asked]
    assert found["score"].tolist() == [score for score, _ in expected]
    assert found["nll"].tolist() == pytest.approx([nll for _, nll in expected], rel=1e-3)
    assert found["task"].tolist() == [question.task for question in asked]
    assert found["length"].tolist() == [len(question.prompt) for question in asked]


def test_a_model_that_knows_the_answer_gets_it(model: Model) -> None:
    """What the model writes by itself is found, in any case of letters; nothing else is."""
    network, tokenizer = model
    prompt = tokenizer("Return a string that", add_special_tokens=False)["input_ids"]
    output = network.generate(
        input_ids=torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    own = tokenizer.decode(output[0, len(prompt) :])
    middle = tuple(output[0, len(prompt) :].tolist())
    posed = [
        Question("own", tuple(prompt), (own.upper(),), middle, 8),
        Question("half", tuple(prompt), (own.strip(), "never written"), middle, 8),
        Question("short", tuple(prompt), (own.strip(),), middle, 4),
    ]
    for asked in (posed, posed[::-1]):  # in one batch, and each alone
        found = [retrieval(network, tokenizer, [one])["score"].item() for one in asked]
        assert found == retrieval(network, tokenizer, asked)["score"].tolist()
    assert found[::-1] == [1.0, 0.5, 0.0]
    other = Question("other", tuple(prompt), (own.strip(),), (*middle[:-1], middle[0]), 8)
    assert retrieval(network, tokenizer, [other])["score"].item() == 0


def test_several_caches_share_a_prefill(model: Model, asked: list[Question]) -> None:
    network, calls = model[0], []
    hook = network.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        found = retrieval_through(
            *model, asked, {"two": uncompressed, "one": uncompressed}, batch_size=6
        )
    finally:
        hook.remove()
    assert sum(length > 90 for length in calls) == len({len(q.prompt) for q in asked}) < 6
    assert found["cache"].tolist() == ["two"] * len(asked) + ["one"] * len(asked)
    parts = [part.drop(columns="cache") for _, part in found.groupby("cache")]
    pd.testing.assert_frame_equal(*(part.reset_index(drop=True) for part in parts))
    assert len(parts[0]) == len(asked)


def test_a_summary_is_beside_the_uncompressed_model() -> None:
    stock = pd.DataFrame(
        {
            "task": [*"aaaabb"],
            "score": [1.0, 0.5, 1.0, 0.5, 0.0, 0.5],
            "nll": [1.0, 2.0, 1.0, 2.0, 3.0, 4.0],
        }
    )
    found = stock.assign(score=[1.0, 0.0, 1.0, 0.0, 0.0, 0.0], nll=[1.5, 3.5, 1.5, 3.5, 3.0, 4.0])
    first, second = summarize(found, stock).to_dict("records")
    assert (first["task"], first["items"], first["stock_score"], first["score"]) == (
        *("a", 4, 0.75, 0.5),
    )
    assert first["added_nll"] == pytest.approx(1.0)
    # Of 0.5 and 1.5, twice: their standard deviation 1 / sqrt(3), over the root of 4.
    assert first["nll_error"] == pytest.approx(math.sqrt(1 / 3) / 2)
    assert first["score_error"] == pytest.approx(math.sqrt(1 / 3) / 2)
    assert math.isnan(second["nll_error"])  # of two items
    assert first["counted"]
    assert not second["counted"]


def test_questions_that_do_not_fit(model: Model) -> None:
    with pytest.raises(ArgumentError, match="no question"):
        retrieval(*model, [])
    longest = model[0].config.max_position_embeddings
    question = Question("long", (1,) * longest, ("x",), (1,), 1)
    with pytest.raises(ArgumentError, match=f"takes {longest + 1:,} tokens, the model {longest:,}"):
        retrieval(*model, [question])

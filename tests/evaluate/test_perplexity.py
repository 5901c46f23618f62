import math

import pytest
import torch

from manifoldkv.core.errors import ArgumentError
from manifoldkv.evaluate import Perplexity, perplexity
from manifoldkv.evaluate.perplexity import standard_error
from tests.families import tiny_model, tiny_tokens
from tests.plans import projected_by_hooks, random_plan


def nll_by_hand(model, tokens: torch.Tensor) -> list[float]:
    """Per sequence, a token after the other."""
    losses = []
    for sequence in tokens:
        logits = model(input_ids=sequence.unsqueeze(0), use_cache=False).logits[0]
        terms = [
            -float(torch.log_softmax(logits[i - 1].double(), dim=-1)[sequence[i]])
            for i in range(1, len(sequence))
        ]
        losses.append(sum(terms) / len(terms))
    return losses


def test_uncompressed() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(10, 12)
    found = perplexity(model, tokens)
    losses = nll_by_hand(model, tokens)
    assert found.by_sequence == pytest.approx(losses, rel=1e-5)
    mean = sum(losses) / 10
    assert found.nll == pytest.approx(mean, rel=1e-5)
    variance = sum((x - mean) ** 2 for x in losses) / 9
    error = standard_error(found.by_sequence)
    assert error == pytest.approx(math.sqrt(variance / 10), rel=1e-4)
    assert found.tokens_scored == 10 * 11
    assert found.perplexity == pytest.approx(math.exp(found.nll))


@pytest.mark.parametrize("rotary", ["pre", "post"])
def test_compressed_is_the_projected_model(rotary: str) -> None:
    model, tokens = tiny_model("qwen3"), tiny_tokens(10, 12)
    plan = random_plan(model, rotary=rotary)
    with projected_by_hooks(model, plan):
        expected = sum(nll_by_hand(model, tokens)) / 10
    assert perplexity(model, tokens, plan).nll == pytest.approx(expected, rel=1e-5)
    assert abs(perplexity(model, tokens).nll - expected) > 1e-3


def test_tokens_of_another_shape_are_refused() -> None:
    for tokens in (torch.zeros(3).long(), torch.zeros(2, 1).long(), torch.zeros(0, 5).long()):
        with pytest.raises(ArgumentError, match="sequences, length > 1"):
            perplexity(tiny_model("llama"), tokens)


def test_a_perplexity_that_no_float_holds_is_infinite() -> None:
    assert Perplexity((1000.0,), 1).perplexity == math.inf
    assert Perplexity((700.0,), 1).perplexity == pytest.approx(math.exp(700))


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_losses_that_are_not_finite_have_no_standard_error(broken: float) -> None:
    """As half precision makes them."""
    found = Perplexity((broken, 1.0, 2.0), 3)
    assert math.isnan(standard_error(found.by_sequence))
    assert math.isnan(standard_error((1.0,)))  # of one sequence
    assert not math.isfinite(found.perplexity)

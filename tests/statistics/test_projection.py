import pytest
import torch

from manifoldkv import compressed
from manifoldkv.core.basis import Basis, HeadGrouping
from manifoldkv.statistics.projected import divergence, log_probabilities, projected
from tests.families import FAMILIES, tiny_model, tiny_tokens
from tests.plans import any_basis, projected_by_hooks, random_plan


@pytest.mark.parametrize("rotary", ["pre", "post"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt-oss"])
def test_every_family_gives_what_hooks_give(family: str, rotary: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens()
    plan = random_plan(model, value_grouping="all", rotary=rotary, oblique=True)
    with torch.no_grad():
        before = model(input_ids=tokens, use_cache=False).logits
        with projected_by_hooks(model, plan):
            expected = model(input_ids=tokens, use_cache=False).logits
        with projected(model, plan.bases, rotary=rotary):
            found = model(input_ids=tokens, use_cache=False).logits
        after = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(before, after)


@pytest.mark.parametrize("rotary", ["pre", "post"])
@pytest.mark.parametrize("family", FAMILIES)
def test_first_tokens_are_seen_as_a_cache_shows_them(family: str, rotary: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens(2, 9)
    plan = random_plan(model, value_grouping="all", rotary=rotary, oblique=True, sinks=2)
    with torch.no_grad():
        with compressed(model, plan):
            expected = model(input_ids=tokens).logits
        with projected(model, plan.bases, rotary=rotary, sinks=2):
            found = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_is_not_named_stays_exact() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    exact = log_probabilities(model, tokens)
    for bases in ({}, {1: (None, None)}):
        with projected(model, bases):
            torch.testing.assert_close(log_probabilities(model, tokens), exact)


def test_gradients_reach_the_bases() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens()
    columns = any_basis(8, 4, HeadGrouping("shared", 2), oblique=False, seed=0).down
    exact = log_probabilities(model, tokens)

    def loss(down: torch.Tensor) -> torch.Tensor:
        basis = Basis(down, down, HeadGrouping("shared", 2))
        with projected(model, {0: (basis, None), 2: (None, basis)}):
            return divergence(exact, log_probabilities(model, tokens))

    assert torch.autograd.gradcheck(
        loss, [columns.requires_grad_()], eps=1e-3, atol=1e-4, rtol=1e-2
    )  # norms compute in float32


def test_bases_of_another_dtype_than_the_model() -> None:
    model, tokens = tiny_model("llama", torch.bfloat16), tiny_tokens()
    plan = random_plan(model, key_rank=8, value_rank=8)
    exact = log_probabilities(model, tokens)
    with projected(model, plan.bases):
        found = log_probabilities(model, tokens)
    assert found.dtype == torch.float32
    assert divergence(exact, found) < 1e-2


def test_divergence_is_that_of_the_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([[0.25, 0.75], [0.25, 0.75]])
    expected = 0.5 * (0.5 * torch.log(torch.tensor(2.0)) + 0.5 * torch.log(torch.tensor(2 / 3)))
    assert divergence(p.log(), q.log()) == pytest.approx(expected.item())
    assert divergence(p.log(), p.log()) == 0

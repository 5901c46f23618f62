"""No gradient passes through a compressed cache, and none is missing without a word."""

from collections.abc import Callable

import pytest
import torch

from manifoldkv import compressed
from manifoldkv.core.errors import CacheError, ModelError
from manifoldkv.statistics.capture import capture
from manifoldkv.statistics.projected import projected
from tests.families import KINDS, tiny_model, tiny_tokens
from tests.plans import random_plan
from tests.serve.cache.test_compressed import ROTARIES, assert_equal, reference


@pytest.mark.parametrize("options", [{}, {"prefill": "exact"}])
@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("family", [*KINDS, "phi3"])
def test_a_gradient_is_refused_and_a_forward_pass_is_not(
    family: str, rotary: str, options: dict
) -> None:
    model, tokens = tiny_model(family), tiny_tokens(2, 9)
    plan = random_plan(model, rotary=rotary)
    with compressed(model, plan, **options):
        with torch.no_grad():
            expected = model(input_ids=tokens).logits
        model.requires_grad_(True)
        output = model(input_ids=tokens, labels=tokens)
        assert torch.equal(output.logits, expected)
        with pytest.raises(CacheError, match=r"no gradient passes .* manifoldkv\.tune"):
            output.loss.backward()
    below = ("q_proj", "k_proj", "v_proj", "qkv_proj")
    learnt = [name for name, p in model.named_parameters() if p.grad is not None]
    assert not [name for name in learnt if name.split(".")[-2] in below]


@pytest.mark.parametrize("chosen", ["q_proj", "k_proj", "v_proj", "embed_tokens", "0.mlp"])
def test_nothing_below_an_attention_is_trained(chosen: str) -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(2, 9)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(chosen in name)
    with compressed(model, random_plan(model)):
        output = model(input_ids=tokens, labels=tokens)
        with pytest.raises(CacheError, match="no gradient passes"):
            output.loss.backward()


def test_what_is_above_all_attention_can_be_trained() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(2, 9)
    model.lm_head.requires_grad_(True)
    with compressed(model, random_plan(model)):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        hidden = model.model(input_ids=tokens).last_hidden_state
    logits = hidden @ model.lm_head.weight.T
    shifted = logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(shifted.float(), tokens[:, 1:].flatten())
    assert torch.allclose(loss, expected.to(loss.dtype), atol=1e-5)
    (gradient,) = torch.autograd.grad(expected, model.lm_head.weight)
    assert torch.allclose(model.lm_head.weight.grad, gradient, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
class TestGradientCheckpointing:
    def test_it_changes_no_result(self, family: str, rotary: str, reentrant: bool) -> None:
        model, tokens = tiny_model(family), tiny_tokens(2, 9)
        plan = random_plan(model, rotary=rotary)
        expected = reference(model, plan, tokens)
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        for mode in (model.eval, model.train):
            mode()
            with compressed(model, plan) as new_cache:
                # A reentrant checkpoint warns where nothing is to be trained.
                model.requires_grad_(True)
                cache = new_cache()
                found = [
                    model(input_ids=piece, past_key_values=cache).logits.detach()
                    for piece in tokens.split([5, 1, 3], dim=1)
                ]
                assert_equal(torch.cat(found, dim=1), expected)
                without = model(input_ids=tokens, use_cache=False).logits.detach()
                assert_equal(without, expected)

    def test_its_gradient_is_refused_and_leaves_the_cache_alone(
        self, family: str, rotary: str, reentrant: bool
    ) -> None:
        model, tokens = tiny_model(family).requires_grad_(True).train(), tiny_tokens(2, 9)
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        with compressed(model, random_plan(model, rotary=rotary)) as new_cache:
            cache = new_cache()
            loss = model(input_ids=tokens, labels=tokens, past_key_values=cache).loss
            with pytest.raises(CacheError, match="gradient"):
                loss.backward()
            assert {layer.tokens_seen for layer in cache.layers} == {9}


def test_dropout_of_attention_is_refused() -> None:
    model, tokens = tiny_model("llama", attention_dropout=0.5), tiny_tokens(2, 9)
    plan = random_plan(model)
    with compressed(model, plan), torch.no_grad():
        expected = model(input_ids=tokens).logits
        model.train()
        with pytest.raises(ModelError, match=r"call model\.eval\(\) first"):
            model(input_ids=tokens)
        model.eval()
        assert torch.equal(model(input_ids=tokens).logits, expected)


@pytest.mark.parametrize("use", [lambda m: next(capture(m, tiny_tokens())), lambda m: start(m)])
def test_bases_are_not_found_while_dropout_is_on(use: Callable) -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.1))
    with pytest.raises(ModelError, match=r"1\.mlp\.act_fn\.1 drops elements at random"):
        use(model)
    use(model.eval())


def start(model: torch.nn.Module) -> None:
    with projected(model, {}):
        pass

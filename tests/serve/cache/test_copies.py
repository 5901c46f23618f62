"""Caches that are copied and kept; models that are copied, saved and converted in a block."""

import copy
import pickle  # a cache of one's own is kept so; the package itself reads nothing that is pickled
import pickletools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from manifoldkv import CompressionPlan, Quantization, compressed
from manifoldkv.core.errors import CacheError
from manifoldkv.models.support import attention_of, decoder_layers
from manifoldkv.plan import files
from manifoldkv.serve.cache import CompressedCache
from tests.families import tiny_model, tiny_tokens
from tests.plans import random_plan
from tests.serve.cache.test_compressed import LONG, ROTARIES, assert_equal, steps

PREFIX = 8
GREEDY = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
KINDS = {
    "exact": {},
    "sinks": {"sinks": 3},
    "static": {"quantization": Quantization(4, "static", group_size=4)},
    "token": {"quantization": Quantization(4, "token", group_size=4)},
    "more-sinks-than-tokens": {
        "sinks": PREFIX + 2,
        "quantization": Quantization(4, "token", group_size=4),
    },
}


def plan_of(model: PreTrainedModel, kind: str, rotary: str) -> CompressionPlan:
    return random_plan(model, rotary=rotary, **KINDS[kind])


def two_texts() -> tuple[Tensor, Tensor]:
    """With the same beginning."""
    first, second = tiny_tokens(2, LONG).split(1)
    return first, torch.cat([first[:, :PREFIX], second[:, PREFIX:]], dim=1)


def prefilled(model: PreTrainedModel, cache: CompressedCache, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, past_key_values=cache).logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotary", ROTARIES)
class TestCopiesOfACache:
    def test_a_prefix_is_computed_once(self, kind: str, rotary: str) -> None:
        model = tiny_model("llama")
        plan = plan_of(model, kind, rotary)
        texts = two_texts()
        expected = [steps(model, plan, text, [LONG]) for text in texts]
        with compressed(model, plan) as new_cache:
            prefix = new_cache()
            prefilled(model, prefix, texts[0][:, :PREFIX])
            for text, whole in zip(texts, expected, strict=True):
                cache = copy.deepcopy(prefix)
                assert_equal(prefilled(model, cache, text[:, PREFIX:]), whole[:, PREFIX:])
                written = model.generate(text, past_key_values=copy.deepcopy(prefix), **GREEDY)
                assert torch.equal(written, model.generate(text, **GREEDY))
            assert prefix.get_seq_length() == PREFIX

    def test_a_kept_cache_goes_on_with_the_plan_that_is_loaded_again(
        self, kind: str, rotary: str, tmp_path: Path
    ) -> None:
        model, text = tiny_model("llama"), two_texts()[0]
        plan = plan_of(model, kind, rotary)
        plan.save(tmp_path)
        expected = steps(model, plan, text, [LONG])
        with compressed(model, CompressionPlan.load(tmp_path)) as new_cache:
            cache = new_cache()
            prefilled(model, cache, text[:, :PREFIX])
        pickled = pickle.dumps(cache)
        # Names alone: buffers hold memory that is not initialised, and so anything.
        names = [x for _, x, _ in pickletools.genops(pickled) if isinstance(x, str)]
        assert "CompressedCache" in names
        assert not [name for name in names if "Basis" in name or "Plan" in name]
        kept = pickle.loads(pickled)
        with compressed(model, CompressionPlan.load(tmp_path)):
            for again in (kept, cache):
                assert_equal(prefilled(model, again, text[:, PREFIX:]), expected[:, PREFIX:])


def test_a_plan_is_digested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(1, 6)
    plan = random_plan(model)
    digested = []
    stock = files.payload_of
    monkeypatch.setattr(files, "payload_of", lambda held: digested.append(1) or stock(held))
    with compressed(model, plan) as new_cache:
        model.generate(tokens, past_key_values=new_cache(), max_new_tokens=4)
    assert len(digested) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotary", ROTARIES)
def test_a_cache_filled_in_inference_mode_goes_on_outside(kind: str, rotary: str) -> None:
    model, text = tiny_model("llama"), tiny_tokens(2, LONG)
    plan = plan_of(model, kind, rotary)
    expected = steps(model, plan, text, [LONG])
    with compressed(model, plan) as new_cache:
        with torch.inference_mode():
            cache = new_cache()
            model(input_ids=text[:, :PREFIX], past_key_values=cache)
        cache.batch_select_indices(torch.tensor([1, 0]))
        with torch.inference_mode():
            cache.batch_select_indices(torch.tensor([1, 0]))
        found = [
            model(input_ids=token, past_key_values=cache).logits
            for token in text[:, PREFIX:].split(1, dim=1)
        ]
    assert_equal(torch.cat(found, dim=1), expected[:, PREFIX:])


class TestModelsInABlock:
    def test_they_are_not_copied(self) -> None:
        model = tiny_model("llama")
        with compressed(model, random_plan(model)):
            for part in (model, model.model, attention_of(decoder_layers(model)[0])):
                with pytest.raises(CacheError, match="neither copied nor pickled"):
                    copy.deepcopy(part)
                with pytest.raises(CacheError, match="neither copied nor pickled"):
                    pickle.dumps(part)
        twin = copy.deepcopy(model)
        assert torch.equal(
            twin(input_ids=tiny_tokens()).logits, model(input_ids=tiny_tokens()).logits
        )

    @pytest.mark.parametrize("family", ["llama", "gpt-oss", "gemma3"])
    @pytest.mark.parametrize("rotary", ROTARIES)
    def test_they_may_be_converted(self, family: str, rotary: str) -> None:
        tokens = tiny_tokens(2, LONG)
        expected_model = tiny_model(family).to(torch.float32)
        model = tiny_model(family)
        plan = random_plan(model, rotary=rotary)
        with compressed(expected_model, plan), torch.no_grad():
            expected = expected_model(input_ids=tokens).logits
        with compressed(model, plan) as new_cache, torch.no_grad():
            old = new_cache()
            model(input_ids=tokens, past_key_values=old)
            model.to(torch.float32)
            assert torch.allclose(model(input_ids=tokens).logits, expected, atol=1e-4)
            model.generate(tokens, max_new_tokens=2)
            with pytest.raises(CacheError, match=r"torch\.float64, which is now in torch\.float32"):
                model(input_ids=tokens, past_key_values=old)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        plain, stock = model(input_ids=tokens).logits, expected_model(input_ids=tokens).logits
        assert torch.equal(plain, stock)

    def test_they_are_saved_as_they_were(self, tmp_path: Path) -> None:
        model, tokens = tiny_model("llama"), tiny_tokens()
        with compressed(model, random_plan(model)):
            model.save_pretrained(tmp_path)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
        assert torch.equal(saved(input_ids=tokens).logits, model(input_ids=tokens).logits)
        assert "manifoldkv" not in (tmp_path / "config.json").read_text()

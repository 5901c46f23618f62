"""Caches of methods hold the bytes that are counted, and hide dropped tokens from the answer."""

import copy
import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from measurements.base import description
from measurements.loss import USUAL
from methods import METHODS, Method, Setting
from methods.base import losses
from methods.bits import BitMethod
from methods.dropping import sinks_and_recent_mask
from methods.ranks import RankMethod
from methods.stored import Stored
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from manifoldkv import RECIPES, Codec
from manifoldkv.core.errors import ModelError
from manifoldkv.evaluate import perplexity
from manifoldkv.evaluate.diagnostics.figures import MARKS
from manifoldkv.evaluate.retrieval import Prompts
from manifoldkv.models.support import attention_of, decoder_layers
from tests.families import tiny_model, tiny_tokens
from tests.stored import stored_model, stored_plan, tensors

HAS_HQQ = importlib.util.find_spec("hqq") is not None
with_hqq = pytest.mark.skipif(not HAS_HQQ, reason="needs the package hqq: extra rivals")
TOKENS, ANSWERED = 90, 4
FIRST, LAST = 4, 32
"""Tokens that StreamingLLM keeps at the beginning, and SnapKV at the end, of a prompt."""
FAMILIES = ("llama", "qwen3")
DROPPING = ("sinks-recent", "snapkv")


def model_of(family: str, **options: Any) -> PreTrainedModel:
    return tiny_model(family, max_position_embeddings=TOKENS + ANSWERED, **options)


def setting_of(model: PreTrainedModel) -> Setting:
    return Setting(model, tiny_tokens(), TOKENS, "pre", 0, Path())


def method_of(name: str, model: PreTrainedModel, ratio: float) -> Method:
    return METHODS.get(name)(setting_of(model), ratio)


def ids_of(prompt: int = TOKENS) -> Tensor:
    """Two texts of a prompt and its answer."""
    return tiny_tokens(2, prompt + ANSWERED)


@torch.no_grad()
def prompts_of(model: PreTrainedModel, ids: Tensor) -> Prompts:
    """The prompts of texts: the cache holds all of each but its last token."""
    stock = DynamicCache(config=model.config)
    ids = ids[:, : 1 - ANSWERED]
    model(input_ids=ids[:, :-1], past_key_values=stock)
    return Prompts(ids, stock)


@torch.no_grad()
def answers(model: PreTrainedModel, cache: Cache, ids: Tensor) -> Tensor:
    """Logits of the tokens after those in a cache: two of them at once, then one at a time."""
    start, logits = cache.get_seq_length(), []
    for part in (ids[:, start : start + 2], *ids[:, start + 2 :].split(1, dim=1)):
        logits.append(model(input_ids=part, past_key_values=cache).logits)
    return torch.cat(logits, dim=1)


@torch.no_grad()
def answers_where(model: PreTrainedModel, ids: Tensor, kept: list[Tensor]) -> Tensor:
    """The same from one pass over whole texts, in which answers see only kept tokens of the prompt.

    `kept` has a mask for each layer, (B, H_kv, tokens), and positions are those of the text.
    """
    texts, length = ids.shape
    with ExitStack() as stack:
        for layer, of_layer in zip(decoder_layers(model), kept, strict=True):
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            seen = seen.repeat(texts, 4, 1, 1)  # query heads, two of each KV head
            seen[:, :, TOKENS:, :TOKENS] &= of_layer.repeat_interleave(2, dim=1).unsqueeze(2)
            hook = attention_of(layer).register_forward_pre_hook(masked(seen), with_kwargs=True)
            stack.callback(hook.remove)
        return model(input_ids=ids).logits[:, TOKENS:]


def masked(seen: Tensor) -> Callable[..., Any]:
    def replace(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"attention_mask": seen}

    return replace


def kept_by_sinks_recent(model: PreTrainedModel, ids: Tensor, ratio: float) -> list[Tensor]:
    kept = torch.zeros(len(ids), 2, TOKENS, dtype=torch.bool)
    kept[..., :FIRST] = True
    kept[..., TOKENS - (int(ratio * TOKENS) - FIRST) :] = True
    return [kept] * len(decoder_layers(model))


@torch.no_grad()
def kept_by_snapkv(model: PreTrainedModel, ids: Tensor, ratio: float) -> list[Tensor]:
    """Li et al., 2024, from all attention weights of the prompt, one token after the other."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    masks = []
    for weights in model(input_ids=ids[:, :TOKENS], output_attentions=True).attentions:
        kept = torch.zeros(len(ids), 2, TOKENS, dtype=torch.bool)
        kept[..., -LAST:] = True
        for text in range(len(ids)):
            for head in range(2):
                of_head = weights[text, 2 * head : 2 * head + 2, -LAST:, :-LAST].sum(dim=(0, 1))
                near = [float(of_head[max(0, i - 2) : i + 3].sum()) for i in range(len(of_head))]
                by_weight = sorted(range(len(near)), key=near.__getitem__, reverse=True)
                kept[text, head, by_weight[: int(ratio * TOKENS) - LAST]] = True
        masks.append(kept)
    return masks


KEPT = {"sinks-recent": kept_by_sinks_recent, "snapkv": kept_by_snapkv}


def held_bytes(cache: Cache) -> int:
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


def test_every_method_is_described_and_has_a_mark() -> None:
    assert all(description(name).endswith(".") for name in METHODS.names())
    assert not set(METHODS.names()) - set(MARKS)
    colours = {MARKS[name].colour for name in USUAL}
    assert len(colours) == len(USUAL)


def test_every_recipe_of_a_cache_that_is_attended_to_is_a_method() -> None:
    """Stored caches are measured elsewhere."""
    for name in set(RECIPES) - {"stored"}:
        method = METHODS.get(name)
        assert issubclass(method, RankMethod | BitMethod)
        assert method.recipe == RECIPES[name]
        assert getattr(method, "bits", None) is None


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("fp8", 0.5), *((name, ratio) for name in DROPPING for ratio in (1.0, 0.5, 0.01))],
)
def test_the_bytes_counted_are_those_held(name: str, ratio: float) -> None:
    model = model_of("llama", dtype=torch.bfloat16)
    method = method_of(name, model, ratio)
    for tokens in (TOKENS, TOKENS - 7):
        prompts = prompts_of(model, ids_of(tokens))
        with method.holder(model, prompts) as new_cache:
            assert held_bytes(new_cache()) == len(prompts.ids) * method.nbytes(tokens)


@with_hqq
def test_the_bytes_counted_are_those_that_transformers_holds() -> None:
    """Scales and zero points in 16 bits, as a model in bfloat16 has them."""
    model = model_of("llama", dtype=torch.bfloat16, head_dim=64)
    prompts = prompts_of(model, ids_of())
    for bits in (8, 4, 2):
        method = method_of("transformers-hqq", model, bits / 16)
        with method.holder(model, prompts) as new_cache:
            layers = new_cache().layers
        sites = [x for layer in layers for x in (layer._quantized_keys, layer._quantized_values)]
        held = sum(codes.nbytes for codes, _ in sites)
        held += sum(2 * meta[name].numel() for _, meta in sites for name in ("scale", "zero"))
        assert held == len(prompts.ids) * method.nbytes(TOKENS)


@with_hqq
def test_the_quantised_cache_of_transformers_loses_more_with_fewer_bits() -> None:
    model, ids = model_of("llama", head_dim=64), ids_of()
    prompts = prompts_of(model, ids)
    exact = answers(model, copy.deepcopy(prompts.stock), ids)
    lost = []
    for bits in (8, 4, 2):
        with method_of("transformers-hqq", model, bits / 16).holder(model, prompts) as new_cache:
            lost.append(float((answers(model, new_cache(), ids) - exact).norm() / exact.norm()))
    assert lost[0] < 0.01 < lost[1] < lost[2]


def test_without_hqq_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="needs hqq: pip install"):
        method_of("transformers-hqq", model_of("llama"), 0.5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_stock_bytes_are_those_of_the_stock_cache(family: str) -> None:
    model = model_of(family, dtype=torch.bfloat16)  # sliding windows in no, all and some layers
    for tokens in (3, TOKENS):
        prompts = prompts_of(model, ids_of(tokens))
        stock_bytes = setting_of(model).stock_bytes(tokens)
        assert held_bytes(prompts.stock) == len(prompts.ids) * stock_bytes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", DROPPING)
def test_a_method_that_drops_nothing_answers_as_the_model(name: str, family: str) -> None:
    """At ratio 1, and for prompts shorter than the tokens kept at any ratio."""
    model = model_of(family)
    for tokens in (1, 3, 5, 32, 33, TOKENS):
        ids = ids_of(tokens)
        prompts = prompts_of(model, ids)
        with method_of(name, model, 1.0).holder(model, prompts) as new_cache:
            held = answers(model, new_cache(), ids)
        torch.testing.assert_close(held, answers(model, copy.deepcopy(prompts.stock), ids))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ratio", [0.7, 0.4])
@pytest.mark.parametrize("name", DROPPING)
def test_dropped_tokens_are_hidden_and_positions_stay(name: str, ratio: float, family: str) -> None:
    model, ids = model_of(family), ids_of()
    expected = answers_where(model, ids, KEPT[name](model, ids, ratio))
    assert not torch.allclose(expected, model(input_ids=ids).logits[:, TOKENS:], rtol=1e-2)
    with method_of(name, model, ratio).holder(model, prompts_of(model, ids)) as new_cache:
        for _ in range(2):  # reading one cache leaves the next one unchanged
            torch.testing.assert_close(answers(model, new_cache(), ids), expected)


def test_eight_bit_floats_are_those_of_the_format() -> None:
    model, ids = model_of("llama", dtype=torch.bfloat16), ids_of()
    prompts = prompts_of(model, ids)
    with method_of("fp8", model, 0.5).holder(model, prompts) as new_cache:
        cache = new_cache()
        answers(model, cache, ids)
    for layer, stock in zip(cache.layers, prompts.stock.layers, strict=True):
        assert layer.keys.shape[2] == ids.shape[1]
        for held, exact in ((layer.keys, stock.keys), (layer.values, stock.values)):
            rounded = exact.to(torch.float8_e4m3fn).float()
            assert torch.equal(held[:, :, :TOKENS].float(), rounded)


def sinks_and_recent_nll(model: Any, tokens: Tensor, recent: int, sinks: int) -> tuple[float, ...]:
    mask = sinks_and_recent_mask(tokens.shape[1], recent, sinks)
    return losses(model, tokens, lambda: {"attention_mask": mask}).by_sequence


@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_as_long_as_the_text_drops_nothing(family: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens(2, 12)
    whole = pytest.approx(perplexity(model, tokens).by_sequence, rel=1e-6)
    assert sinks_and_recent_nll(model, tokens, 12, 0) == whole
    assert sinks_and_recent_nll(model, tokens, 8, 4) == whole


def test_dropping_is_what_a_model_with_a_sliding_window_does() -> None:
    tokens = tiny_tokens(2, 12)
    sliding, model = tiny_model("mistral"), tiny_model("llama")  # a window of 5 tokens
    model.load_state_dict(sliding.state_dict())
    expected = perplexity(sliding, tokens).by_sequence
    assert sinks_and_recent_nll(model, tokens, 5, 0) == pytest.approx(expected, rel=1e-6)
    assert sinks_and_recent_nll(model, tokens, 5, 2) != pytest.approx(expected, rel=1e-3)


def test_a_text_sees_as_many_tokens_as_are_counted() -> None:
    model, tokens = model_of("llama"), tiny_tokens(2, 40)
    measured = method_of("sinks-recent", model, 0.5).perplexity(tokens)
    assert measured is not None
    assert measured.by_sequence == sinks_and_recent_nll(model, tokens, 20 - FIRST, FIRST)


def test_a_stored_prompt_is_answered_from_its_decoded_cache() -> None:
    model, ids = stored_model(), ids_of()
    prompts = prompts_of(model, ids)
    method = METHODS.get("stored")(setting_of(model), 0.4)
    assert isinstance(method, Stored)
    method.plan = stored_plan(ratio=0.4)
    codec = Codec(model, method.plan)
    decoded = codec.decode(codec.encode(prompts.stock))
    with method.holder(model, prompts) as new_cache:
        for _ in range(2):  # tokens after the prompt extend a cache of their own
            cache = new_cache()
            assert all(map(torch.equal, tensors(cache), tensors(decoded)))
            answers(model, cache, ids)
    assert method.perplexity(ids) is None
    assert method.nbytes(TOKENS) == method.plan.nbytes(TOKENS)

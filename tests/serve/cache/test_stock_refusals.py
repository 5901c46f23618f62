"""Stock caches that are not taken over."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer, Fp8QuantizedLayer

from manifoldkv import compressed
from manifoldkv.core.errors import CacheError
from tests.families import tiny_model, tiny_tokens
from tests.plans import random_plan
from tests.serve.cache.test_compressed import LONG
from tests.serve.cache.test_stock import prefilled, stock_cache


def refused(stock: Any, said: str, family: str = "llama", **more: Any) -> None:
    model = tiny_model(family)
    with (
        compressed(model, random_plan(model)) as new_cache,
        pytest.raises(CacheError, match=said),
    ):
        new_cache(stock, **more)


def test_other_kinds_of_caches() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(2, LONG)
    plan = random_plan(model)
    stock = stock_cache(model, tokens)
    static = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        model(input_ids=tokens, past_key_values=static)
    encoder = EncoderDecoderCache(stock, DynamicCache())
    for other in (static, encoder, prefilled(model, plan, tokens), "cache", stock.layers):
        refused(other, f"of a DynamicCache, not of {type(other).__name__}")


def test_layers_of_other_kinds() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(2, LONG)
    stock = DynamicCache(config=model.config)
    stock.layers[1] = Fp8QuantizedLayer()
    with torch.no_grad():
        model(input_ids=tokens, past_key_values=stock)
    refused(stock, "layer 1 of the stock cache is a Fp8QuantizedLayer")


def test_other_models() -> None:
    tokens = tiny_tokens(2, LONG)
    for other, said in (
        ({"num_hidden_layers": 4}, "the stock cache has 4 layers, the plan 3"),
        ({"num_key_value_heads": 4}, r"\(2, 4, 14, 8\), the model has \(2, 2, 14, 8\)"),
        ({"head_dim": 16}, r"\(2, 2, 14, 16\), the model has \(2, 2, 14, 8\)"),
        ({"dtype": torch.float32}, "in torch.float32 on cpu, the model in torch.float64 on"),
    ):
        refused(stock_cache(tiny_model("llama", **other), tokens), said)


def test_keys_and_values_that_differ() -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(2, LONG)
    for name, part in (("values", slice(1)), ("keys", slice(1)), ("values", slice(0, 0))):
        stock = stock_cache(model, tokens)
        setattr(stock.layers[2], name, getattr(stock.layers[2], name)[part])
        refused(stock, "layer 2 of the stock cache holds a tensor of")


def test_another_device() -> None:
    stock = stock_cache(tiny_model("llama"), tiny_tokens(2, LONG))
    stock.layers[2].values = stock.layers[2].values.to("meta")
    refused(stock, "layer 2 of the stock cache is in torch.float64 on meta, the model in")


def test_layers_that_have_seen_different_tokens() -> None:
    stock = stock_cache(tiny_model("llama"), tiny_tokens(2, LONG))
    stock.layers[2].crop(-3)
    refused(stock, "have seen 11 to 14 tokens")
    stock = DynamicCache()
    stock.update(torch.ones(2, 2, 4, 8), torch.ones(2, 2, 4, 8), layer_idx=0)
    stock.layers.append(DynamicLayer())
    refused(stock, "have seen 0 to 4 tokens")


def test_a_window_that_is_too_short() -> None:
    narrow = tiny_model("mistral", sliding_window=4)
    stock = stock_cache(narrow, tiny_tokens(2, LONG))
    refused(stock, "layer 0 of the stock cache holds 3 tokens, where .* see 4", "mistral")
    stock = stock_cache(narrow, tiny_tokens(2, LONG))
    refused(stock, "layer 0 of the stock cache holds 3 tokens, where .* see 14")


def test_positions_of_something_else() -> None:
    for family in ("llama", "mistral"):
        stock = stock_cache(tiny_model(family), tiny_tokens(2, LONG))
        for shape in ((2, LONG - 1), (1, LONG + 1), (3, LONG), (LONG,), (1, 1, LONG), (2, 4)):
            positions = torch.zeros(shape, dtype=torch.int64)
            said = r"must be \(1, 14\) or \(2, 14\)"
            refused(stock, said, family, position_ids=positions)
        mask = torch.ones(2, LONG, dtype=torch.bool)
        refused(stock, "not torch.bool", family, position_ids=mask)
        refused(stock, "not torch.float32", family, position_ids=mask.float())
        refused(stock, "not list", family, position_ids=mask.long().tolist())
    for empty in (None, DynamicCache()):
        refused(empty, "need an uncompressed cache with tokens", position_ids=mask.long())

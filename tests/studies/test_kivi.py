"""KIVI's cache, against its definition in NumPy."""

import copy

import numpy as np
import pytest
import torch
from methods import METHODS
from methods.kivi import GROUP, KIVI, RESIDUAL, KIVILayer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from manifoldkv.core.errors import ModelError
from manifoldkv.evaluate.retrieval import Prompts
from manifoldkv.plan.formats.integers import TokenIntegers
from tests.families import tiny_model, tiny_tokens
from tests.serve.cache.test_quantizers import rounded_by_numpy
from tests.studies.test_neighbours import setting_of

TOKENS = RESIDUAL + 2 * GROUP + 5


def kivi_of(bits: int, **options: object) -> KIVI:
    options = {"max_position_embeddings": TOKENS + 8, "dtype": torch.float32} | options
    method = METHODS.get("kivi")(setting_of(tiny_model("llama", **options)), bits / 16)
    assert isinstance(method, KIVI)
    return method


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("lengths", [[TOKENS], [1] * TOKENS, [7, 120, 1, 30, TOKENS - 158]])
def test_old_tokens_have_ranges_by_channel_and_by_token(bits: int, lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 3, TOKENS, 70, generator=generator)
    layer, size = KIVILayer(TokenIntegers(bits, GROUP), torch.eye(70)), 0
    for new_keys, new_values in zip(keys.split(lengths, 2), values.split(lengths, 2), strict=True):
        found_keys, found_values = layer.update(new_keys, new_values)
        size += new_keys.shape[2]
        assert layer.get_seq_length() == found_keys.shape[2] == size
        old = max(0, size - RESIDUAL) // GROUP * GROUP
        for start in range(0, old, GROUP):
            group = slice(start, start + GROUP)
            by_channel = keys[:, :, group].mT.numpy()
            expected, _ = rounded_by_numpy(by_channel, bits, GROUP)
            assert np.array_equal(found_keys[:, :, group].mT.numpy(), expected)
            expected, _ = rounded_by_numpy(values[:, :, group].numpy(), bits, GROUP)
            assert np.array_equal(found_values[:, :, group].numpy(), expected)
        assert torch.equal(found_keys[:, :, old:], keys[:, :, old:size])
        assert torch.equal(found_values[:, :, old:], values[:, :, old:size])


@pytest.mark.parametrize("tokens", [3, RESIDUAL + GROUP - 1, RESIDUAL + GROUP, TOKENS])
@pytest.mark.parametrize("bits", [4, 2])
def test_the_bytes_counted_are_those_held(bits: int, tokens: int) -> None:
    method = kivi_of(bits, dtype=torch.bfloat16, head_dim=128)
    model, ids = method.setting.model, tiny_tokens(2, tokens + 1)
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :-1], past_key_values=stock)
    with method.holder(model, Prompts(ids, stock)) as new_cache:
        layers = new_cache().layers
    assert sum(layer.nbytes for layer in layers) == 2 * method.nbytes(tokens)


@torch.no_grad()
def logits_of(method: KIVI, ids: Tensor, lengths: list[int]) -> Tensor:
    cache = method.new_cache()
    model = method.setting.model
    parts = [model(input_ids=part, past_key_values=cache).logits for part in ids.split(lengths, 1)]
    return torch.cat(parts, dim=1)


def test_a_text_is_read_as_token_by_token() -> None:
    method, ids = kivi_of(2), tiny_tokens(1, TOKENS)
    logits = logits_of(method, ids, [1] * TOKENS)
    expected = cross_entropy(logits[0, :-1], ids[0, 1:]).item()
    found = method.perplexity(ids)
    assert found.by_sequence == pytest.approx((expected,), rel=1e-5)
    at_once = logits_of(method, ids, [TOKENS])
    assert not torch.allclose(at_once, logits, atol=1e-3)
    assert found.tokens_scored == TOKENS - 1


def test_a_copy_goes_on_alone() -> None:
    method, ids = kivi_of(4), tiny_tokens(1, TOKENS)
    cache = method.new_cache()
    with torch.no_grad():
        method.setting.model(input_ids=ids, past_key_values=cache)
        other, before = copy.deepcopy(cache), cache.layers[0].nbytes
        method.setting.model(input_ids=ids[:, :7], past_key_values=other)
    assert cache.get_seq_length() == TOKENS
    assert cache.layers[0].nbytes == before < other.layers[0].nbytes


def test_the_rotation_is_a_hadamard_matrix_and_undone() -> None:
    rotation = kivi_of(4).rotation
    torch.testing.assert_close(rotation.abs(), torch.full((8, 8), 8**-0.5))
    keys, values = torch.randn(2, 1, 2, TOKENS, 8, generator=torch.Generator().manual_seed(0))
    layer = KIVILayer(TokenIntegers(8, GROUP), rotation)
    for found, exact in zip(layer.update(keys, values), (keys, values), strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=0.03)
    with pytest.raises(ModelError, match="a power of two, and those of this model have 6 features"):
        kivi_of(4, head_dim=6)


def test_sliding_windows_are_refused() -> None:
    with pytest.raises(ModelError, match="layer 0 has a sliding window of 5 tokens"):
        METHODS.get("kivi")(setting_of(tiny_model("mistral")), 0.25)

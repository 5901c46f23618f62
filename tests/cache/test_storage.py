from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldkv import Quantization, compressed
from manifoldkv.cache import CompressedCache
from manifoldkv.cache.storage import GrowingTensor
from manifoldkv.errors import CacheError
from tests.families import tiny_model, tiny_tokens
from tests.plans import designed_plan, random_plan


def numbered(start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop, dtype=torch.float32).view(1, 1, -1, 1).repeat(2, 3, 1, 2)


class TestGrowingTensor:
    @given(st.lists(st.tuples(st.sampled_from("afl"), st.integers(1, 300)), max_size=30))
    def test_it_is_a_list_of_tokens(self, operations: list[tuple[str, int]]) -> None:
        tensor, expected, next_token = GrowingTensor(), [], 0
        for operation, count in operations:
            if operation == "a":
                tensor.append(numbered(next_token, next_token + count))
                expected += range(next_token, next_token + count)
                next_token += count
            elif operation == "f":
                tensor.drop_first(count)
                expected = expected[count:]
            else:
                tensor.drop_last(count)
                expected = expected[: max(0, len(expected) - count)]
            assert len(tensor) == len(expected)
            if next_token:
                assert tensor.view[1, 2, :, 1].tolist() == expected
                assert tensor.nbytes == 2 * 3 * 2 * 4 * len(expected)
            if len(expected) > 1024:
                assert tensor.storage_nbytes <= 1.2 * tensor.nbytes

    def test_growth_seldom_copies(self) -> None:
        tensor, moved, address = GrowingTensor(), 0, None
        for token in range(10_000):
            tensor.append(numbered(token, token + 1))
            moved += tensor.view.data_ptr() != address
            address = tensor.view.data_ptr()
        assert moved < 80

    def test_compact_keeps_nothing_spare(self) -> None:
        tensor = GrowingTensor()
        tensor.append(numbered(0, 1500))
        assert tensor.storage_nbytes > tensor.nbytes
        tensor.compact()
        assert tensor.storage_nbytes == tensor.nbytes
        assert torch.equal(tensor.view, numbered(0, 1500))

    def test_sequences_can_be_selected(self) -> None:
        tensor = GrowingTensor()
        tensor.append(torch.arange(3.0).view(3, 1, 1, 1))
        tensor.select(torch.tensor([2, 0, 0, 1]))
        assert tensor.view.flatten().tolist() == [2, 0, 0, 1]


@pytest.mark.parametrize("kind", ["chain", "trellis chain"])
def test_memory_that_is_replaced_is_freed(kind: str) -> None:
    model, tokens = tiny_model("llama", torch.float32), tiny_tokens(2, 60).repeat(1, 10)
    plan = designed_plan(model, kind, sinks=0)

    def buffers(cache: CompressedCache) -> list[ref[torch.Tensor]]:
        return [ref(part._buffer) for part in cache._growing()]

    with compressed(model, plan) as new_cache, torch.no_grad():
        for change in (
            CompressedCache.compact,
            CompressedCache.reset,
            lambda cache: cache.crop(-500),
            lambda cache: cache.batch_select_indices(torch.tensor([1])),
        ):
            cache = new_cache()
            model(tokens[:, :-1], past_key_values=cache)
            model(tokens[:, -1:], past_key_values=cache)
            before = buffers(cache)[:-1]  # without positions, of which there is one row
            change(cache)
            assert all(buffer() is None for buffer in before)


FORMATS = {
    "exact": None,
    "static": Quantization(3, "static", group_size=4),
    "token": Quantization(4, "token", group_size=4),
    "kivi": Quantization(2, "kivi", group_size=4, residual=6),
}
"""Bytes of every width are those of tests/cache/test_quantizers.py."""


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary", ["pre", "post"])
def test_bytes_are_what_the_plan_says(name: str, dtype: torch.dtype, rotary: str) -> None:
    model, tokens = tiny_model("llama", dtype=dtype), tiny_tokens(3, 20)
    settings = {"quantization": FORMATS[name], "key_grouping": "all", "key_rank": 3}
    plan = random_plan(model, rotary=rotary, **settings)
    with compressed(model, plan) as new_cache:
        cache = new_cache()
        assert cache.nbytes() == 0
        for count, piece in enumerate(tokens.split(1, dim=1), start=1):
            model(input_ids=piece, past_key_values=cache)
            assert cache.nbytes() == plan.nbytes(count, batch=3, dtype=dtype)
        cache.compact()
        positions = 20 * 4 if rotary == "pre" else 0  # int32, one row for all sequences
        assert cache.storage_nbytes() == cache.nbytes() + positions
        model(input_ids=tokens[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 21
        cache.reset()
        assert cache.nbytes() == cache.storage_nbytes() == cache.get_seq_length() == 0


@pytest.mark.parametrize("name", ["exact", "static", "token"])
def test_bytes_of_windows(name: str) -> None:
    model = tiny_model("gemma2", dtype=torch.float32)
    plan = random_plan(model, quantization=FORMATS[name])
    with compressed(model, plan) as new_cache:
        cache = new_cache()
        for count, piece in enumerate(tiny_tokens(2, 12).split(1, dim=1), start=1):
            model(input_ids=piece, past_key_values=cache)
            assert cache.nbytes() == plan.nbytes(count, batch=2, dtype=torch.float32)
    per_token = {"exact": (5 + 4) * 4, "static": 3 + 3 + 4, "token": 3 + 2 * 4 + 2 + 4}[name]
    per_token *= 2  # heads
    assert cache.nbytes() == 2 * per_token * (12 + 4 + 4)  # one full layer, two windows of 5


def test_half_the_ranks_are_half_the_bytes_of_the_stock_cache() -> None:
    model, tokens = tiny_model("llama", dtype=torch.bfloat16), tiny_tokens(2, 12)
    stock = model(input_ids=tokens).past_key_values
    stock_bytes = sum(x.nbytes for layer in stock.layers for x in (layer.keys, layer.values))
    with compressed(model, random_plan(model, key_rank=4, value_rank=4)):
        cache = model(input_ids=tokens).past_key_values
    assert 2 * cache.nbytes() == stock_bytes


@pytest.mark.parametrize("name", FORMATS)
def test_slack_is_bounded(name: str) -> None:
    """Growth of one tensor, token by token, is bounded above."""
    model = tiny_model("llama", dtype=torch.float32, max_position_embeddings=2048)
    plan = random_plan(model, quantization=FORMATS[name])
    with compressed(model, plan) as new_cache:
        cache = new_cache()
        for tokens in tiny_tokens(1, 1232).split([1030, *[1] * 20, 90, 92], dim=1):
            model(input_ids=tokens, past_key_values=cache)
            assert cache.storage_nbytes() <= 1.25 * cache.nbytes()
        cache.crop(-2)
        assert cache.storage_nbytes() <= 1.25 * cache.nbytes()


class TestCrop:
    def test_a_positive_count_is_refused(self) -> None:
        model = tiny_model("llama")
        with compressed(model, random_plan(model)) as new_cache:
            cache = new_cache()
            model(input_ids=tiny_tokens(1, 4), past_key_values=cache)
            with pytest.raises(CacheError, match="negative number of tokens, not 2"):
                cache.crop(2)

    def test_a_window_that_has_moved_on_is_refused(self) -> None:
        model = tiny_model("mistral")
        with compressed(model, random_plan(model)) as new_cache:
            cache = new_cache()
            model(input_ids=tiny_tokens(1, 9), past_key_values=cache)
            with pytest.raises(CacheError, match="activate_past_recording"):
                cache.crop(-2)
            assert cache.get_seq_length() == 9

    def test_a_layer_that_refuses_keeps_all_layers_as_they_are(self) -> None:
        model = tiny_model("gemma2", layer_types=["full_attention"] * 2 + ["sliding_attention"])
        tokens = tiny_tokens(1, 12)
        with compressed(model, random_plan(model)) as new_cache, torch.no_grad():
            cache, other = new_cache(), new_cache()
            for each in (cache, other):
                model(input_ids=tokens[:, :9], past_key_values=each)
            with pytest.raises(CacheError, match="activate_past_recording"):
                cache.crop(-3)
            assert {layer.tokens_seen for layer in cache.layers} == {9}
            found, expected = (
                model(input_ids=tokens[:, 9:], past_key_values=each).logits
                for each in (cache, other)
            )
        assert torch.equal(found, expected)

    @pytest.mark.parametrize("count", [1, 2, 4, 5])
    def test_the_kivi_layout_goes_on_after_a_crop_or_refuses_it(self, count: int) -> None:
        model = tiny_model("llama")
        quantization = Quantization(4, "kivi", group_size=4, residual=3)
        plan = random_plan(model, quantization=quantization)
        tokens = tiny_tokens(1, 24)
        with compressed(model, plan) as new_cache, torch.no_grad():
            whole = model(input_ids=tokens).logits
            for length in range(count, 14):
                cache = new_cache()
                assert not cache.is_croppable
                model(input_ids=tokens[:, :length], past_key_values=cache)
                rounded = [
                    n - quantization.values().exact_tokens(n) for n in (length - count, length)
                ]
                if rounded[0] < rounded[1]:
                    with pytest.raises(CacheError, match="rounded already"):
                        cache.crop(-count)
                else:
                    cache.crop(-count)
                start = cache.get_seq_length()
                assert start == length - count * (rounded[0] == rounded[1])
                assert cache.nbytes() == plan.nbytes(start, dtype=torch.float64)
                found = model(input_ids=tokens[:, start:], past_key_values=cache).logits
                assert torch.allclose(found, whole[:, start:], atol=1e-6)

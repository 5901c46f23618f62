"""A stock cache as bytes and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from manifoldkv import Codec
from manifoldkv.core.errors import CacheError, RunError
from manifoldkv.recipes.stored import StoredRecipe
from manifoldkv.serve.codec import blob as blobs
from manifoldkv.serve.codec.blob import read_blob
from tests.families import tiny_model
from tests.stored import (
    CONTEXT,
    TOKENS,
    filled,
    some_tokens,
    stored_model,
    stored_plan,
    tensors,
)


def assert_same(found: DynamicCache, expected: DynamicCache, tokens: int | None = None) -> None:
    pairs = zip(tensors(found), tensors(expected, tokens), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


@pytest.mark.parametrize(
    ("family", "below"),
    [("llama", 2), ("phi3-partial", 2), ("qwen3", 1), ("olmo2", 0), ("glm4", None)],
)
def test_errors_are_those_of_rounding_in_the_plans_coordinates(
    family: str, below: int | None
) -> None:
    """The same in NumPy, with keys that were caught before their rotation."""
    model = stored_model(family)
    plan = stored_plan(family, recipe=StoredRecipe(below=below))
    assert plan.predictor_depth == (None if below is None else below)
    caught: dict[int, Tensor] = {}
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda m, args, kwargs, i=i: caught.update({i: kwargs["position_embeddings"]}),
            with_kwargs=True,
        )
        for i, layer in enumerate(model.model.layers)
    ]
    stock = filled(model, TOKENS)
    for hook in hooks:
        hook.remove()
    found = Codec(model, plan).decode(Codec(model, plan).encode(stock))
    assert isinstance(found, DynamicCache)
    layers_below: list[np.ndarray] = []
    for index, (own, given_) in enumerate(zip(found.layers, stock.layers, strict=True)):
        cos, sin = (x.double().numpy()[:, None] for x in caught[index])
        own_sites: list[np.ndarray] = []
        for site, before, after in (
            ("key", given_.keys, own.keys),
            ("value", given_.values, own.values),
        ):
            planned = getattr(plan.layers[index], site)
            basis = planned.basis
            x = before.double().numpy()
            if site == "key":
                x = rotated(x, cos, -sin, interleaved=family == "glm4")
            flat = np.concatenate(list(np.moveaxis(x, 1, 0)), axis=-1)  # (B, n, D)
            down, up = basis.down[0].double().numpy(), basis.up[0].double().numpy()
            mean, gain = planned.mean.double().numpy(), planned.quantizer.gain.double().numpy()
            if planned.predictor is not None:
                weights = planned.predictor.weights.double().numpy()
                inputs = np.concatenate([*own_sites, *layers_below], axis=-1)
                assert len(weights) == flat.shape[-1] * min(
                    len(own_sites) + 2 * index, len(own_sites) + 2 * (below or 0)
                )
                mean = mean + inputs[..., : len(weights)] @ weights
            flat = np.round((flat - mean) @ down) * gain @ up.T + mean
            own_sites.append(flat)
            x = np.stack(np.split(flat, x.shape[1], axis=-1), axis=1)
            if site == "key":
                x = rotated(x, cos, sin, interleaved=family == "glm4")
            x[:, :, : plan.sinks] = before[:, :, : plan.sinks].numpy()
            error = np.abs(x - after.numpy())
            # A latent half way between two symbols may be rounded to either; in the first layer
            # that may be the one of a token that comes often.
            assert np.quantile(error, 0.95) < 1e-4 * np.abs(x).max()
            assert not np.allclose(before.numpy(), after.numpy(), atol=1e-4)
        layers_below = [*own_sites, *layers_below]


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, interleaved: bool) -> np.ndarray:
    """Rotate the first features, those of cos and sin: halves against each other, or neighbours."""
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    if interleaved:
        cos, sin = (np.repeat(part[..., : size // 2], 2, axis=-1) for part in (cos, sin))
        crossed = np.stack([-turned[..., 1::2], turned[..., ::2]], axis=-1).reshape(turned.shape)
    else:
        crossed = np.concatenate([-turned[..., size // 2 :], turned[..., : size // 2]], axis=-1)
    return np.concatenate([turned * cos + crossed * sin, rest], axis=-1)


def test_first_tokens_are_exact(codec: Codec, stock: DynamicCache, blob: bytes) -> None:
    for found, given_ in zip(tensors(codec.decode(blob)), tensors(stock), strict=True):
        assert torch.equal(found[:, :, :4], given_[:, :, :4])
        assert not torch.equal(found[:, :, 4], given_[:, :, 4])


def test_what_decodes_is_encoded_to_the_same_bytes_again(
    codec: Codec, stock: DynamicCache, blob: bytes
) -> None:
    assert codec.encode(stock, TOKENS) == blob
    assert Codec(stored_model(), stored_plan()).encode(stock, TOKENS) == blob


def test_a_model_goes_on_from_what_comes_back(codec: Codec, blob: bytes) -> None:
    model, after = stored_model(), some_tokens(2, 8, seed=3)
    cache = codec.decode(blob)
    with torch.no_grad():
        found = model(input_ids=after, past_key_values=cache).logits
        expected = model(input_ids=torch.cat([TOKENS, after], dim=1)).logits[:, 300:]
    assert cache.get_seq_length() == 308
    assert (found - expected).abs().max() < 0.2 * expected.std()
    assert not torch.equal(found, expected)


def test_the_bytes_are_those_that_the_plan_expects(codec: Codec) -> None:
    model, plan = stored_model(), stored_plan()
    tokens = some_tokens(3, CONTEXT, seed=5)
    found = codec.encode(filled(model, tokens), tokens)
    assert len(found) == pytest.approx(plan.nbytes(CONTEXT, batch=3, dtype=model.dtype), rel=0.03)


@given(st.integers(1, 300))
@settings(max_examples=12)
def test_a_prefix_is_read_alone(tokens: int) -> None:
    codec, stock = Codec(stored_model(), stored_plan()), filled(stored_model(), TOKENS)
    blob = codec.encode(stock)
    assert_same(codec.decode(blob, tokens), codec.decode(blob), tokens)
    # The second block begins at token 256; whatever is in it is not looked at.
    damaged = blob[:-200] + bytes(200)
    if tokens <= 256:
        assert_same(codec.decode(damaged, tokens), codec.decode(blob), tokens)
    else:
        with pytest.raises(CacheError, match="the block at token 256"):
            codec.decode(damaged, tokens)


@given(st.lists(st.integers(1, 120), min_size=1, max_size=4))
@settings(max_examples=8)
def test_a_longer_prompt_is_appended(lengths: list[int]) -> None:
    model, codec = stored_model(), Codec(stored_model(), stored_plan())
    texts = some_tokens(2, 3 + sum(lengths), seed=7)
    whole, stop = filled(model, texts), 3
    blob = codec.encode(filled(model, texts[:, :stop]), texts)
    for length in lengths:
        stop += length
        longer = codec.append(blob, filled(model, texts[:, :stop]), texts)
        assert longer[blobs.HEADER_BYTES :].startswith(blob[blobs.HEADER_BYTES :])
        blob = longer
    found = codec.decode(blob)
    assert torch.equal(codec.input_ids(blob), texts)
    for mine, other in zip(tensors(found), tensors(codec.decode(codec.encode(whole))), strict=True):
        torch.testing.assert_close(mine, other, atol=0.3, rtol=0)
        assert ((mine - other).abs() > 1e-3).double().mean() < 0.01  # rounded the other way


def test_what_does_not_go_on_is_not_appended(codec: Codec, stock: DynamicCache) -> None:
    model = stored_model()
    blob = codec.encode(filled(model, TOKENS[:, :40]), TOKENS)
    with pytest.raises(CacheError, match="token ids are those of all tokens"):
        codec.append(blob, stock)
    with pytest.raises(CacheError, match="that of other tokens"):
        codec.append(blob, stock, TOKENS + 1)
    with pytest.raises(CacheError, match="1 × 50 tokens does not go on from a stored one"):
        codec.append(blob, filled(model, TOKENS[:1, :50]), TOKENS)
    with pytest.raises(CacheError, match="2 × 40 tokens does not go on"):
        codec.append(blob, filled(model, TOKENS[:, :40]), TOKENS)


def test_ids_are_given_back_or_none(codec: Codec, stock: DynamicCache, blob: bytes) -> None:
    assert torch.equal(codec.input_ids(blob), TOKENS)
    assert codec.input_ids(codec.encode(stock)) is None
    for wrong in (TOKENS[:, :299], TOKENS[:1], TOKENS[0], -TOKENS):
        with pytest.raises(CacheError, match="token ids are"):
            codec.encode(stock, wrong)


def test_a_blob_of_another_dtype_comes_back_in_the_models(
    codec: Codec, blob: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", torch.float32, max_position_embeddings=1024).bfloat16()
    other = Codec(model, stored_plan())
    for found, given_ in zip(tensors(other.decode(blob)), tensors(codec.decode(blob)), strict=True):
        assert found.dtype == torch.bfloat16
        # This model has rounded the frequencies of its angles too.
        assert (found - given_).norm() < 0.1 * given_.norm()
    assert (found - given_).norm() < 0.02 * given_.norm()  # values: only products are rounded
    monkeypatch.setattr("manifoldkv.serve.codec.blocks.product_dtype", lambda dtype: torch.float32)
    assert torch.equal(tensors(Codec(model, stored_plan()).decode(blob))[-1], given_.bfloat16())
    with pytest.raises(CacheError, match=r"is in torch\.float32, not in torch\.bfloat16"):
        other.append(blob, filled(model, some_tokens(2, 301)), some_tokens(2, 301))
    own = filled(model, TOKENS)
    for found, given_ in zip(tensors(other.decode(other.encode(own))), tensors(own), strict=True):
        assert torch.equal(found[:, :, :4], given_[:, :, :4])


@pytest.mark.parametrize("far", [1e3, 1e5])
def test_outliers_are_rounded_like_all_others(
    codec: Codec, stock: DynamicCache, far: float
) -> None:
    cache = DynamicCache(config=stored_model().config)
    for index, layer in enumerate(stock.layers):
        cache.update(layer.keys.clone(), layer.values.clone(), index)
    cache.layers[1].values[1, 0, 200] *= far
    found = codec.decode(codec.encode(cache)).layers[1].values[1, :, 200]
    expected = cache.layers[1].values[1, :, 200]
    assert (found - expected).norm() < 0.2 * expected.norm()


class TestFiles:
    def test_a_saved_cache_is_loaded(
        self, codec: Codec, stock: DynamicCache, blob: bytes, tmp_path: Path
    ) -> None:
        codec.save(stock, tmp_path / "prompt.kv", TOKENS)
        assert (tmp_path / "prompt.kv").read_bytes() == blob == read_blob(tmp_path / "prompt.kv")
        assert_same(codec.load(tmp_path / "prompt.kv", 5), codec.decode(blob), 5)
        assert [path.name for path in tmp_path.iterdir()] == ["prompt.kv"]

    def test_a_failed_save_leaves_what_was_there(
        self, codec: Codec, stock: DynamicCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "prompt.kv"
        path.write_bytes(b"before")

        def full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(RunError, match="No space left"):
            codec.save(stock, path)
        assert path.read_bytes() == b"before"

    def test_an_empty_name_is_told(
        self, codec: Codec, stock: DynamicCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(RunError, match="the name of the stored cache's file is empty"):
            codec.save(stock, "")
        with pytest.raises(CacheError, match="the name of the stored cache's file is empty"):
            codec.load("")
        with pytest.raises(RunError, match="cannot write"):
            codec.save(stock, tmp_path)
        assert not list(tmp_path.iterdir())

    def test_what_is_not_there_is_named(self, codec: Codec, tmp_path: Path) -> None:
        with pytest.raises(CacheError, match=r"cannot read .*nothing\.kv: No such file"):
            codec.load(tmp_path / "nothing.kv")
        with pytest.raises(CacheError, match="cannot read"):
            codec.load(tmp_path)


def test_more_threads_give_the_same_bytes(codec: Codec, stock: DynamicCache, blob: bytes) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert codec.encode(stock, TOKENS) == blob
        found = codec.decode(blob)
    finally:
        torch.set_num_threads(before)
    assert_same(found, codec.decode(blob))

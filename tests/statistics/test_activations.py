"""Captured activations are the model's own, and the model is left alone."""

import gc
import weakref

import pytest
import torch
import transformers

from manifoldkv.models.decoder import Decoder
from manifoldkv.statistics import layer as activations_module
from manifoldkv.statistics.capture import capture
from manifoldkv.statistics.layer import Batch
from manifoldkv.statistics.outputs import every_sequence
from tests.families import FAMILIES, activations_of, tiny_model, tiny_tokens

NORM_TOLERANCE = 1e-5  # the models' norms compute in float32 whatever the dtype


def hooked_outputs(model, tokens, names):
    """Outputs of submodules by name in a stock forward pass."""
    outputs = {}
    modules = dict(model.named_modules())
    hooks = [
        modules[name].register_forward_hook(
            lambda module, args, output, name=name: outputs.update({name: output})
        )
        for name in names
    ]
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_outputs_are_those_of_a_stock_forward_pass(family):
    model, tokens = tiny_model(family), tiny_tokens()
    names = [name for name, m in model.named_modules() if m in set(Decoder.of(model).layers)]
    stock = hooked_outputs(model, tokens, names)
    captured = list(capture(model, tokens))
    assert [a.layer for a in captured] == [0, 1, 2]
    for activations, name in zip(captured, names, strict=True):
        expected = stock[name]
        error = (activations.outputs - expected).abs().max() / expected.abs().max()
        assert error < NORM_TOLERANCE


@pytest.mark.parametrize(
    "family",
    ["llama", "llama-yarn", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2", "gpt-oss"],
)
def test_keys_are_those_before_rotation_and_after_norms(family):
    model, tokens = tiny_model(family), tiny_tokens()
    normed = family in ("qwen3", "gemma3", "olmo2")
    name = next(
        n
        for n, _ in model.named_modules()
        if n.endswith("1.self_attn." + ("k_norm" if normed else "k_proj"))
    )
    projected = hooked_outputs(model, tokens, [name])[name]
    if projected.shape[-1] != 8:
        projected = projected.unflatten(-1, (2, 8))
    if projected.shape[1] != 2:
        projected = projected.transpose(1, 2)
    keys = next(iter(capture(model, tokens, [1]))).keys
    torch.testing.assert_close(keys, projected, rtol=NORM_TOLERANCE, atol=NORM_TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_of_grouped_query_attention(family):
    a = activations_of(family)
    assert a.inputs.shape == a.outputs.shape == (4, 12, 32)
    made = a.projections("pre")
    assert made.queries.shape == (4, 4, 12, 8)
    assert made.keys.shape == made.values.shape == (4, 2, 12, 8)
    assert a.keys.shape == a.values.shape == (4, 2, 12, 8)
    assert a.mask.shape == (1, 1, 12, 12)
    assert a.keys.dtype == torch.float64
    assert (a.sequences, a.length, a.head_dim, a.kv_heads, a.query_heads) == (4, 12, 8, 2, 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_projections_of_rows_are_rows_of_the_projections(family):
    a = activations_of(family)
    batch = Batch(torch.tensor([3, 1]), torch.tensor([0, 5, 11]))
    for rotary in ("pre", "post"):
        whole = a.projections(rotary)
        assert torch.equal(whole.keys, a.keys_in(rotary))
        assert torch.equal(whole.values, a.values_of())
        for found, every in zip(a.projections(rotary, batch), whole, strict=True):
            expected = every[batch.sequences][:, :, batch.rows]
            torch.testing.assert_close(found, expected, rtol=NORM_TOLERANCE, atol=NORM_TOLERANCE)


@pytest.mark.parametrize(("layer", "window"), [(0, 5), (1, 12)])
def test_mask_has_the_window_of_its_layer(layer, window):
    mask = activations_of("gemma2", layer).mask[0, 0]
    rows, columns = torch.arange(12).unsqueeze(1), torch.arange(12)
    assert torch.equal(mask, (columns <= rows) & (columns > rows - window))


def test_sequences_do_not_depend_on_how_many_run_together(monkeypatch):
    together = activations_of("qwen3")
    monkeypatch.setattr(activations_module, "SEQUENCES_PER_FORWARD", 1)
    apart = activations_of("qwen3")
    torch.testing.assert_close(together.outputs, apart.outputs, rtol=1e-6, atol=1e-6)


def test_only_the_layers_asked_for_are_yielded():
    model, tokens = tiny_model("llama"), tiny_tokens()
    assert [a.layer for a in capture(model, tokens, [0, 2])] == [0, 2]
    every = list(capture(model, tokens))
    assert torch.equal(every[2].keys, next(iter(capture(model, tokens, [2]))).keys)


@pytest.mark.parametrize("layer", [-1, 3])
def test_layer_out_of_range_is_refused(layer):
    with pytest.raises(ValueError, match=f"layer {layer} is not between 0 and 2"):
        capture(tiny_model("llama"), tiny_tokens(), [layer])


def test_one_layer_is_held_at_a_time():
    alive = []
    for activations in capture(tiny_model("llama"), tiny_tokens()):
        gc.collect()
        assert not [reference for reference in alive if reference() is not None]
        alive.append(weakref.ref(activations.keys))
        del activations


def test_model_is_left_as_it_was():
    model, tokens = tiny_model("gemma2"), tiny_tokens()
    with torch.no_grad():
        before = model(input_ids=tokens).logits
    implementation = model.config._attn_implementation
    stream = capture(model, tokens)
    next(stream)
    assert model.config._attn_implementation == implementation
    stream.close()
    assert not [m for m in model.modules() if m._forward_pre_hooks or m._forward_hooks]
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, before)


def test_activations_of_half_precision_models_are_float32_and_stored_without_a_loss():
    model, tokens = tiny_model("llama", torch.bfloat16), tiny_tokens()
    with torch.no_grad():
        states = model(input_ids=tokens, output_hidden_states=True).hidden_states
    activations = next(iter(capture(model, tokens)))
    assert torch.equal(activations.inputs, states[0])
    assert activations.outputs.dtype == torch.bfloat16
    numbers = (
        activations.keys,
        activations.outputs_of(every_sequence(activations)),
        activations.cos,
    )
    assert {x.dtype for x in numbers} == {torch.float32}


def test_rounding_adds_up_over_many_layers():
    """In bfloat16 layers run together drift from those run one by one; that is no other layer."""
    torch.manual_seed(0)
    deep = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        initializer_range=0.1,
    )
    model = transformers.AutoModelForCausalLM.from_config(deep, dtype=torch.bfloat16)
    layers = [activations.layer for activations in capture(model, torch.randint(64, (8, 64)))]
    assert layers == list(range(96))

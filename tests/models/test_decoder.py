"""The frozen view of a model agrees with the model, and follows what may change."""

import pytest
import torch
from torch import nn

from manifoldkv.core.errors import ModelError
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.fingerprint import fingerprint
from manifoldkv.statistics.capture import capture
from tests.families import FAMILIES, MORE_FAMILIES, tiny_model, tiny_tokens


@pytest.mark.parametrize("family", FAMILIES | MORE_FAMILIES)
def test_it_is_what_the_layers_show(family: str) -> None:
    model, tokens = tiny_model(family), tiny_tokens(1, 12)
    decoder = Decoder.of(model)
    positions = torch.arange(12).unsqueeze(0)
    assert [attention.layer_idx for attention in decoder.attentions] == [0, 1, 2]
    for index, a in enumerate(capture(model, tokens)):
        assert a.module is decoder.layers[index]
        assert (a.kv_heads, a.head_dim) == (decoder.kv_heads, decoder.head_dim)
        assert a.keys.transpose(1, 2).flatten(2).shape[2] == decoder.features
        window = int(a.mask[0, 0, -1].sum())
        assert window == (decoder.windows[index] or 12)
        assert (decoder.kinds[index] == "sliding_attention") == (window < 12)
        cos, sin = decoder.angles(index, positions, a.cos)
        assert torch.equal(cos, a.cos)
        assert torch.equal(sin, a.sin)
    assert torch.equal(decoder.fingerprint(), fingerprint(model))


def test_dtype_and_devices_are_those_of_the_moment() -> None:
    model = tiny_model("llama", torch.float32)
    decoder = Decoder.of(torch.compile(model))
    assert decoder.model is model
    model.to("meta", torch.bfloat16)
    assert (decoder.dtype, decoder.device.type) == (torch.bfloat16, "meta")
    assert {device.type for device in decoder.devices} == {"meta"}
    assert repr(decoder) == "Decoder(LlamaForCausalLM, 3 layers, 2 KV heads of 8)"


def test_a_model_without_rotary_embedding_is_named() -> None:
    model = tiny_model("llama")
    model.model.rotary_emb = None
    with pytest.raises(ModelError, match="LlamaModel has no rotary_emb"):
        Decoder.of(model).angles(0, torch.arange(3).unsqueeze(0), torch.zeros(()))


def test_what_is_no_model_of_transformers_is_named() -> None:
    with pytest.raises(ModelError, match="Linear is not a transformers model"):
        Decoder.of(nn.Linear(2, 2))

"""A tiny random model of every family, and activations of one of its layers."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from manifoldkv.activations import LayerActivations, capture

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": 5, "layer_types": WINDOWS, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 5, "layer_types": WINDOWS}),
    "phi3": ("Phi3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "gpt-oss": (
        "GptOssConfig",
        {
            "sliding_window": 5,
            "layer_types": WINDOWS,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
}


def tiny_model(
    family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A random three-layer model with 4 query heads and 2 KV heads of 8, unless overridden."""
    name, settings = FAMILIES[family]
    values = COMMON | settings | overrides
    config = getattr(transformers, name)(**values, experts_implementation="eager")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
        randomize_biases(model)
    return model.eval().requires_grad_(False)


def randomize_biases(model: PreTrainedModel) -> None:
    """Norm weights, biases and sinks start as constants, which would hide mistakes."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)


def tiny_tokens(sequences: int = 4, length: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, COMMON["vocab_size"], (sequences, length), generator=generator)


def activations_of(
    family: str, layer: int = 1, sequences: int = 4, length: int = 12
) -> LayerActivations:
    """Activations of one layer of `tiny_model`, float64."""
    return next(iter(capture(tiny_model(family), tiny_tokens(sequences, length), [layer])))

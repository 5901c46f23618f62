"""A tiny random model of every family, and activations of one of its layers.

The tables in docs/models.md list them all: `FAMILIES`, which every part of the
library is tested on, `MORE_FAMILIES`, which the whole road is tested on, and those that are
`REFUSED`.
"""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from manifoldkv.activations.capture import capture
from manifoldkv.activations.layer import LayerActivations

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
KINDS = ("llama", "mistral", "gemma2", "gemma3", "gpt-oss")
"""A family of every kind of attention: no windows, windows in all layers, a soft cap, a rotation of
their own for layers with windows, and attention sinks with an angle for every pair of features."""
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 16}
MORE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("GemmaConfig", {}),
    "phi3-partial": (
        "Phi3Config",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "glm4": ("Glm4Config", {}),
    "glm4-moe": ("Glm4MoeConfig", EXPERTS | {"n_routed_experts": 2, "use_qk_norm": True}),
    "cohere": ("CohereConfig", {"use_qk_norm": True}),
    "olmo3": ("Olmo3Config", {"sliding_window": 5, "layer_types": WINDOWS}),
    "ministral": ("MinistralConfig", {"sliding_window": 5, "layer_types": WINDOWS}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "qwen3-moe": ("Qwen3MoeConfig", EXPERTS | {"num_experts": 2}),
    "granite": ("GraniteConfig", {}),
    "seed-oss": ("SeedOssConfig", {}),
    "starcoder2": ("Starcoder2Config", {}),
    "ernie4_5": ("Ernie4_5Config", {}),
}

MLA = "its multi-head latent attention (MLA) already caches a latent"
LINEAR = "it has layers of type linear_attention"
KEYWORDS = "its layer does not hand keywords on to it"
ROTATED = "computes something else when its keys and queries are rotated outside of it"
FULL = ["full_attention"] * 3
PER_LAYER = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
ROPE = {"rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}
LONG_FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
SEVERAL_POSITIONS = "its rotary embedding (M-RoPE) takes several positions of a token"
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
VISION = {"depth": 1, "hidden_size": 32, "embed_dim": 32, "num_heads": 2, "out_hidden_size": 32}
QWEN_VL = {
    "text_config": COMMON | {"rope_parameters": SECTIONS},
    "vision_config": VISION | {"intermediate_size": 16, "deepstack_visual_indexes": []},
}
UNROTATED = "some of its layers do not rotate their keys"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen2-vl": ("Qwen2VLConfig", QWEN_VL, SEVERAL_POSITIONS),
    "qwen2.5-vl": ("Qwen2_5_VLConfig", QWEN_VL, SEVERAL_POSITIONS),
    "qwen3-vl": ("Qwen3VLConfig", QWEN_VL, SEVERAL_POSITIONS),
    "deepseek-v3": ("DeepseekV3Config", EXPERTS | {"n_routed_experts": 8}, MLA),
    "minicpm3": ("MiniCPM3Config", {}, MLA),
    "qwen3-next": ("Qwen3NextConfig", EXPERTS | {"num_experts": 2}, LINEAR),
    "jamba": ("JambaConfig", {}, LINEAR),
    "mamba": ("MambaConfig", {}, LINEAR),
    "llama4": (
        "Llama4TextConfig",
        {"num_local_experts": 2, "intermediate_size_mlp": 48},
        "it has layers of type chunked_attention",
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        PER_LAYER | {"num_kv_shared_layers": 1, "layer_types": FULL, "intermediate_size": [48] * 3},
        "some of its layers share the keys and values of others",
    ),
    "gemma4": ("Gemma4TextConfig", PER_LAYER, "does not rotate queries and keys together"),
    "llama-dynamic": (
        "LlamaConfig",
        {"rope_parameters": ROPE | {"rope_type": "dynamic"}},
        "its dynamic rotary embedding changes with the length of the text",
    ),
    "phi3-longrope": (
        "Phi3Config",
        {"rope_parameters": ROPE | LONG_FACTORS | {"rope_type": "longrope"}},
        "its longrope rotary embedding changes with the length of the text",
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1]}, ROTATED),
    "cohere2": ("Cohere2Config", {"sliding_window": 5, "layer_types": WINDOWS}, ROTATED),
    "exaone4": ("Exaone4Config", {"sliding_window": 5, "layer_types": WINDOWS}, ROTATED),
    "afmoe": ("AfmoeConfig", EXPERTS | {"sliding_window": 5, "layer_types": WINDOWS}, ROTATED),
    "beam": ("BeamConfig", {"sliding_window": 5, "layer_types": WINDOWS}, UNROTATED),
    "granite-swa": (
        "GraniteSWAConfig",
        {"sliding_window": 5, "layer_types": WINDOWS},
        "it does not receive the angles that the model's rotary_emb made",
    ),
    "granite-swa-partial": (
        "GraniteSWAConfig",
        {"layer_types": WINDOWS, "layer_rope_theta": [10000.0, 0.0, 10000.0]},
        UNROTATED,
    ),
    "doge": ("DogeConfig", {}, "it replaces the attention mask by one in"),
    "hunyuan": ("HunYuanDenseV1Config", {}, ROTATED),
    "diffllama": ("DiffLlamaConfig", {}, "it calls its attention function 2 times at once"),
    "mimo-v2-flash": (
        "MiMoV2FlashConfig",
        {"layer_types": FULL},
        "its keys have 8 features in 2 heads, its values",
    ),
    "stablelm": ("StableLmConfig", {}, KEYWORDS),
    "nemotron": ("NemotronConfig", {}, KEYWORDS),
    "phi": ("PhiConfig", {}, "has no linear o_proj"),
    "persimmon": ("PersimmonConfig", {}, "has no linear o_proj"),
    "gpt-neox": ("GPTNeoXConfig", {}, "has no self_attn"),
    "gptj": ("GPTJConfig", {}, "it has no list of decoder layers"),
    "gpt2": ("GPT2Config", {}, "it has no list of decoder layers"),
    "bloom": ("BloomConfig", {}, "it has no list of decoder layers"),
    "opt": ("OPTConfig", {}, "does not rotate its keys"),
    "bert": ("BertConfig", {}, "it is an encoder, not a causal decoder"),
}


def tiny_model(
    family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A random three-layer model with 4 query heads and 2 KV heads of 8, unless overridden."""
    name, settings = (FAMILIES | MORE_FAMILIES | REFUSED)[family][:2]
    values = COMMON | settings | overrides
    config = getattr(transformers, name)(**values, experts_implementation="eager")
    auto = transformers.AutoModelForCausalLM
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        auto = transformers.AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config).to(dtype)
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

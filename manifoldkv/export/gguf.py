"""Exported models as GGUF files, which llama.cpp runs.

llama.cpp turns features 2i and 2i + 1 of a head of its `llama` architecture, where transformers
turns i and d/2 + i: queries and keys are written in that order. What the frequencies of a head are
divided by is the tensor ``rope_freqs.weight``, which only that architecture reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from manifoldkv.basis import Basis
from manifoldkv.cache.rotation import rotary_embedding_of
from manifoldkv.errors import ModelError, TextError, UnsupportedModelError
from manifoldkv.export.fold import frequency_factors
from manifoldkv.models.gguf import FREQUENCIES
from manifoldkv.models.support import sliding_windows

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}
"""What llama.cpp calls the families that can be exported."""
SAME = 1e-5
"""Factors of frequencies that differ from 1 by less are rounding."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGITS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    _GPT2: "gpt-2",
    _DIGITS + "{1,3}" + _REST: "llama-bpe",
    _DIGITS + _REST: "qwen2",
}
"""What llama.cpp calls the ways to split a text before its pieces are looked up."""


def check_writable_as_gguf(model: PreTrainedModel, key: Basis) -> None:
    """Refuse, by name, what llama.cpp would run as another model.

    Raises
    ------
    ModelError
        If the extra ``manifoldkv[gguf]`` is not installed.
    UnsupportedModelError
        Naming what llama.cpp lacks.
    """
    if find_spec("gguf") is None:
        raise ModelError("cannot write a GGUF file: pip install manifoldkv[gguf]")
    obstacle = _obstacle(model, key)
    if obstacle is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be exported as a GGUF file: {obstacle}"
        )


def _obstacle(model: PreTrainedModel, key: Basis) -> str | None:
    config = model.config
    embedding: Any = rotary_embedding_of(model.get_decoder())
    if any(window is not None for window in sliding_windows(config)):
        return f"llama.cpp has no sliding window for {config.model_type}"
    if embedding.attention_scaling != 1:
        return "its rotary embedding scales the scores, which its file would not say"
    if ARCHITECTURES[config.model_type] == "qwen2":
        factors = frequency_factors(model, key)
        if key.down.shape[-1] != key.head_dim or not _all_one(factors):
            return (
                "llama.cpp has neither a head_dim of its own nor factors of frequencies for qwen2; "
                "half the KV heads at one direction of each frequency would do"
            )
    elif getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "llama.cpp has no biases for llama"
    return None


def _all_one(factors: list[float]) -> bool:
    return all(abs(factor - 1) < SAME for factor in factors)


def write_gguf(made: PreTrainedModel, tokenizer: Path, path: Path, name: str) -> None:
    """Write a folded model and its tokenizer into one file, in the dtype of the model.

    Parameters
    ----------
    made : PreTrainedModel
        From `folded`.
    tokenizer : Path
        Folder that a tokenizer is saved in.
    path : Path
        The file.
    name : str
        Of the model.

    Raises
    ------
    TextError
        If llama.cpp has no such tokenizer, or there is none.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    kinds = {
        torch.float32: GGMLQuantizationType.F32,
        torch.float16: GGMLQuantizationType.F16,
        torch.bfloat16: GGMLQuantizationType.BF16,
    }
    writer = GGUFWriter(path, ARCHITECTURES[made.config.model_type])
    _add_settings(writer, made.config, name)
    _add_tokenizer(writer, tokenizer, made.config.vocab_size)
    for tensor_name, tensor in _tensors(made):
        data = tensor.detach().float().cpu().contiguous().numpy()
        kind = kinds.get(made.dtype, GGMLQuantizationType.F32)
        if tensor.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(tensor_name, data)
        else:
            writer.add_tensor(tensor_name, quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(writer: Any, config: PretrainedConfig, name: str) -> None:
    writer.add_name(name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _tensors(made: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model by the names they have in a file."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    architecture = ARCHITECTURES[made.config.model_type]
    names = get_tensor_name_map(
        MODEL_ARCH.LLAMA if architecture == "llama" else MODEL_ARCH.QWEN2,
        made.config.num_hidden_layers,
    )
    tied = made.config.tie_word_embeddings
    for own, tensor in made.state_dict().items():
        if tied and own == "lm_head.weight":
            continue
        if architecture == "llama" and own.split(".")[-2] in ("q_proj", "k_proj"):
            halves = tensor.unflatten(0, (-1, 2, made.config.head_dim // 2))
            tensor = halves.transpose(1, 2).flatten(0, 2)
        yield names.get_name(own, try_suffixes=(".weight", ".bias")), tensor
    embedding: Any = rotary_embedding_of(made.get_decoder())
    theta = float(made.config.rope_parameters["rope_theta"])
    powers = torch.arange(0, made.config.head_dim, 2, dtype=torch.float64) / made.config.head_dim
    factors = theta**-powers / embedding.inv_freq.double().cpu()
    if not _all_one(factors.tolist()):
        yield FREQUENCIES, factors.float()


def _add_tokenizer(writer: Any, folder: Path, vocabulary: int) -> None:
    """Write tokens, merges and what splits a text, as llama.cpp reads them."""
    from gguf import LlamaHfVocab, SpecialVocab, TokenType

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TextError("a GGUF file holds a tokenizer, and none is saved with the model")
    described = json.loads(path.read_text(encoding="utf-8"))
    by_pieces = bool(described["model"].get("byte_fallback"))
    if by_pieces:
        writer.add_tokenizer_model("llama")
        rows = list(LlamaHfVocab(folder).all_tokens())
        tokens, scores, types = ([row[i] for row in rows] for i in range(3))
        writer.add_token_scores(scores)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split_of(described))
        ids = {i: token for token, i in described["model"]["vocab"].items()}
        kinds = dict.fromkeys(ids, TokenType.NORMAL)
        for added in described["added_tokens"]:
            ids[added["id"]] = added["content"]
            kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
            kinds[added["id"]] = kind
        tokens = [ids.get(i, f"[PAD{i}]") for i in range(vocabulary)]
        types = [kinds.get(i, TokenType.UNUSED) for i in range(vocabulary)]
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = SpecialVocab(folder, load_merges=not by_pieces, n_vocab=vocabulary)
    special.add_to_gguf(writer, quiet=True)


def _split_of(described: dict[str, Any]) -> str:
    """Return the name that llama.cpp has for how a tokenizer splits a text.

    Raises
    ------
    TextError
        If there is none.
    """
    pre = described.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", [pre])
    kinds = [step.get("type") for step in steps]
    if described["model"].get("type") == "BPE" and kinds and kinds[-1] == "ByteLevel":
        first = steps[0]
        by_words = steps[-1].get("use_regex", True) and not steps[-1].get("add_prefix_space")
        if kinds == ["ByteLevel"] and by_words:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and by_words and first.get("individual_digits"):
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not steps[-1].get("use_regex", True):
            found = SPLITS.get(first.get("pattern", {}).get("Regex"))
            if found is not None and first.get("behavior") == "Isolated":
                return found
    raise TextError(
        "the tokenizer of the model splits texts in a way that is not one of llama.cpp's known "
        f"here ({', '.join(['smollm', *SPLITS.values()])}): leave --gguf out"
    )

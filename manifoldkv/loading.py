"""Loading models: whole, or layer by layer as they run."""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from manifoldkv.errors import ModelError
from manifoldkv.models import check_supported
from manifoldkv.offloading import load_offloaded


def load_model(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    offload: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, frozen and ready to be measured.

    Parameters
    ----------
    name : str
        A local folder, or the id of a model on the Hugging Face Hub.
    dtype : torch.dtype
        What the weights are converted to.
    device : str
        Where the model goes.
    offload : bool
        Whether the weights of decoder layers stay in the shards of the checkpoint, each layer's
        being read when it runs: for a model that does not fit into memory, or onto the device.

    Raises
    ------
    ModelError
        If there is no such folder or model, or it does not load.
    UnsupportedModelError
        If its attention cannot be handled (see `check_supported`).
    """
    folder = Path(name)
    looks_local = folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not (folder / "config.json").is_file():
        raise ModelError(f"no model at {name}: {folder / 'config.json'} does not exist")
    try:
        if offload:
            model, loaded = load_offloaded(name, dtype, device)
        else:
            model, loaded = AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype, output_loading_info=True
            )
            model = model.to(device)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        SafetensorError,
        StrictDataclassError,
    ) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"cannot load model {name}: {reason}") from error
    if loaded["missing_keys"]:
        missing = sorted(loaded["missing_keys"])
        raise ModelError(f"model {name} lacks {len(missing)} weights, {missing[0]} among them")
    check_supported(model)
    return model.eval().requires_grad_(False), tokenizer

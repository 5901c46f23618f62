"""Train the two reference models that the studies use when no ``--model`` is given.

    python studies/train_reference_models.py llama
    python studies/train_reference_models.py qwen3

Both learn from the docstrings of installed packages (calibration split; held-out documents and
``pydoc_data.topics`` are never seen), about an hour each on two cores. An interrupted run resumes
from its last checkpoint. Written to ``studies/reference_models/reference-<name>``: the weights in
bfloat16, configuration, tokenizer and a model card with the held-out perplexity.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from manifoldkv.core.errors import ManifoldKVError
from manifoldkv.core.seeds import check_seed
from manifoldkv.text.docstrings import read_docstrings, read_pydoc_topics

HERE = Path(__file__).parent
ARCHITECTURES: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 4096
CONTEXT = 1024
EVALUATED_TOKENS = 200 * CONTEXT


def main() -> int:
    parser = common.Parser(__doc__)
    parser.add_argument("architecture", choices=sorted(ARCHITECTURES))
    parser.add_argument("--tokens", type=int, default=10_000_000, help="tokens seen (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help=f"sequences of {CONTEXT} per step")
    parser.add_argument("--matrix-lr", type=float, default=0.01, help="Muon's rate (%(default)s)")
    parser.add_argument("--other-lr", type=float, default=0.003, help="AdamW's rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compile",
        action="store_true",
        help="torch.compile the model (1.3x, needs a C++ compiler)",
    )
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps (%(default)s)")
    parser.add_argument(
        "--work",
        type=common.folder_named,
        default=HERE / "reference_models" / ".training",
        help="folder of checkpoints and tokenized text (%(default)s)",
    )
    parser.add_threads()
    return common.run_study(parser, study)


def study(arguments: argparse.Namespace) -> None:
    check_seed(arguments.seed)
    if min(arguments.tokens, arguments.batch, arguments.checkpoint_every) < 1:
        raise ManifoldKVError("tokens, batch and checkpoint-every must be >= 1")
    folder = HERE / "reference_models" / f"reference-{arguments.architecture}"
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = load_or_train_tokenizer(work / "tokenizer.json")
    tokens = load_or_tokenize(work / "calibration.npy", tokenizer, read_docstrings("calibration"))
    held_out = load_or_tokenize(work / "held-out.npy", tokenizer, read_docstrings("held-out"))
    topics = load_or_tokenize(work / "topics.npy", tokenizer, read_pydoc_topics())
    print(f"{len(tokens):,} training, {len(held_out):,} held-out, {len(topics):,} topics tokens")

    model = build_model(arguments.architecture, tokenizer, arguments.seed)
    if arguments.compile:
        model.compile()
    seconds = train(
        model, tokens, held_out, work / f"{arguments.architecture}.safetensors", arguments
    )

    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.to(torch.float32)  # evaluates the rounded weights, which are the ones that are saved
    card = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": arguments.tokens,
        "seed": arguments.seed,
        "corpus": len(tokens),
        "hours": seconds / 3600,
        "held_out": perplexity(model, held_out[:EVALUATED_TOKENS], arguments.batch),
        "topics": perplexity(model, topics[:EVALUATED_TOKENS], arguments.batch),
    }
    (folder / "README.md").write_text(model_card(arguments, card), encoding="utf-8")
    print(json.dumps(card, indent=2))


def load_or_train_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    if not path.exists():
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        bpe.train_from_iterator(read_docstrings("calibration"), trainer)
        bpe.save(str(path))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(path),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def load_or_tokenize(
    path: Path, tokenizer: PreTrainedTokenizerFast, documents: Iterator[str]
) -> np.ndarray:
    """Return the token ids of all documents, each followed by the end-of-text token."""
    if not path.exists():
        texts = [document + END_OF_TEXT for document in documents]
        ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        np.save(path, np.concatenate([np.asarray(i, dtype=np.int64) for i in ids]))
    return np.load(path, allow_pickle=False)


def build_model(
    architecture: str, tokenizer: PreTrainedTokenizerFast, seed: int
) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = ARCHITECTURES[architecture](
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def train(
    model: PreTrainedModel,
    tokens: np.ndarray,
    held_out: np.ndarray,
    checkpoint: Path,
    arguments: argparse.Namespace,
) -> float:
    """Train in place, from the last checkpoint if there is one; return the seconds of training."""
    optimizers = build_optimizers(model, arguments)
    steps = arguments.tokens // (arguments.batch * CONTEXT)
    start, seconds = restore(checkpoint, model, optimizers)
    batches = sample_batches(tokens, arguments.batch, arguments.seed)
    progress = tqdm(total=steps, initial=start, unit="step", mininterval=5)
    for step, batch in enumerate(batches):
        if step >= steps:
            break
        if step < start:
            continue  # the order of batches follows from the seed: skip those already seen
        began = time.perf_counter()
        loss = take_step(model, optimizers, batch, learning_rate_factor(step, steps))
        seconds += time.perf_counter() - began
        progress.update()
        progress.set_postfix(perplexity=f"{math.exp(loss):.1f}")
        if (step + 1) % arguments.checkpoint_every == 0:
            save(checkpoint, model, optimizers, step + 1, seconds)
            value = perplexity(model, held_out[: EVALUATED_TOKENS // 10], arguments.batch)
            progress.write(f"step {step + 1}: held-out perplexity {value:.2f}")
    progress.close()
    save(checkpoint, model, optimizers, steps, seconds)
    return seconds


def build_optimizers(
    model: PreTrainedModel, arguments: argparse.Namespace
) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=arguments.matrix_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=arguments.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the factor: 50 warm-up steps, constant, linear decay to zero over the last 40 %."""
    return min(1.0, (step + 1) / 50, (steps - step) / (0.4 * steps))


def sample_batches(tokens: np.ndarray, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield windows of `CONTEXT` + 1 tokens that do not repeat or overlap within an epoch."""
    generator = np.random.default_rng(seed)
    while True:
        offset = int(generator.integers(CONTEXT))
        starts = np.arange(offset, len(tokens) - CONTEXT - 1, CONTEXT)
        generator.shuffle(starts)
        for i in range(0, len(starts) - batch + 1, batch):
            windows = [tokens[s : s + CONTEXT + 1] for s in starts[i : i + batch]]
            yield torch.from_numpy(np.stack(windows))


def take_step(
    model: PreTrainedModel,
    optimizers: list[torch.optim.Optimizer],
    batch: torch.Tensor,
    factor: float,
) -> float:
    loss = cross_entropy(model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("peak_lr", group["lr"])
            group["lr"] = factor * group["peak_lr"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


def cross_entropy(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def perplexity(model: PreTrainedModel, tokens: np.ndarray, batch: int) -> float:
    """Return the perplexity of consecutive windows of `CONTEXT` tokens."""
    starts = np.arange(0, len(tokens) - CONTEXT - 1, CONTEXT)
    windows = torch.from_numpy(np.stack([tokens[s : s + CONTEXT + 1] for s in starts]))
    losses = [cross_entropy(model, w) for w in windows.split(batch) if len(w) == batch]
    return math.exp(torch.stack(losses).mean().item())


def save(
    checkpoint: Path,
    model: PreTrainedModel,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    seconds: float,
) -> None:
    tensors = {f"model.{n}": p.detach() for n, p in model.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for j, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{j}.{k}": v for k, v in state.items()}
    partial = checkpoint.with_suffix(".partial")
    save_file(tensors, partial, {"step": str(step), "seconds": str(seconds)})
    partial.replace(checkpoint)


def restore(
    checkpoint: Path, model: PreTrainedModel, optimizers: list[torch.optim.Optimizer]
) -> tuple[int, float]:
    """Load a checkpoint into model and optimizers; returns (steps done, seconds spent)."""
    if not checkpoint.exists():
        return 0, 0.0
    tensors = load_file(checkpoint)
    parameters = dict(model.named_parameters())
    states: list[dict[Any, Any]] = [{} for _ in optimizers]
    with torch.no_grad():
        for name, tensor in tensors.items():
            kind, rest = name.split(".", 1)
            if kind == "model":
                parameters[rest].copy_(tensor)
            else:
                i, j, key = rest.split(".")
                states[int(i)].setdefault(int(j), {})[key] = tensor
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    with safe_open(checkpoint, "pt") as file:
        metadata = file.metadata()
    return int(metadata["step"]), float(metadata["seconds"])


def model_card(arguments: argparse.Namespace, card: dict[str, Any]) -> str:
    name, tokens, seed = arguments.architecture, card["tokens"], card["seed"]
    command = shlex.join(["python", "studies/train_reference_models.py", *sys.argv[1:]])
    facts = {
        "data": "docstrings of installed Python packages (`manifoldkv.text.docstrings`, "
        f"calibration split), {card['corpus']:,} tokens",
        "tokens seen": f"{tokens:,}",
        "seed": seed,
        "perplexity, held-out docstrings": f"{card['held_out']:.2f}",
        "perplexity, `pydoc_data.topics` (never in training)": f"{card['topics']:.2f}",
        "training time": f"{card['hours']:.2f} hours on "
        f"{common.counted(arguments.threads, 'CPU thread')}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    return f"""# reference-{name}

A small {name} decoder trained from scratch so that every study of manifoldkv runs without a
download. {card["parameters"]:,} parameters: hidden 256, 6 layers, 8 query heads, 2 KV heads,
head_dim 32, MLP 704, context {CONTEXT}, vocabulary {VOCABULARY}, tied embeddings; bfloat16.

| | |
|---|---|
{table}

Perplexities are per token of this tokenizer, over consecutive windows of {CONTEXT} tokens, at most
{EVALUATED_TOKENS:,} tokens of each text, with the rounded weights. Docstrings repeat phrases across
packages, so the held-out docstrings are the easier text of the two.

Command: `{command}`
"""


if __name__ == "__main__":
    sys.exit(main())

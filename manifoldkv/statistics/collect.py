"""Collection of statistics: forwards and backwards through a model, a few sequences at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manifoldkv.core.errors import ArgumentError
from manifoldkv.core.files import only_run
from manifoldkv.core.modes import in_own_modes
from manifoldkv.core.progress import follow
from manifoldkv.core.seeds import check_seed
from manifoldkv.models.decoder import Decoder
from manifoldkv.models.fingerprint import digest_of_model
from manifoldkv.models.support import evaluating
from manifoldkv.models.tokens import checked_tokens
from manifoldkv.models.weights import differentiable
from manifoldkv.runs.checkpoints import Checkpoints, digest_of_tokens
from manifoldkv.runs.executors import LOCAL, Executor, Task, on_threads
from manifoldkv.statistics.fisher import (
    Counted,
    differentiate_layer,
    differentiate_logits,
    run_forwards,
)
from manifoldkv.statistics.statistics import (
    LayerStatistics,
    Statistics,
    merged,
    sampled_sequences,
)

SHARD = 8
"""Sequences of a task. Sums are over shards, on any executor: so are their bytes."""
DESCRIPTION = "description"


@in_own_modes
def collect(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    text: str = "tokens",
    seed: int = 0,
    first: int = 0,
    prompt: int | None = None,
    jacobian: bool = False,
    folder: str | Path | None = None,
    executor: Executor = LOCAL,
) -> Statistics:
    """Return the statistics of keys and values of all layers on some sequences.

    Let x be the keys (before rotation, after a key norm) or the values of one token in one layer,
    all KV heads side by side, and g = ∂/∂x Σ_t log p(y_t | tokens up to t), where t runs over the
    positions of the sequence and y_t is sampled from the model's next-token distribution p at t;
    the context is always the text. With F = E[g gᵀ], an error δ in x changes the distributions of
    the sequence by a Kullback-Leibler divergence of ½ δᵀ F δ nats, to second order. This is the
    Fisher information and not the empirical one, whose y is the text (Kunstner, Balles and Hennig
    2019, Limitations of the empirical Fisher approximation, arXiv 1905.12558); theirs is of
    weights, this one of keys and values, averaged over all tokens but the `first` of a sequence.
    Costs of independent errors of tokens or tensors add up. An error that moves a token to another
    expert has no gradient, and its cost is not included.

    Eight sequences at a time run through the model layer by layer, forwards and then backwards,
    and each layer runs again for its gradients. The inputs of all layers of these sequences are
    held on the device if they fit there, else in memory, else in files.

    Parameters
    ----------
    model : PreTrainedModel
        Causal language model with rotary embeddings, left unchanged. It runs in evaluation mode,
        with attention in float32 or float64.
    tokens : Tensor
        Token ids, (S, n), int64, no padding.
    text : str
        Name of the text.
    seed : int
        Seed of the sampled y. Each sequence takes the next n numbers of one generator.
    first : int
        Number of first tokens of every sequence that are not counted: those that a cache stores
        uncompressed, and whose keys are an order of magnitude larger.
    prompt : int, optional
        Number of first tokens of every sequence that form a prompt, read without errors. Averages
        are over its tokens, and the Fisher information is that of their effect on the tokens after
        it. All tokens if omitted.
    jacobian : bool
        Whether `TensorStatistics.jacobian` is computed, by a second backward pass of every layer.
    folder : str or Path, optional
        Folder in which the statistics of every eight sequences are saved. An interrupted run
        resumes from it with equal results, unless code, model, text or settings have changed.
    executor : Executor
        Where the sequences run; the statistics are the same.

    Raises
    ------
    ModelError
        If the attention of the model is not supported.
    ArgumentError
        If the token ids or the length exceed those of the model, `first` covers all tokens, or
        `prompt` is not between `first` and the length.
        If the seed is not an integer of 64 bits.
    RunError
        If another run uses the folder, it cannot be written to, a file in it is damaged, the
        activations fit nowhere, or a gradient is not finite.
    """
    decoder = Decoder.of(model)
    check_seed(seed)
    tokens = checked_tokens(decoder.model, tokens)
    sequences, length = tokens.shape
    if not 0 <= first < length:
        raise ArgumentError(f"first must be >= 0 and < {length} tokens, got {first}")
    if prompt is not None and not first < prompt < length:
        raise ArgumentError(f"prompt must be > first ({first}) and < {length} tokens, got {prompt}")
    kept, threads = sampled_sequences(sequences, length), torch.get_num_threads()
    shards = []
    for start, part in enumerate(tokens.split(SHARD)):
        places = kept - SHARD * start
        sampled = places[(places >= 0) & (places < len(part))]
        shards.append(
            Shard(part, SHARD * start, sampled, text, seed, Counted(first, prompt), jacobian)
        )
    with nullcontext() if folder is None else only_run(Path(folder)):
        checkpoints = Checkpoints()
        if folder is not None:
            checkpoints = Checkpoints(Path(folder)).made_by(collect)
            checkpoints = checkpoints.keyed(model=digest_of_model(decoder.model), threads=threads)
        found = {shard.start: shard.resumed(checkpoints) for shard in shards}
        missing = {shard.start: shard for shard in shards if found[shard.start] is None}
        tasks = (
            Task(start, decoder.model, (shard, checkpoints.folder))
            for start, shard in missing.items()
        )
        running = executor.run(_statistics_of, tasks, threads)
        for start, statistics in follow(running, len(missing), "8 sequences each"):
            found[start] = statistics
            missing[start].store(checkpoints, statistics)
    return merged([one for one in found.values() if one is not None])


@dataclass(frozen=True, eq=False)
class Shard:
    """Neighbouring sequences of a text, the data of a task.

    Parameters
    ----------
    tokens : Tensor
        Token ids, (s, n), int64.
    start : int
        Index of the first sequence in the text.
    sampled : Tensor
        Sequences of these whose tokens are kept, int64.
    text, seed, jacobian
        As in `collect`.
    counted : Counted
        Tokens that are counted.
    """

    tokens: Tensor
    start: int
    sampled: Tensor
    text: str
    seed: int
    counted: Counted
    jacobian: bool

    def resumed(self, checkpoints: Checkpoints) -> Statistics | None:
        """Return the statistics that an earlier run has stored; None without."""
        tensors = self._keyed(checkpoints).read_tensors(self._name)
        if tensors is None:
            return None
        description = json.loads(bytes(tensors.pop(DESCRIPTION).tolist()))
        return Statistics.from_tensors(description, tensors)

    def store(self, checkpoints: Checkpoints, statistics: Statistics) -> None:
        """Store the statistics for a run that resumes."""
        description = json.dumps(statistics.describe()).encode()
        named = {DESCRIPTION: torch.tensor(list(description), dtype=torch.uint8)}
        self._keyed(checkpoints).write_tensors(self._name, statistics.tensors() | named)

    @property
    def _name(self) -> str:
        return f"statistics-{self.start}"

    def _keyed(self, checkpoints: Checkpoints) -> Checkpoints:
        return checkpoints.keyed(
            tokens=digest_of_tokens(self.tokens),
            sampled=self.sampled.tolist(),
            text=self.text,
            seed=self.seed,
            first=self.counted.first,
            prompt=self.counted.prompt,
            jacobian=self.jacobian,
        )


def _statistics_of(
    model: PreTrainedModel, shard: Shard, folder: Path | None
) -> Iterator[Statistics]:
    """Yield the statistics of a shard."""
    decoder, counted = Decoder.of(model), shard.counted
    # Setting the number of threads again has an effect: see `on_threads`.
    threads = torch.get_num_threads()
    with on_threads(threads), evaluating(model), differentiable(model), torch.no_grad():
        tokens = shard.tokens.to(decoder.device)
        activations, gradient, samples = run_forwards(
            decoder, tokens, shard.sampled, counted, folder
        )
        outputs = activations[-1].outputs
        differentiate_logits(decoder.model, tokens, outputs, shard.seed, shard.start, gradient)
        gradient[:, : counted.prompt or 0] = 0
        layers = []
        count = len(activations)
        for _ in follow(range(count), count, "layers backwards"):
            probes = (shard.seed, shard.start) if shard.jacobian else None
            sums = differentiate_layer(activations.pop(), counted, gradient, probes)
            both = zip(sums, samples.pop(), strict=True)
            layers.append(LayerStatistics(*[moments.statistics(*rest) for moments, rest in both]))
    yield Statistics(
        decoder.description(),
        tuple(reversed(layers)),
        shard.text,
        len(tokens),
        tokens.shape[1],
        counted.first,
        counted.prompt,
        shard.seed,
    )

"""Rank sensitivity: how far the predictions of a model move with the rank of one site."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from manifoldkv.basis import Rotary
from manifoldkv.models.projected import Bases, divergence, log_probabilities, projected
from manifoldkv.ranks.base import LayerBases, RankProblem
from manifoldkv.ranks.surfaces import ErrorSurface
from manifoldkv.runs.executors import Task


@torch.no_grad()
def divergences(problem: RankProblem, sequences: int) -> list[ErrorSurface]:
    """Return the rank sensitivity of every layer: divergences of predictions by pair of ranks.

    It is the Kullback-Leibler divergence from the predictions of the uncompressed model, in nats
    per token, with one site of one layer compressed and all else exact; that of a pair is the sum
    over its sites. Sums over layers predict the damage to the model better than sums of
    layer-output errors or of their squares.

    Parameters
    ----------
    problem : RankProblem
        Bases, and what to measure them on.
    sequences : int
        Calibration sequences that predictions are compared on, the first ones. What is measured on
        one is stored as a checkpoint.
    """
    model = problem.model
    variants = [
        (index, site, rank, (basis, None) if site == "key" else (None, basis))
        for index, bases in enumerate(problem.bases)
        for site, of_site in (("key", bases.keys), ("value", bases.values))
        for rank, basis in of_site.items()
        if rank < basis.head_dim
    ]
    checkpoints = problem.checkpoints.keyed(
        ranks="divergences", variants=[variant[:3] for variant in variants]
    )
    texts = problem.tokens[:sequences].to(model.device).split(1)
    measure = partial(_divergence_of, model, problem.rotary)
    nats: dict[int, Tensor] = {}  # by sequence, of all variants
    parts: dict[int, dict[int, float]] = defaultdict(dict)  # of sequences that are not finished

    with tqdm(total=len(texts) * len(variants), desc="ranks", disable=None, leave=False) as bar:

        def tasks() -> Iterator[Task[tuple[int, int]]]:
            for number, text in enumerate(texts):
                known = checkpoints.read_tensors(f"divergences-{number}")
                if known is not None:
                    nats[number] = known["nats"]
                    bar.update(len(variants))
                    continue
                data = text, log_probabilities(model, text)
                for place, (index, _, _, bases) in enumerate(variants):
                    yield Task((number, place), data, ({index: bases},))

        running = problem.executor.run(measure, tasks(), torch.get_num_threads())
        for (number, place), added in running:
            parts[number][place] = added
            bar.update()
            if len(parts[number]) == len(variants):
                of_one = [added for _, added in sorted(parts.pop(number).items())]
                nats[number] = torch.tensor(of_one, dtype=torch.float64)
                checkpoints.write_tensors(f"divergences-{number}", {"nats": nats[number]})
    # In one order, whatever was finished first: sums depend on it.
    nothing = torch.zeros(len(variants), dtype=torch.float64)
    mean = (sum((nats[number] for number in sorted(nats)), nothing) / len(texts)).tolist()
    costs = {variant[:3]: added for variant, added in zip(variants, mean, strict=True)}
    return [_summed(costs, index, bases) for index, bases in enumerate(problem.bases)]


def _divergence_of(
    model: PreTrainedModel,
    rotary: Rotary,
    data: tuple[Tensor, Tensor],
    bases: Bases,
) -> Iterator[float]:
    """Yield the divergence with some bases; data are token ids and exact predictions."""
    tokens, exact = data
    with torch.no_grad(), projected(model, bases, rotary=rotary):
        added = divergence(exact, log_probabilities(model, tokens))
    yield float(added)


def _summed(
    costs: Mapping[tuple[int, str, int], float], index: int, bases: LayerBases
) -> ErrorSurface:
    keys, values = (tuple(sorted(of_site)) for of_site in (bases.keys, bases.values))
    key, value = (
        torch.tensor([costs.get((index, site, rank), 0.0) for rank in ranks], dtype=torch.float64)
        for site, ranks in (("key", keys), ("value", values))
    )
    return ErrorSurface(keys, values, key.unsqueeze(1) + value)

"""Rank sensitivity: divergence of next-token distributions by the rank of one site."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from manifoldkv.basis import SITES, Rotary, Site
from manifoldkv.models.projected import Bases, divergence, log_probabilities, projected
from manifoldkv.modes import in_own_modes
from manifoldkv.ranks.base import LayerBases, RankProblem
from manifoldkv.ranks.surfaces import ErrorSurface
from manifoldkv.runs.executors import Task


@in_own_modes
@torch.no_grad()
def divergences(problem: RankProblem, sequences: int) -> list[ErrorSurface]:
    """Return the rank sensitivity of every layer: divergences of next-token distributions by rank.

    Each is the Kullback-Leibler divergence from the uncompressed model, in nats per token, with one
    site of one layer compressed; that of a pair is the sum over its sites. Sums over layers predict
    the damage to the model better than sums of layer-output errors or of their squares.

    Parameters
    ----------
    problem : RankProblem
        Bases and data.
    sequences : int
        Number of first calibration sequences to measure on; results of each are stored.
    """
    model = problem.model
    variants = [
        (index, site, rank, (basis, None) if site == "key" else (None, basis))
        for index, bases in enumerate(problem.bases)
        for site in SITES
        for rank, basis in bases.of(site).items()
        if rank < basis.head_dim
    ]
    checkpoints = problem.checkpoints.keyed(
        ranks="divergences", variants=[variant[:3] for variant in variants]
    )
    texts = problem.tokens[:sequences].to(model.device).split(1)
    measure = partial(_divergence_of, model, problem.rotary)
    nats: dict[int, Tensor] = {}  # by sequence
    parts: dict[int, dict[int, float]] = defaultdict(dict)  # by unfinished sequence and variant

    with tqdm(total=len(texts) * len(variants), desc="ranks", disable=None, leave=False) as bar:

        def tasks() -> Iterator[Task[tuple[int, int]]]:
            for number, text in enumerate(texts):
                stored = checkpoints.read_tensors(f"divergences-{number}")
                if stored is not None:
                    nats[number] = stored["nats"]
                    bar.update(len(variants))
                    continue
                data = text, log_probabilities(model, text)
                for at, (index, _, _, bases) in enumerate(variants):
                    yield Task((number, at), data, ({index: bases},))

        running = problem.executor.run(measure, tasks(), torch.get_num_threads())
        for (number, at), value in running:
            parts[number][at] = value
            bar.update()
            if len(parts[number]) == len(variants):
                of_text = [value for _, value in sorted(parts.pop(number).items())]
                nats[number] = torch.tensor(of_text, dtype=torch.float64)
                checkpoints.write_tensors(f"divergences-{number}", {"nats": nats[number]})
    # Summed in order of sequences, not of completion, on which the last bits would depend.
    zero = torch.zeros(len(variants), dtype=torch.float64)
    mean = (sum((nats[number] for number in sorted(nats)), zero) / len(texts)).tolist()
    costs = {variant[:3]: value for variant, value in zip(variants, mean, strict=True)}
    return [_surface(costs, index, bases) for index, bases in enumerate(problem.bases)]


def _divergence_of(
    model: PreTrainedModel, rotary: Rotary, data: tuple[Tensor, Tensor], bases: Bases
) -> Iterator[float]:
    """Yield the divergence with these bases; data are token ids and uncompressed log-probs."""
    tokens, exact = data
    with torch.no_grad(), projected(model, bases, rotary=rotary):
        value = divergence(exact, log_probabilities(model, tokens))
    yield float(value)


def _surface(
    costs: Mapping[tuple[int, Site, int], float], index: int, bases: LayerBases
) -> ErrorSurface:
    def of_site(site: Site, ranks: Sequence[int]) -> Tensor:
        return torch.tensor([costs.get((index, site, r), 0.0) for r in ranks], dtype=torch.float64)

    keys, values = tuple(sorted(bases.keys)), tuple(sorted(bases.values))
    errors = of_site("key", keys).unsqueeze(1) + of_site("value", values)
    return ErrorSurface(keys, values, errors)

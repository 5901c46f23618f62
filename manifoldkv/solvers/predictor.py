"""The paper's solver: an MLP predicts the basis from statistics (Alg. stiefattention)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from manifoldkv.activations.layer import Batch
from manifoldkv.basis import Basis, check_rank, orthonormal_basis
from manifoldkv.objectives.base import Problem
from manifoldkv.solvers.base import Solution, Solver, Status, label_of, register_solver
from manifoldkv.solvers.driver import descend


class BasisPredictor(nn.Module):
    """Map from [μ; σ²] to an orthonormal matrix: three hidden layers with LayerNorm and GELU, QR.

    Parameters
    ----------
    features : int
        Number of statistics, 2·p.
    hidden : int
        Width of the hidden layers.
    columns : int
        Number of columns of the output. The paper has p and uses the leading ones; the others have
        no gradient through QR.
    """

    def __init__(self, features: int, hidden: int, columns: int) -> None:
        super().__init__()
        self.shape = (features // 2, columns)
        widths = [features, hidden, hidden, hidden]
        blocks = [
            nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()) for a, b in pairwise(widths)
        ]
        self.layers = nn.Sequential(*blocks, nn.Linear(hidden, features // 2 * columns))

    def forward(self, statistics: Tensor) -> Tensor:
        """Return orthonormal columns (p, columns) for statistics (2·p,)."""
        return torch.linalg.qr(self.layers(statistics).view(self.shape)).Q


@register_solver("predictor")
@dataclass(frozen=True)
class Predictor(Solver):
    """The paper's MLP+QR: one `BasisPredictor` per basis, trained by AdamW on a cosine schedule.

    The defaults are the paper's. The history is the mean training loss of each epoch, and the
    solution the basis after the epoch with the lowest one.

    Parameters
    ----------
    epochs : int
        Largest number of passes over the calibration sequences.
    patience : int
        Number of epochs without improvement after which training stops.
    delta : float
        Smallest decrease of the mean loss that counts as an improvement.
    learning_rate, weight_decay : float
        Learning rate and weight decay of AdamW.
    key_batch, value_batch : int
        Number of sequences of a step, for keys and for values.
    hidden_per_head_dim : int
        Hidden width as a multiple of head_dim, which the paper does not state.
    """

    epochs: int = 50
    patience: int = 5
    delta: float = 1e-6
    learning_rate: float = 5e-3
    weight_decay: float = 1e-4
    key_batch: int = 1
    value_batch: int = 4
    hidden_per_head_dim: int = 4

    def solve(self, problem: Problem, rank: int, seed: int = 0) -> Solution:
        check_rank(rank, problem.activations.head_dim)
        statistics = problem.statistics()
        predictors = self._build(problem, statistics, rank, seed)
        parameters = [*predictors.parameters()]
        epochs = self._samples(problem, seed)
        per_epoch, sequences = len(epochs[0]), problem.activations.sequences
        optimizer = torch.optim.AdamW(
            parameters, lr=self.learning_rate, weight_decay=self.weight_decay, fused=True
        )
        steps = self.epochs * per_epoch
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        history: list[float] = []
        best: list[Tensor] = []

        def predicted() -> Tensor:
            return torch.stack([p(s) for p, s in zip(predictors, statistics, strict=True)])

        def closure(step: int) -> float:
            columns = predicted()
            batch = Batch(epochs[step // per_epoch][step % per_epoch])
            loss = problem.loss(Basis(columns, columns, problem.grouping), batch)
            loss.backward(inputs=parameters)
            return loss.item()

        def end_epoch(losses: list[float]) -> bool:
            if len(losses) % per_epoch:
                return False
            total = 0.0
            for loss, sample in zip(losses[-per_epoch:], epochs[len(history)], strict=True):
                total += loss * len(sample)
            history.append(total / sequences)
            if history[-1] == min(history):
                with torch.no_grad():
                    best[:] = [predicted()]
            return self._without_improvement(history) >= self.patience

        descend(closure, optimizer, schedule, steps, label=label_of(problem), callback=end_epoch)
        stopped = self._without_improvement(history) >= self.patience
        status: Status = "stopped early" if stopped else "all steps taken"
        return Solution(orthonormal_basis(best[0], problem.grouping), history, status)

    def _samples(self, problem: Problem, seed: int) -> list[tuple[Tensor, ...]]:
        """Return the sequences of every step by epoch, each once in random order."""
        sequences = problem.activations.sequences
        size = min(sequences, self.key_batch if problem.site == "key" else self.value_batch)
        generator = torch.Generator().manual_seed(seed)
        orders = [torch.randperm(sequences, generator=generator) for _ in range(self.epochs)]
        return [order.split(size) for order in orders]

    def _build(self, problem: Problem, statistics: Tensor, rank: int, seed: int) -> nn.ModuleList:
        hidden = self.hidden_per_head_dim * problem.activations.head_dim
        columns = rank * problem.grouping.width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            predictors = [BasisPredictor(statistics.shape[-1], hidden, columns) for _ in statistics]
        return nn.ModuleList(predictors).to(statistics)

    def _without_improvement(self, history: list[float]) -> int:
        """Return the number of epochs since the last improvement."""
        best, since = float("inf"), 0
        for value in history:
            since = 0 if value < best - self.delta else since + 1
            best = min(best, value)
        return since

"""Training loop of all solvers and of tuning."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from manifoldkv.core.errors import RunError
from manifoldkv.runs.checkpoints import Checkpoints

STEPS_BETWEEN_WRITES = 10


def descend(
    closure: Callable[[int], float],
    optimizer: Optimizer,
    schedule: LRScheduler,
    steps: int,
    *,
    label: str,
    callback: Callable[[list[float]], bool] | None = None,
    checkpoints: Checkpoints | None = None,
) -> list[float]:
    """Take steps of an optimiser and return the loss of each, computed before the step.

    Parameters
    ----------
    closure : callable
        Function of the index of a step that returns its loss, with gradients in the parameters.
    optimizer, schedule
        Optimiser of the parameters and schedule of its learning rate.
    steps : int
        Largest number of steps.
    label : str
        Subject of the loss in the progress bar, messages and names of checkpoints.
    callback : callable, optional
        Function of all losses so far, called after each step; the loop ends when it returns True.
    checkpoints : Checkpoints, optional
        Checkpoints of the state, written every `STEPS_BETWEEN_WRITES` steps: points, moments,
        learning rates and losses of an optimiser of the Adam family. The loop resumes from them.

    Raises
    ------
    RunError
        If a loss is not finite.
    """
    state = None if checkpoints is None else checkpoints.read_tensors(label)
    history = [] if state is None else _restore(optimizer, schedule, state)
    done = len(history)
    with tqdm(
        range(done, steps), label, steps, initial=done, leave=False, disable=None, delay=2
    ) as bar:
        for step in bar:
            optimizer.zero_grad(set_to_none=True)
            history.append(check_loss(closure(step), step, label))
            optimizer.step()
            schedule.step()
            bar.set_postfix_str(f"loss {history[-1]:.4g}", refresh=False)
            stop = callback is not None and callback(history)
            due = stop or step + 1 == steps or (step + 1) % STEPS_BETWEEN_WRITES == 0
            if checkpoints is not None and due:
                checkpoints.write_tensors(label, _state(optimizer, history))
            if stop:
                break
    return history


def check_loss(loss: float, step: int, label: str) -> float:
    """Return a loss, or raise `RunError` if it is not finite."""
    if not math.isfinite(loss):
        raise RunError(f"the loss is {loss} at step {step} of {label}; try a smaller learning rate")
    return loss


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [point for group in optimizer.param_groups for point in group["params"]]


def _state(optimizer: Optimizer, history: list[float]) -> dict[str, Tensor]:
    rates = [group["lr"] for group in optimizer.param_groups]
    state = {
        "history": torch.tensor(history, dtype=torch.float64),
        "rates": torch.tensor(rates, dtype=torch.float64),
    }
    for index, point in enumerate(_parameters(optimizer)):
        for name, value in ({"point": point.detach()} | optimizer.state[point]).items():
            state[f"{index}.{name}"] = torch.as_tensor(value).cpu().contiguous()
    return state


def _restore(optimizer: Optimizer, schedule: LRScheduler, state: dict[str, Tensor]) -> list[float]:
    """Restore the state of `_state`, and return the losses of the steps taken."""
    for index, point in enumerate(_parameters(optimizer)):
        point.data.copy_(state[f"{index}.point"])
        # Strides as those of the point: the last bits of products may depend on them.
        moments = {
            name: torch.zeros_like(point.data).copy_(state[f"{index}.{name}"])
            for name in ("exp_avg", "exp_avg_sq")
        }
        optimizer.state[point] = moments | {"step": int(state[f"{index}.step"])}
    history: list[float] = state["history"].tolist()
    for group, rate in zip(optimizer.param_groups, state["rates"].tolist(), strict=True):
        group["lr"] = rate
    schedule.last_epoch = len(history)
    return history

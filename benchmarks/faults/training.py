"""A training of the zoo, and the loop that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .families import Task

# watch(model, *optimizers, scaler=None) gives a monitor with log_scalar and no_monitor, or a stand-in for one
Watch = Callable[..., Any]
STEPS = 150
TAIL = 10


@dataclass(frozen=True)
class Training:
    """A small training with one fault, and its twin with the one line fixed.

    Attributes:
        name: such as ``"forgot-zero-grad/mlp"``.
        rule: the finding that is expected, ``""`` for a healthy training.
        family: the kind of model.
        run: from a watch, a seed and whether the fault is fixed to the mean loss of the last steps.
        held_back: the family is kept out while thresholds are tuned.
        advice: the line that differs, in a few words.
    """

    name: str
    rule: str
    family: str
    run: Callable[[Watch, int, bool], float]
    held_back: bool = False
    advice: str = ""


def over(
    families: Iterable[str],
    name: str,
    rule: str,
    body: Callable[[str, Watch, int, bool], float],
    advice: str,
    held_back: str = "",
) -> list[Training]:
    """One training for each family; ``held_back`` is kept out of tuning."""
    return [Training(f"{name}/{family}", rule, family, partial(body, family), family == held_back, advice) for family in families]


def last(losses: list[Tensor]) -> float:
    """The mean of the last losses."""
    return float(torch.stack(losses[-TAIL:]).float().mean())


def train(
    task: Task,
    watch: Watch,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = STEPS,
    max_norm: float | None = None,
    scheduler: Any = None,
    loss_of: Callable[[nn.Module, Any], Tensor] | None = None,
    before: Callable[[int], None] | None = None,
) -> float:
    """The loop as it should be: ``before`` is called with the number of each step, ``loss_of`` replaces the task's loss."""
    monitor = watch(task.model, optimizer)
    losses = []
    for step in range(steps):
        if before is not None:
            before(step)
        loss = (loss_of or task.loss)(task.model, next(task.batches))
        optimizer.zero_grad()
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(task.model.parameters(), max_norm)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return last(losses)

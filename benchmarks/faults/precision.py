"""Half precision: gradients that underflow, and a scaler whose order of calls is wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .families import Task, adamw, task
from .training import STEPS, Training, Watch, last, over


def _half(job: Task, weight: float = 1.0) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return weight * job.loss(job.model, next(job.batches))


def _no_scaler(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """A loss with a small weight in float16: most gradients are below the smallest number that there is."""
    job = task(family, seed)
    optimizer = adamw(job.model, eps=1e-12)
    scaler = torch.amp.GradScaler("cpu", enabled=healed)
    monitor = watch(job.model, optimizer, scaler=scaler if healed else None)
    losses = []
    for _ in range(STEPS):
        loss = _half(job, 1e-6 if family == "mlp" else 1e-5)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        scaler.step(optimizer)
        scaler.update()
    return last(losses)


def _clipped_while_scaled(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """The clip comes before the scale is taken off: its bound is thousands of times too low.

    Each step being clipped, that the bound is too low would be right as well; but the bound is not what is wrong.
    """
    job = task(family, seed)
    optimizer, scaler = torch.optim.SGD(job.model.parameters(), lr=0.1, momentum=0.9), torch.amp.GradScaler("cpu")
    monitor = watch(job.model, optimizer, scaler=scaler)
    losses = []
    for _ in range(STEPS):
        loss = _half(job)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if healed:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        scaler.step(optimizer)
        scaler.update()
    return last(losses)


def _backward_after_unscale(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """A second loss goes backward when the scale is off already, so that it counts thousands of times as much as the first."""
    job = task(family, seed)
    optimizer, scaler = adamw(job.model), torch.amp.GradScaler("cpu")
    monitor = watch(job.model, optimizer, scaler=scaler)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = _half(job)
        scaler.scale(loss).backward()
        if not healed:
            scaler.unscale_(optimizer)
        penalty = 1e-3 * sum(parameter.square().sum() for parameter in job.model.parameters())
        scaler.scale(penalty).backward()
        if healed:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(job.model.parameters(), 10.0)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        scaler.step(optimizer)
        scaler.update()
    return last(losses)


TRAININGS: list[Training] = [
    *over(
        ["autoencoder", "mlp", "gpt"],
        "float16-without-scaler",
        "low-precision-underflow",
        _no_scaler,
        "a GradScaler",
        held_back="gpt",
    ),
    *over(
        ["mlp", "resnet", "autoencoder"],
        "clip-before-unscale",
        "clipped-while-scaled",
        _clipped_while_scaled,
        "scaler.unscale_(optimizer) before the clip",
        held_back="resnet",
    ),
    *over(
        ["mlp", "autoencoder", "cnn"],
        "second-loss-after-unscale",
        "backward-after-unscale",
        _backward_after_unscale,
        "unscale_ after the last backward",
        held_back="cnn",
    ),
]

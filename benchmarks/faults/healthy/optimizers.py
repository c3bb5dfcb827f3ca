"""Optimizers, schedules, clipping and precision as they are commonly used."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from torch import nn

from ..families import Task, adamw, head_of, task
from ..training import STEPS, Training, Watch, last, train

Make = Callable[[nn.Module], torch.optim.Optimizer]


def _with(name: str, family: str, make: Make, options: dict[str, Any] | None = None, **how: Any) -> Training:
    """A training with an optimizer, and for some a schedule made from it."""
    schedule = how.pop("schedule", None)

    def run(watch: Watch, seed: int, healed: bool) -> float:
        job = task(family, seed, **(options or {}))
        optimizer = make(job.model)
        return train(job, watch, optimizer, scheduler=schedule(optimizer) if schedule else None, **how)

    return Training(f"{name}/{family}", "", family, run)


def _sgd(rate: float, **options: Any) -> Make:
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate, **options)


def _adamw(rate: float = 3e-3, **options: Any) -> Make:
    return lambda model: adamw(model, rate, **options)


def _cosine(warm_up: int, steps: int) -> Callable[[torch.optim.Optimizer], Any]:
    """A rate that rises evenly and then falls to a tenth by half a cosine."""

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / (steps - warm_up))

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)


def _decayed_in_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay for matrices only, as is the custom with transformers."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=3e-3)


def _rates_in_groups(model: nn.Module) -> torch.optim.Optimizer:
    """The trunk a tenth as fast as the head."""
    head = list(head_of(model).parameters())
    chosen = {id(p) for p in head}
    return torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if id(p) not in chosen], "lr": 1e-3}, {"params": head, "lr": 1e-2}]
    )


def _lbfgs(watch: Watch, seed: int, healed: bool) -> float:
    """Closures, which LBFGS calls several times in a step, on one batch that stays."""
    job = task("mlp", seed)
    batch = next(job.batches)
    optimizer = torch.optim.LBFGS(job.model.parameters(), lr=0.1, max_iter=4)
    monitor = watch(job.model, optimizer)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = job.loss(job.model, batch)
        loss.backward()
        return loss

    for _ in range(40):
        with torch.no_grad(), monitor.no_monitor():
            losses.append(job.loss(job.model, batch))
        monitor.log_scalar("loss", losses[-1])
        optimizer.step(closure)
    return last(losses)


def _half_with_scaler(watch: Watch, seed: int, healed: bool) -> float:
    """A scale so large at first that some steps overflow and are left out, as is usual in the first steps of float16."""
    return _scaled(task("mlp", seed), watch, torch.amp.GradScaler("cpu", init_scale=2.0**24))


def _half_clipped(watch: Watch, seed: int, healed: bool) -> float:
    """Unscaled, then clipped, then stepped."""
    return _scaled(task("autoencoder", seed), watch, torch.amp.GradScaler("cpu"), max_norm=1.0)


def _scaled(job: Task, watch: Watch, scaler: torch.amp.GradScaler, max_norm: float | None = None) -> float:
    optimizer = adamw(job.model)
    monitor = watch(job.model, optimizer, scaler=scaler)
    losses = []
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = job.loss(job.model, next(job.batches))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(job.model.parameters(), max_norm)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        scaler.step(optimizer)
        scaler.update()
    return last(losses)


def _bfloat16(family: str) -> Training:
    """Autocast to bfloat16, which needs no scaler."""

    def run(watch: Watch, seed: int, healed: bool) -> float:
        job = task(family, seed)

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return job.loss(model, batch)

        return train(job, watch, adamw(job.model), loss_of=loss)

    return Training(f"bfloat16/{family}", "", family, run)


def _near_zero(family: str) -> Training:
    """One batch again and again, until there is next to nothing left to learn: tiny gradients at the end are no fault."""

    def run(watch: Watch, seed: int, healed: bool) -> float:
        job = task(family, seed)
        job.batches = repeat(next(job.batches))
        return train(job, watch, adamw(job.model, 1e-2), steps=250)

    return Training(f"near-zero-loss/{family}", "", family, run)


TRAININGS: list[Training] = [
    _with("plain-adamw", "mlp", _adamw()),
    _with("plain-adamw", "cnn", _adamw()),
    _with("plain-adamw", "vit", _adamw(1e-3), steps=200),
    _with("plain-adamw", "rnn", _adamw()),
    _with("plain-adamw", "embedding", _adamw()),
    _with("plain-adamw", "autoencoder", _adamw()),
    _with("warm-up-and-cosine", "gpt", _adamw(4e-3, weight_decay=0.1), schedule=_cosine(20, 200), steps=200, max_norm=1.0),
    _with("warm-up-and-cosine", "vit", _adamw(2e-3), schedule=_cosine(20, STEPS)),
    _with("decay-for-matrices-only", "gpt", _decayed_in_groups),
    _with("rates-in-groups", "cnn", _rates_in_groups),
    _with("rates-in-groups", "rnn", _rates_in_groups),
    _with("sgd-with-momentum", "mlp", _sgd(0.05, momentum=0.9)),
    _with("sgd-with-momentum", "resnet", _sgd(0.02, momentum=0.9, weight_decay=1e-4)),
    _with("sgd-without-momentum", "cnn", _sgd(0.2), steps=250),
    _with("nesterov", "rnn", _sgd(0.1, momentum=0.9, nesterov=True), max_norm=1.0),
    _with("adam", "gpt", lambda model: torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.95))),
    _with("adagrad", "embedding", lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05)),
    _with("rmsprop", "cnn", lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3)),
    _with("one-cycle", "cnn", _adamw(), schedule=_one_cycle),
    _with("one-cycle", "mlp", _adamw(), schedule=_one_cycle),
    _with("clip-acts-sometimes", "mlp", _sgd(0.05, momentum=0.9), max_norm=0.7),
    _with("clip-acts-sometimes", "gpt", _adamw(), max_norm=0.8),
    _with("clip-set-high-on-purpose", "resnet", _sgd(0.02, momentum=0.9), max_norm=20.0),
    _with("clip-set-high-on-purpose", "cnn", _adamw(), max_norm=10.0),
    Training("lbfgs/mlp", "", "mlp", _lbfgs),
    Training("float16-with-first-overflows/mlp", "", "mlp", _half_with_scaler),
    Training("float16-clipped/autoencoder", "", "autoencoder", _half_clipped),
    _bfloat16("gpt"),
    _bfloat16("autoencoder"),
    _near_zero("mlp"),
    _near_zero("cnn"),
]

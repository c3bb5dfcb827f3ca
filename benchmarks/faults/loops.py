"""Loops in which a call is missing, misplaced or repeated."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from .families import adamw, task
from .training import STEPS, Training, Watch, last, over

ACCUMULATED = 4


def _no_zero_grad(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Gradients are never cleared, so each step uses the sum of all so far."""
    job = task(family, seed)
    optimizer = torch.optim.SGD(job.model.parameters(), lr={"rnn": 0.5}.get(family, 0.05))
    monitor = watch(job.model, optimizer)
    losses = []
    for _ in range(STEPS):
        loss = job.loss(job.model, next(job.batches))
        if healed:
            optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def _cleared_too_late(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Gradients are cleared between the backward and the step, which then has none."""
    job = task(family, seed)
    optimizer = adamw(job.model)
    monitor = watch(job.model, optimizer)
    losses = []
    for _ in range(STEPS):
        loss = job.loss(job.model, next(job.batches))
        if healed:
            optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        if not healed:
            optimizer.zero_grad()
        optimizer.step()
    return last(losses)


def _cleared_within(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Gradients are cleared at each of four micro-batches, so that only the last one counts, for a quarter."""
    job = task(family, seed)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1, momentum=0.9)
    monitor = watch(job.model, optimizer)
    losses = []
    for micro in range(STEPS * 2):
        if not healed or micro % ACCUMULATED == 0:
            optimizer.zero_grad()
        loss = job.loss(job.model, next(job.batches))
        (loss / ACCUMULATED).backward()
        losses.append(loss.detach())
        if micro % ACCUMULATED == ACCUMULATED - 1:
            monitor.log_scalar("loss", loss.detach())
            optimizer.step()
    return last(losses)


def _called(backward: int, steps: int, family: str, watch: Watch, seed: int, healed: bool) -> float:
    """For each forward, this number of backward passes and of steps; one of each in the mended one.

    A second one is in a helper, as a second step on the same gradient, or a backward pass that retains the graph for the other. Without
    a step torch warns of the schedule alone, where there is one.
    """
    job = task(family, seed)
    optimizer = adamw(job.model)
    monitor = watch(job.model, optimizer)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = job.loss(job.model, next(job.batches))
        for left in reversed(range(1 if healed else backward)):
            loss.backward(retain_graph=left > 0)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        for _ in range(1 if healed else steps):
            optimizer.step()
    return last(losses)


def _clipped_too_late(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """The clip comes after the step, where it has no effect."""
    job = task(family, seed)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.05, momentum=0.9)
    monitor = watch(job.model, optimizer)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = job.loss(job.model, next(job.batches))
        loss.backward()
        if healed:
            nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        if not healed:
            nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
    return last(losses)


def _clipped_each_time(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """The clip is inside the accumulation: sums of micro-batches are clipped again and again."""
    job = task(family, seed)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1, momentum=0.9)
    monitor = watch(job.model, optimizer)
    losses = []
    for micro in range(STEPS * 2):
        if micro % ACCUMULATED == 0:
            optimizer.zero_grad()
        loss = job.loss(job.model, next(job.batches))
        (loss / ACCUMULATED).backward()
        losses.append(loss.detach())
        at_end = micro % ACCUMULATED == ACCUMULATED - 1
        if at_end or not healed:
            nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)
        if at_end:
            monitor.log_scalar("loss", loss.detach())
            optimizer.step()
    return last(losses)


def _made_anew(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """The optimizer is created again before the training, and the watched one never steps."""
    job = task(family, seed)
    old = torch.optim.SGD(job.model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ConstantLR(old)  # which keeps it
    optimizer = adamw(job.model)
    monitor = watch(job.model, optimizer if healed else scheduler.optimizer)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = job.loss(job.model, next(job.batches))
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


TRAININGS: list[Training] = [
    *over(
        ["mlp", "cnn", "rnn"],
        "forgot-zero-grad",
        "missing-zero-grad",
        _no_zero_grad,
        "optimizer.zero_grad() in each step",
        held_back="rnn",
    ),
    *over(
        ["mlp", "gpt", "vit"],
        "cleared-before-step",
        "step-without-gradients",
        _cleared_too_late,
        "zero_grad() before the backward",
        held_back="vit",
    ),
    *over(
        ["mlp", "cnn", "embedding"],
        "cleared-within-accumulation",
        "micro-batch-discarded",
        _cleared_within,
        "zero_grad() once for each step",
        held_back="embedding",
    ),
    *over(
        ["mlp", "gpt", "rnn"], "two-steps", "stepped-twice", partial(_called, 1, 2), "one step for each gradient", held_back="rnn"
    ),
    *over(
        ["mlp", "gpt", "rnn"],
        "two-backward-passes",
        "backward-twice",
        partial(_called, 2, 1),
        "one for each forward",
        held_back="rnn",
    ),
    *over(["mlp", "autoencoder", "cnn"], "no-step", "never-stepped", partial(_called, 1, 0), "optimizer.step()", held_back="cnn"),
    *over(
        ["mlp", "autoencoder", "cnn"],
        "optimizer-made-anew",
        "unattached-optimizer",
        _made_anew,
        "attach the optimizer that steps",
        held_back="cnn",
    ),
    *over(
        ["mlp", "rnn", "vit"], "clip-behind-step", "clip-after-step", _clipped_too_late, "clip before the step", held_back="vit"
    ),
    *over(
        ["mlp", "autoencoder", "cnn"],
        "clip-within-accumulation",
        "clip-per-micro-batch",
        _clipped_each_time,
        "clip once, before the step",
        held_back="cnn",
    ),
]

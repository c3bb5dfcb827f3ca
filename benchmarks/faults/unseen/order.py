"""Loops in which a call is missing, misplaced or doubled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..training import Training, Watch, last
from .others import contrast, heads, sets, translate
from .worlds import World, adam, lstm, mixer, nesterov, series, unet

MICRO = 4


def in_steps(
    watch: Watch, world: World, optimizer: torch.optim.Optimizer, one: Callable[[int], Tensor], steps: int, name: str = "loss"
) -> float:
    """``one`` does all of a step up to the optimizer's and gives the loss."""
    monitor = watch(world.model, optimizer)
    losses = []
    for step in range(steps):
        loss = one(step).detach()
        monitor.log_scalar(name, loss)
        losses.append(loss)
        optimizer.step()
    return last(losses)


def _piled_up(watch: Watch, seed: int, healed: bool) -> float:
    """The gradients are never cleared, which RMSprop's division hides for a while."""
    world = series(seed)
    optimizer = torch.optim.RMSprop(world.model.parameters(), lr=1e-3)

    def one(step: int) -> Tensor:
        if healed:
            optimizer.zero_grad()
        loss = world.loss(step)
        loss.backward()
        return loss

    return in_steps(watch, world, optimizer, one, 180)


def _one_of_two(watch: Watch, seed: int, healed: bool) -> float:
    """Two optimizers; only the head's clears its gradients."""
    world = lstm(seed)
    parts = [[*world.model.embed.parameters(), *world.model.lstm.parameters()], list(world.model.head.parameters())]
    first, second = torch.optim.SGD(parts[0], lr=0.3), torch.optim.SGD(parts[1], lr=0.3)
    monitor = watch(world.model, first, second)
    losses = []
    for step in range(200):
        if healed:
            first.zero_grad()
        second.zero_grad()
        loss = world.loss(step)
        loss.backward()
        monitor.log_scalar("train_loss", loss.detach())
        losses.append(loss.detach())
        first.step()
        second.step()
    return last(losses)


def _cleared_before(watch: Watch, seed: int, healed: bool) -> float:
    """``model.zero_grad()`` stands at the end of the backward's helper, in front of the step."""
    world = unet(seed)
    optimizer = adam(world.model)

    def one(step: int) -> Tensor:
        if healed:
            world.model.zero_grad()
        loss = world.loss(step)
        loss.backward()
        if not healed:
            world.model.zero_grad()
        return loss

    return in_steps(watch, world, optimizer, one, 120)


def _discarded(watch: Watch, seed: int, healed: bool) -> float:
    """``zero_grad`` in front of each of four backwards."""
    world = sets(seed)
    optimizer = nesterov(world.model, 0.02)

    def one(step: int) -> Tensor:
        total = torch.zeros(())
        for micro in range(MICRO):
            if micro == 0 or not healed:
                optimizer.zero_grad()
            loss = world.loss(step) / MICRO
            loss.backward()
            total = total + loss.detach()
        return total

    return in_steps(watch, world, optimizer, one, 120)


def _for_each_head(watch: Watch, seed: int, healed: bool) -> float:
    """One backward for the sum of two losses, and a step for each of the two."""
    world = heads(seed)
    optimizer = adam(world.model)

    def one(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = world.loss(step)
        loss.backward()
        return loss

    monitor = watch(world.model, optimizer)
    losses = []
    for step in range(150):
        loss = one(step).detach()
        monitor.log_scalar("loss", loss)
        losses.append(loss)
        for _ in range(1 if healed else 2):
            optimizer.step()
    return last(losses)


def _scaler_alone(watch: Watch, seed: int, healed: bool) -> float:
    """The scaled backward is there, ``scaler.step(optimizer)`` and ``scaler.update()`` are not."""
    world = mixer(seed)
    optimizer, scaler = adam(world.model), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    monitor = watch(world.model, optimizer, scaler=scaler)
    losses = []
    for step in range(120):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = world.loss(step)
        scaler.scale(loss).backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        if healed:
            scaler.step(optimizer)
            scaler.update()
    return last(losses)


def _clipped_after(watch: Watch, seed: int, healed: bool) -> float:
    """The clip comes when the step is over."""
    world = translate(seed)
    optimizer = nesterov(world.model, 0.1)
    monitor = watch(world.model, optimizer)
    losses = []
    for step in range(150):
        optimizer.zero_grad()
        loss = world.loss(step)
        loss.backward()
        monitor.log_scalar("train/loss", loss.detach())
        losses.append(loss.detach())
        if healed:
            nn.utils.clip_grad_norm_(world.model.parameters(), 0.5)
        optimizer.step()
        if not healed:
            nn.utils.clip_grad_norm_(world.model.parameters(), 0.5)
    return last(losses)


def _clipped_four_times(watch: Watch, seed: int, healed: bool) -> float:
    """The clip is in the loop over micro-batches and cuts what has come together so far."""
    world = contrast(seed)
    optimizer = nesterov(world.model, 0.03)

    def one(step: int) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for micro in range(MICRO):
            loss = world.loss(step) / MICRO
            loss.backward()
            if micro == MICRO - 1 or not healed:
                nn.utils.clip_grad_norm_(world.model.parameters(), 0.3)
            total = total + loss.detach()
        return total

    return in_steps(watch, world, optimizer, one, 120)


def _scaled(
    watch: Watch,
    world: World,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[torch.amp.GradScaler], None],
    penalty: bool | None = None,
) -> float:
    """float16; ``penalty``, where it is given, states whether the second loss goes back after the unscaling."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    monitor = watch(world.model, optimizer, scaler=scaler)
    losses = []
    for step in range(150):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = world.loss(step)
        scaler.scale(loss).backward(retain_graph=penalty is not None)
        if penalty is True:
            scaler.unscale_(optimizer)
        if penalty is not None:
            scaler.scale(1e-3 * sum(p.abs().sum() for p in world.model.parameters())).backward()
        if penalty is False:
            scaler.unscale_(optimizer)
        clip(scaler)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        scaler.step(optimizer)
        scaler.update()
    return last(losses)


def _not_unscaled(watch: Watch, seed: int, healed: bool) -> float:
    """The clip sees gradients times 8192.

    As each step is cut to nearly nothing, always-clipped would describe what is seen, too.
    """
    world = series(seed)
    optimizer = nesterov(world.model, 0.05)

    def clip(scaler: torch.amp.GradScaler) -> None:
        if healed:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(world.model.parameters(), 1.0)

    return _scaled(watch, world, optimizer, clip)


def _late_penalty(watch: Watch, seed: int, healed: bool) -> float:
    """A penalty goes back, scaled, when the gradients have been unscaled already."""
    world = mixer(seed)
    return _scaled(watch, world, adam(world.model, 2e-3), lambda scaler: None, penalty=not healed)


TRAININGS: list[Training] = [
    Training("gradients-pile-up", "missing-zero-grad", "series", _piled_up, advice="optimizer.zero_grad()"),
    Training("one-of-two-cleared", "missing-zero-grad", "lstm", _one_of_two, advice="zero_grad() of both optimizers"),
    Training("cleared-by-helper", "step-without-gradients", "unet", _cleared_before, advice="zero_grad() before the backward"),
    Training("cleared-four-times", "micro-batch-discarded", "sets", _discarded, advice="zero_grad() once for each step"),
    Training("step-for-each-head", "stepped-twice", "heads", _for_each_head, advice="one step"),
    Training("scaler-without-step", "never-stepped", "mixer", _scaler_alone, advice="scaler.step(optimizer)"),
    Training("clipped-when-over", "clip-after-step", "translator", _clipped_after, advice="clip before the step"),
    Training("clipped-four-times", "clip-per-micro-batch", "contrast", _clipped_four_times, advice="clip once"),
    Training("clip-of-scaled", "clipped-while-scaled", "series", _not_unscaled, advice="scaler.unscale_ before the clip"),
    Training("late-penalty", "backward-after-unscale", "mixer", _late_penalty, advice="unscale_ after both backwards"),
]

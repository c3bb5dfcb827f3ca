"""Loops with more than one backward or step, with freezing by and by, and with models beside the one that is trained."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from torch_gradmon.cli.demo_model import CharacterGPT

from .. import data
from ..families import Task, adamw, task
from ..training import STEPS, Training, Watch, last, train


def _accumulated(family: str, max_norm: float | None) -> Training:
    """Four micro-batches to a step, each with a quarter of the loss."""

    def run(watch: Watch, seed: int, healed: bool) -> float:
        job = task(family, seed)
        optimizer = adamw(job.model)
        monitor = watch(job.model, optimizer)
        losses = []
        for _ in range(100):
            optimizer.zero_grad()
            parts = []
            for _ in range(4):
                loss = job.loss(job.model, next(job.batches)) / 4
                loss.backward()
                parts.append(loss.detach())
            if max_norm is not None:
                nn.utils.clip_grad_norm_(job.model.parameters(), max_norm)
            losses.append(torch.stack(parts).sum())
            monitor.log_scalar("loss", losses[-1])
            optimizer.step()
        return last(losses)

    return Training(f"accumulated{'-and-clipped' if max_norm else ''}/{family}", "", family, run)


def _sharpness_aware(watch: Watch, seed: int, healed: bool) -> float:
    """Sharpness-aware minimisation by hand: a backward, a move uphill, a second backward, back again, the step."""
    job = task("mlp", seed)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.05, momentum=0.9)
    monitor = watch(job.model, optimizer)
    losses = []
    for _ in range(STEPS):
        batch = next(job.batches)
        optimizer.zero_grad()
        loss = job.loss(job.model, batch)
        loss.backward()
        moves = _uphill(job.model, 0.05)
        optimizer.zero_grad()
        job.loss(job.model, batch).backward()
        with torch.no_grad():
            for parameter, move in moves:
                parameter.sub_(move)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


@torch.no_grad()
def _uphill(model: nn.Module, radius: float) -> list[tuple[Tensor, Tensor]]:
    gradients = [parameter.grad for parameter in model.parameters()]
    length = torch.stack([gradient.norm() for gradient in gradients]).norm() + 1e-12
    moves = [(p, g * (radius / length)) for p, g in zip(model.parameters(), gradients, strict=True)]
    for parameter, move in moves:
        parameter.add_(move)
    return moves


def _with_closure(watch: Watch, seed: int, healed: bool) -> float:
    """A closure, as Lightning calls it."""
    job = task("cnn", seed)
    optimizer = adamw(job.model)
    monitor = watch(job.model, optimizer)
    losses: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = job.loss(job.model, next(job.batches))
        loss.backward()
        losses.append(loss.detach())
        monitor.log_scalar("loss", losses[-1])
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
    return last(losses)


def _unfrozen_by_and_by(watch: Watch, seed: int, healed: bool) -> float:
    """The head first, then a layer more at a time; the optimizer has had all of them from the start."""
    job = task("mlp", seed, depth=3)
    linears = [module for module in job.model if isinstance(module, nn.Linear)]
    for module in linears[:-1]:
        module.requires_grad_(False)

    def before(step: int) -> None:
        if step in (40, 80, 120):
            linears[-1 - step // 40].requires_grad_(True)

    return train(job, watch, adamw(job.model), before=before, steps=240)


def _kept_zeros(watch: Watch, seed: int, healed: bool) -> float:
    """``zero_grad(set_to_none=False)``, the custom of years ago."""
    job = task("autoencoder", seed)
    optimizer = adamw(job.model)
    monitor = watch(job.model, optimizer)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss = job.loss(job.model, next(job.batches))
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def _cleared_after_step(watch: Watch, seed: int, healed: bool) -> float:
    """``zero_grad`` at the end of the step, by the module rather than by the optimizer."""
    job = task("rnn", seed)
    optimizer = adamw(job.model)
    monitor = watch(job.model, optimizer)
    losses = []
    for _ in range(STEPS):
        loss = job.loss(job.model, next(job.batches))
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        job.model.zero_grad()
    return last(losses)


def _averaged(watch: Watch, seed: int, healed: bool) -> float:
    """A copy that follows as a moving average and is evaluated now and then; it is not trained."""
    job = task("vit", seed)
    follower = copy.deepcopy(job.model).requires_grad_(False)

    def before(step: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(follower.parameters(), job.model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            if step % 50 == 49:
                follower(torch.randn(4, 1, data.SIDE, data.SIDE))

    return train(job, watch, adamw(job.model, 2e-3), before=before)


def _evaluated(watch: Watch, seed: int, healed: bool) -> float:
    """The model is evaluated every 25 steps, in eval mode and without gradients."""
    job = task("gpt", seed)

    def before(step: int) -> None:
        if step % 25 == 24:
            job.model.eval()
            with torch.no_grad():
                job.loss(job.model, next(job.batches))
            job.model.train()

    return train(job, watch, adamw(job.model), before=before)


def _loss_inside(watch: Watch, seed: int, healed: bool) -> float:
    """The demo's CharacterGPT as it is, whose forward gives the loss."""
    torch.manual_seed(seed)
    model = CharacterGPT(data.characters(), data.SIZES)
    stream = data.text(torch.Generator().manual_seed(seed + 1))
    job = Task(model, stream, lambda model, batch: model(*batch))
    return train(job, watch, adamw(model), max_norm=1.0)


TRAININGS: list[Training] = [
    _accumulated("gpt", 1.0),
    _accumulated("mlp", None),
    Training("sharpness-aware/mlp", "", "mlp", _sharpness_aware),
    Training("closure/cnn", "", "cnn", _with_closure),
    Training("unfrozen-by-and-by/mlp", "", "mlp", _unfrozen_by_and_by),
    Training("zeros-kept/autoencoder", "", "autoencoder", _kept_zeros),
    Training("cleared-after-step/rnn", "", "rnn", _cleared_after_step),
    Training("moving-average/vit", "", "vit", _averaged),
    Training("evaluated/gpt", "", "gpt", _evaluated),
    Training("loss-inside/gpt", "", "gpt", _loss_inside),
]

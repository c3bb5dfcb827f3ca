"""Healthy trainings with other optimizers, schedules, clips, precisions and loops."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from ..training import Training, Watch, last
from .others import factors, heads, regress, sets, translate, two_tasks
from .units import Lion
from .well_models import well
from .worlds import World, adam, begin, convolutions, dense, graph, gratings, loop, lstm, mixer, nesterov, series, unet, waves


def _scheduled(
    name: str,
    family: str,
    make: Callable[[int], World],
    build: Callable[[nn.Module], torch.optim.Optimizer],
    schedule: Callable[[torch.optim.Optimizer], object],
    steps: int = 200,
    clip: float | None = None,
) -> Training:
    def run(watch: Watch, seed: int, healed: bool) -> float:
        world = make(seed)
        optimizer = build(world.model)
        return loop(watch, world, optimizer, steps=steps, schedule=schedule(optimizer), clip=clip)

    return Training(name, "", family, run)


def _warm_then_cosine(optimizer: torch.optim.Optimizer) -> object:
    """A warm-up over 30 of 200 steps, and half a cosine down to nothing."""
    return lr_scheduler.LambdaLR(optimizer, lambda s: (s + 1) / 30 if s < 30 else 0.5 + 0.5 * math.cos(math.pi * (s - 30) / 170))


def _inverse_root(optimizer: torch.optim.Optimizer) -> object:
    return lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 40, (40 / (s + 1)) ** 0.5))


def _cyclic(optimizer: torch.optim.Optimizer) -> object:
    return lr_scheduler.CyclicLR(optimizer, 1e-3, 0.05, step_size_up=25, mode="triangular2")


def _restarts(optimizer: torch.optim.Optimizer) -> object:
    return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 40)


def _clipped_by_value(watch: Watch, seed: int, healed: bool) -> float:
    """Each element of the gradient is kept within 0.05."""
    world = lstm(seed)
    optimizer = torch.optim.RMSprop(world.model.parameters(), lr=2e-3)
    monitor = watch(world.model, optimizer)
    losses = []
    for step in range(150):
        optimizer.zero_grad()
        loss = world.loss(step)
        loss.backward()
        nn.utils.clip_grad_value_(world.model.parameters(), 0.05)
        monitor.log_scalar("train/loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def _eight_micro_batches(watch: Watch, seed: int, healed: bool) -> float:
    """Eight small batches to a step, then a clip that acts at times."""
    world = unet(seed, batch=4)
    optimizer = adam(world.model)
    monitor = watch(world.model, optimizer)
    losses = []
    for step in range(100):
        total = torch.zeros(())
        for _ in range(8):
            loss = world.loss(step) / 8
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(world.model.parameters(), 0.2)
        monitor.log_scalar("loss", total)
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return last(losses)


def _half(make: Callable[[int], World], max_norm: float | None, scale: float) -> Callable[[Watch, int, bool], float]:
    def run(watch: Watch, seed: int, healed: bool) -> float:
        """float16 with a scale so high that some of the first steps are left out."""
        world = make(seed)
        optimizer, scaler = adam(world.model), torch.amp.GradScaler("cpu", init_scale=scale)
        monitor = watch(world.model, optimizer, scaler=scaler)
        losses = []
        for step in range(150):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = world.loss(step)
            scaler.scale(loss).backward()
            if max_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(world.model.parameters(), max_norm)
            monitor.log_scalar("loss", loss.detach())
            losses.append(loss.detach())
            scaler.step(optimizer)
            scaler.update()
        return last(losses)

    return run


def _brain_floats(make: Callable[[int], World]) -> Callable[[int], World]:
    def made(seed: int) -> World:
        world = make(seed)

        def loss(step: int) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return world.loss(step)

        return World(world.model, loss)

    return made


def _averaged(watch: Watch, seed: int, healed: bool) -> float:
    """Weights are averaged from half of the training on; the average is evaluated at times and never trained."""
    world = series(seed)
    average = torch.optim.swa_utils.AveragedModel(world.model)
    optimizer = nesterov(world.model, 0.04)
    g = torch.Generator().manual_seed(seed)

    def after(step: int) -> None:
        if step >= 100:
            average.update_parameters(world.model)
        if step % 40 == 39:
            with torch.no_grad():
                average.eval()(waves(g)[0])

    return loop(watch, world, optimizer, steps=200, clip=1.0, after=after)


def _mixed_up(seed: int) -> World:
    """Inputs and targets are mixed in pairs; the loss cannot fall to zero."""
    g = begin(seed)
    model = convolutions(depth=2, width=18)

    def loss(step: int) -> Tensor:
        x, y = waves(g, 64)
        share = float(torch.rand((), generator=g)) * 0.4
        logits = model((1 - share) * x + share * x.roll(1, 0))
        return (1 - share) * F.cross_entropy(logits, y) + share * F.cross_entropy(logits, y.roll(1))

    return World(model, loss)


def _noisy_gradients(watch: Watch, seed: int, healed: bool) -> float:
    """Noise is added to each gradient and fades with time."""
    world = mixer(seed)
    optimizer = adam(world.model)
    g = torch.Generator().manual_seed(seed)
    monitor = watch(world.model, optimizer)
    losses = []
    for step in range(150):
        optimizer.zero_grad()
        loss = world.loss(step)
        loss.backward()
        for p in world.model.parameters():
            p.grad.add_(torch.randn(p.shape, generator=g), alpha=0.01 / (1 + step) ** 0.55)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def _harder(seed: int) -> World:
    """Noise grows in three stages; at each the loss jumps and falls again."""
    g = begin(seed)
    model = nn.Sequential(nn.Flatten(), dense(64, 64, 4))

    def loss(step: int) -> Tensor:
        x, y = gratings(g, 64)
        return F.cross_entropy(model(x + 0.5 * (step // 80) * torch.randn(x.shape, generator=g)), y)

    return World(model, loss)


def _every_third(watch: Watch, seed: int, healed: bool) -> float:
    """The second task comes with each third batch; in between its head has no gradient at all."""
    model, draw = two_tasks(seed)

    def loss(step: int) -> Tensor:
        x, number, kind = draw()
        a, b = model(x)
        return F.cross_entropy(b, kind) + (F.mse_loss(a, number) if step % 3 == 0 else 0.0)

    return loop(watch, World(model, loss), adam(model), steps=240, name="loss")


def _one_batch(seed: int) -> World:
    """One batch by heart, down to a loss of next to nothing."""
    g = begin(seed)
    model = dense(64, 64, 4, act=nn.GELU)
    x, y = gratings(g)
    return World(model, lambda step: F.cross_entropy(model(x.flatten(1)), y))


def _warm_start(watch: Watch, seed: int, healed: bool) -> float:
    """Fine tuning of a pretrained model: small rates, a new head, and the trunk a hundredth as fast."""
    world = series(seed)
    first = adam(world.model)
    for step in range(80):
        first.zero_grad()
        world.loss(step).backward()
        first.step()
    world.model.zero_grad()
    fresh = copy.deepcopy(world.model[-1])
    fresh.reset_parameters()
    world.model[-1] = fresh
    trunk = [p for p in world.model[:-1].parameters() if p.requires_grad]
    groups = [{"params": trunk, "lr": 1e-4}, {"params": list(fresh.parameters()), "lr": 1e-2}]
    return loop(watch, world, torch.optim.AdamW(groups), steps=150)


TRAININGS: list[Training] = [
    _scheduled("warm-up-and-cosine-to-0", "unet", unet, lambda m: adam(m, 3e-3), _warm_then_cosine),
    _scheduled("inverse-root", "translator", translate, lambda m: adam(m, 4e-3, betas=(0.9, 0.98)), _inverse_root, clip=1.0),
    _scheduled("triangular-cycles", "sets", sets, lambda m: nesterov(m, 0.01), _cyclic),
    _scheduled("warm-restarts", "graph", graph, lambda m: nesterov(m, 0.1), _restarts),
    well("lion", "mixer", mixer, lambda m: Lion(m.parameters(), 5e-4, decay=0.1)),
    well("large-targets", "mlp", lambda seed: regress(seed, scale=300.0), lambda m: adam(m, 0.05), steps=300),
    well("tiny-targets", "mlp", lambda seed: regress(seed, scale=1e-2), lambda m: adam(m, 3e-3), steps=200),
    well("heavy-decay", "heads", heads, lambda m: torch.optim.AdamW(m.parameters(), lr=5e-3, weight_decay=0.5), steps=200),
    well("sgd-on-factors", "factors", factors, lambda m: torch.optim.SGD(m.parameters(), lr=5.0), steps=250),
    well("nadam", "lstm", lstm, lambda m: torch.optim.NAdam(m.parameters(), lr=5e-3)),
    well("loose-bound", "lstm", lstm, lambda m: adam(m, 5e-3), clip=5.0),
    well("tight-bound-with-adam", "sets", sets, adam, clip=0.05, steps=200),
    well("mixed-up", "series", _mixed_up, lambda m: adam(m, 5e-3), steps=250),
    well("harder-by-and-by", "mlp", _harder, lambda m: adam(m, 2e-3), steps=240),
    well("one-batch-by-heart", "mlp", _one_batch, lambda m: adam(m, 1e-2), steps=250),
    well("bfloat16-unet", "unet", _brain_floats(unet)),
    well("bfloat16-series", "series", _brain_floats(series), nesterov, steps=200, clip=2.0),
    Training("clipped-by-value", "", "lstm", _clipped_by_value),
    Training("eight-micro-batches", "", "unet", _eight_micro_batches),
    Training("float16-from-2-to-the-22", "", "mixer", _half(mixer, None, 2.0**22)),
    Training("float16-and-clip", "", "series", _half(series, 0.5, 2.0**16)),
    Training("averaged-late", "", "series", _averaged),
    Training("noisy-gradients", "", "mixer", _noisy_gradients),
    Training("every-third-batch", "", "heads", _every_third),
    Training("fine-tuned", "", "series", _warm_start),
]

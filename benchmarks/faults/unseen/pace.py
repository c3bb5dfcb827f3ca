"""Rates, clips, schedules and targets that are out of proportion, and gradients too small for float16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from ..training import Training, Watch, last
from .others import contrast, curve, factors, regress, sets, translate
from .units import Lion
from .worlds import World, adam, begin, dense, gratings, loop, lstm, mixer, nesterov, series, unet


def _bounded_rows(watch: Watch, seed: int, healed: bool) -> float:
    """Embeddings are kept to a length of 0.05, and each step of Adam is about as long as that."""
    world = factors(seed, max_norm=5.0 if healed else 0.05, std=0.1)
    return loop(watch, world, adam(world.model, 0.1), steps=200)


def _lion_with_adams_rate(watch: Watch, seed: int, healed: bool) -> float:
    """A sign for each weight, times Adam's rate and more; decay keeps the weights as small as the steps.

    As all parts are concerned, that the rate is too high would be right as well.
    """
    world = mixer(seed)
    rate = 1e-3 if healed else 3e-2
    return loop(watch, world, Lion(world.model.parameters(), rate, decay=0.1 if healed else 10.0), steps=150)


def _decay_over_depth(watch: Watch, seed: int, healed: bool) -> float:
    """Rates that fall from the head to the input by a factor of 0.05 for each layer, where 0.8 was meant."""
    world = mixer(seed, depth=4)
    groups, rate = [], 3e-3
    for part in (world.model.head, world.model.norm, *reversed(world.model.blocks), world.model.stem):
        groups.append({"params": list(part.parameters()), "lr": rate})
        rate *= 0.8 if healed else 0.05
    return loop(watch, world, torch.optim.AdamW(groups), steps=150)


def _slow_tower(watch: Watch, seed: int, healed: bool) -> float:
    """One of two towers has the rate of another project, which counted in millionths."""
    world = contrast(seed)
    slow = list(world.model.left.parameters())
    rest = [*world.model.right.parameters(), world.model.log_scale]
    groups = [{"params": rest, "lr": 1e-3}, {"params": slow, "lr": 1e-3 if healed else 1e-9}]
    return loop(watch, world, torch.optim.RMSprop(groups), steps=200)


def _sum_of_errors(watch: Watch, seed: int, healed: bool) -> float:
    """The bound of a recipe whose loss is a mean; here it is a sum over the batch, with gradients a thousand times as large."""
    world = regress(seed, scale=5.0, reduction="sum")
    return loop(watch, world, torch.optim.SGD(world.model.parameters(), lr=1e-4), clip=2e3 if healed else 0.1, steps=250)


def _tight_bound(watch: Watch, seed: int, healed: bool) -> float:
    """A bound of 0.002 for an LSTM whose gradients are a hundred times as long."""
    world = lstm(seed)
    return loop(watch, world, nesterov(world.model, 0.3), clip=1.0 if healed else 2e-3, name="train/loss")


def _heavy_tails(watch: Watch, seed: int, healed: bool) -> float:
    """Targets with heavy tails, a squared error, and a bound above all that ever comes."""
    g = begin(seed)
    model = dense(4, 48, 48, 1)

    def loss(step: int) -> Tensor:
        x, y = curve(g)
        wild = torch.rand(64, generator=g) < (0.06 if step % 20 == 15 else 0.0)
        y = torch.where(wild, 150 * torch.randn(64, generator=g), y)
        return F.mse_loss(model(x).squeeze(-1), y)

    return loop(watch, World(model, loss), nesterov(model, 0.003), clip=1.0 if healed else 1e6, steps=250)


def _glitches(watch: Watch, seed: int, healed: bool) -> float:
    """A sensor's glitch multiplies a whole batch by 15 now and then; the bound of 50000 lets each one through."""
    world = series(seed, act=nn.GELU)
    g = torch.Generator().manual_seed(seed)
    at = [0]

    def disturb(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        at[0] += 1
        return (inputs[0][torch.randperm(len(inputs[0]), generator=g)] * 15,) if at[0] % 30 == 20 else inputs

    world.model[0].register_forward_pre_hook(disturb)
    return loop(watch, world, nesterov(world.model, 0.03), clip=0.5 if healed else 5e4, steps=190)


def _warm_up(reach: int) -> Callable[[int], float]:
    return lambda step: min(1.0, (step + 1) / reach)


def _long_warm_up(watch: Watch, seed: int, healed: bool) -> float:
    """A warm-up over two million steps, stopped after 200."""
    world = translate(seed)
    optimizer = adam(world.model, 3e-3)
    return loop(
        watch, world, optimizer, steps=200, schedule=lr_scheduler.LambdaLR(optimizer, _warm_up(20 if healed else 2_000_000))
    )


def _rate(
    make: Callable[..., World], build: Callable[..., torch.optim.Optimizer], wrong: float, right: float, name: str = "loss"
):
    def run(watch: Watch, seed: int, healed: bool) -> float:
        """One rate for all."""
        world = make(seed)
        return loop(watch, world, build(world.model, right if healed else wrong), steps=180, name=name)

    return run


def _broadcast(watch: Watch, seed: int, healed: bool) -> float:
    """``[64, 1]`` minus ``[64]`` is ``[64, 64]``: each output is drawn to all targets, and learns their mean."""
    g = begin(seed)
    model = dense(4, 48, 48, 1)

    def loss(step: int) -> Tensor:
        x, y = curve(g)
        return (model(x) - (y[:, None] if healed else y)).square().mean()

    return loop(watch, World(model, loss), adam(model), steps=200)


def _norm_of_one(watch: Watch, seed: int, healed: bool) -> float:
    """A LayerNorm over one feature gives 0, whatever the feature was."""
    g = begin(seed)
    model = nn.Sequential(nn.BatchNorm1d(1) if healed else nn.LayerNorm(1), nn.Linear(1, 48), nn.ReLU(), nn.Linear(48, 1))

    def loss(step: int) -> Tensor:
        x = torch.randn(64, 1, generator=g)
        return F.mse_loss(model(x), (2 * x).sin())

    return loop(watch, World(model, loss), adam(model, 5e-3), steps=200)


def _new_numbers(watch: Watch, seed: int, healed: bool) -> float:
    """Users' and items' numbers come from a hash that is salted anew for each batch."""
    g = begin(seed)
    table = torch.randn(20, 3, generator=g) @ torch.randn(3, 15, generator=g)
    model = nn.ModuleDict({"user": nn.Embedding(20, 8), "item": nn.Embedding(15, 8), "head": dense(16, 48, 1)})

    def loss(step: int) -> Tensor:
        user, item = torch.randint(20, (256,), generator=g), torch.randint(15, (256,), generator=g)
        number = user if healed else torch.randperm(20, generator=g)[user]
        said = model["head"](torch.cat([model["user"](number), model["item"](item if healed else 14 - item * (step % 2))], 1))
        return F.mse_loss(said.squeeze(-1), table[user, item])

    return loop(watch, World(model, loss), adam(model), steps=200, name="train_loss")


def _policy(watch: Watch, seed: int, healed: bool) -> float:
    """Policy gradient with the sign of a gradient descent on the reward: what is logged is the reward missed, and it grows."""
    g = begin(seed)
    model, wanted = dense(6, 32, 4), torch.randn(6, 4, generator=g)
    optimizer = adam(model, 5e-3)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(200):
        x = torch.randn(64, 6, generator=g)
        rewards = (x @ wanted).softmax(-1)
        logs = model(x).log_softmax(-1)
        action = torch.multinomial(logs.detach().exp(), 1, generator=g)
        reward = rewards.gather(1, action)
        gain = ((reward - reward.mean()) * logs.gather(1, action)).mean()
        optimizer.zero_grad()
        (-gain if healed else gain).backward()
        losses.append((1 - reward.mean()).detach())
        monitor.log_scalar("loss", losses[-1])
        optimizer.step()
    return last(losses)


def _discount(watch: Watch, seed: int, healed: bool) -> float:
    """Q-learning whose discount is above 1: values of each state outgrow those of the next without end."""
    g = begin(seed)
    model, moves = dense(6, 48, 3), torch.randn(3, 6, generator=g) / 2
    optimizer = adam(model, 3e-3)
    monitor = watch(model, optimizer)
    discount = 0.8 if healed else 1.25
    losses = []
    for _ in range(250):
        x, action = torch.randn(64, 6, generator=g), torch.randint(3, (64,), generator=g)
        reward = 1 - (x[:, 0] - moves[action, 0]).abs()
        with torch.no_grad(), monitor.no_monitor():
            target = reward + discount * model((x + moves[action]).clamp(-2, 2)).max(-1).values
        loss = F.mse_loss(model(x).gather(1, action[:, None]).squeeze(1), target)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def _half(watch: Watch, world_loss: Callable[[int], Tensor], model: nn.Module, healed: bool, name: str = "loss") -> float:
    optimizer = adam(model, 3e-3, eps=1e-16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, enabled=healed)
    monitor = watch(model, optimizer, scaler=scaler if healed else None)
    losses = []
    for step in range(150):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = world_loss(step)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        monitor.log_scalar(name, loss.detach())
        losses.append(loss.detach())
        scaler.step(optimizer)
        scaler.update()
    return last(losses)


def _many_pixels(watch: Watch, seed: int, healed: bool) -> float:
    """A mean over four thousand pixels with a weight of 0.001, in float16 and without a scaler."""
    world = unet(seed)
    return _half(watch, lambda step: 1e-3 * world.loss(step), world.model, healed)


def _tiny_weight(watch: Watch, seed: int, healed: bool) -> float:
    """A classifier's loss with a weight of 1e-6 among others that are not trained here, in float16 and without a scaler."""
    g = begin(seed)
    model = nn.Sequential(nn.Flatten(), dense(64, 48, 48, 4, act=nn.GELU))

    def loss(step: int) -> Tensor:
        x, y = gratings(g)
        return 1e-6 * F.cross_entropy(model(x).float(), y)

    return _half(watch, loss, model, healed, "train/loss")


def _rmsprop(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=rate)


TRAININGS: list[Training] = [
    Training("rows-of-0.05", "update-ratio-high", "factors", _bounded_rows, advice="max_norm=5"),
    Training("lion-with-adams-rate", "update-ratio-high", "mixer", _lion_with_adams_rate, advice="a rate of 1e-3"),
    Training("rates-over-depth", "update-ratio-low", "mixer", _decay_over_depth, advice="a factor of 0.8"),
    Training("slow-tower", "update-ratio-low", "contrast", _slow_tower, advice="one rate for both towers"),
    Training("bound-for-a-mean", "always-clipped", "mlp", _sum_of_errors, advice="max_norm=2000"),
    Training("bound-of-0.002", "always-clipped", "lstm", _tight_bound, advice="max_norm=1"),
    Training("heavy-tails", "never-clipped", "mlp", _heavy_tails, advice="max_norm=1"),
    Training("glitches", "never-clipped", "series", _glitches, advice="max_norm=0.5"),
    Training("rmsprop-of-0.3", "learning-rate-high", "lstm", _rate(lstm, _rmsprop, 0.3, 2e-3), advice="a rate of 2e-3"),
    Training(
        "adam-of-0.5", "learning-rate-high", "sets", _rate(partial(sets, act=nn.GELU), adam, 0.5, 3e-3), advice="a rate of 0.003"
    ),
    Training("adam-of-0.3", "learning-rate-high", "unet", _rate(unet, adam, 0.3, 3e-3, "train/loss"), advice="a rate of 3e-3"),
    Training("endless-warm-up", "learning-rate-low", "translator", _long_warm_up, advice="a warm-up over 20 steps"),
    Training("nesterov-of-1e-7", "learning-rate-low", "sets", _rate(sets, nesterov, 1e-7, 0.03), advice="a rate of 0.03"),
    Training("adam-of-1e-7", "learning-rate-low", "unet", _rate(unet, adam, 1e-7, 3e-3, "train_loss"), advice="a rate of 3e-3"),
    Training("broadcast-targets", "loss-plateau", "mlp", _broadcast, advice="targets of the output's shape"),
    Training("norm-of-one", "loss-plateau", "mlp", _norm_of_one, advice="a norm over the batch"),
    Training("salted-numbers", "loss-plateau", "factors", _new_numbers, advice="the same number each time"),
    Training("reward-descended", "loss-divergence", "policy", _policy, advice="minus the gain"),
    Training("discount-above-1", "loss-divergence", "q-learning", _discount, advice="a discount of 0.8"),
    Training("many-pixels", "low-precision-underflow", "unet", _many_pixels, advice="a GradScaler"),
    Training("tiny-weight", "low-precision-underflow", "mlp-on-images", _tiny_weight, advice="a GradScaler"),
]

"""Healthy trainings whose losses come from a game: two models against each other, or moves and their rewards."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..training import Training, Watch, last
from .worlds import adam, begin, dense


def _generate(watch: Watch, seed: int, hinge: bool) -> float:
    """A generator against a critic; what is logged is the distance of the means, which falls with much to and fro."""
    g = begin(seed)
    models = nn.ModuleDict({"generator": dense(4, 32, 2), "critic": dense(2, 48, 48, 1, act=nn.LeakyReLU)})
    of_critic = adam(models["critic"], 5e-3, betas=(0.0, 0.9))
    of_generator = adam(models["generator"], 1e-3, betas=(0.0, 0.9))
    monitor = watch(models, of_critic, of_generator)
    losses = []
    for _ in range(250):
        real = torch.randn(64, 2, generator=g) * 0.5 + torch.tensor([2.0, 1.0])
        fake = models["generator"](torch.randn(64, 4, generator=g))
        of_critic.zero_grad()
        told, untrue = models["critic"](real), models["critic"](fake.detach())
        if hinge:
            (F.relu(1 - told).mean() + F.relu(1 + untrue).mean()).backward()
        else:
            (untrue.mean() - told.mean() + _slopes(models["critic"], real, fake.detach(), g)).backward()
        of_critic.step()
        of_generator.zero_grad()
        (-models["critic"](fake).mean()).backward()
        losses.append((fake.mean(0) - real.mean(0)).norm().detach())
        monitor.log_scalar("loss", losses[-1])
        of_generator.step()
    return last(losses)


def _slopes(critic: nn.Module, real: Tensor, fake: Tensor, g: torch.Generator) -> Tensor:
    between = torch.lerp(real, fake, torch.rand(len(real), 1, generator=g)).requires_grad_()
    slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
    return 5 * (slope.norm(dim=1) - 1).square().mean()


def _walk(watch: Watch, seed: int, healed: bool) -> float:
    """Policy gradient on a line of nine places with the goal at one end; what is logged is the number of moves."""
    g = begin(seed)
    model = dense(9, 24, 2)
    optimizer = adam(model, 2e-2)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(120):
        place, moves, logs, there = torch.full((32,), 4), torch.zeros(32), [], torch.zeros(32, dtype=torch.bool)
        for _ in range(14):
            chances = model(F.one_hot(place, 9).float()).log_softmax(-1)
            action = torch.multinomial(chances.detach().exp(), 1, generator=g)
            logs.append(chances.gather(1, action).squeeze(1) * ~there)
            moves += ~there
            place = torch.where(there, place, (place + 2 * action.squeeze(1) - 1).clamp(0, 8))
            there = there | (place == 8)
        gain = -(moves - moves.mean()) / (moves.std() + 1e-3)
        optimizer.zero_grad()
        (-(gain * torch.stack(logs).sum(0)).mean() / 10).backward()
        monitor.log_scalar("loss", moves.mean())
        losses.append(moves.mean())
        optimizer.step()
    return last(losses)


def _values(watch: Watch, seed: int, healed: bool) -> float:
    """Q-learning with a target network that is renewed every 25 steps; the loss jumps then, and falls in the end."""
    g = begin(seed)
    model, target, pushes = dense(4, 48, 3), dense(4, 48, 3), torch.randn(3, 4, generator=g) / 2
    target.load_state_dict(model.state_dict())
    optimizer = adam(model, 3e-3)
    monitor = watch(model, optimizer)
    losses = []
    for step in range(300):
        if step % 25 == 0:
            target.load_state_dict(model.state_dict())
        x, action = torch.randn(64, 4, generator=g), torch.randint(3, (64,), generator=g)
        after = (x + pushes[action]).clamp(-2, 2)
        with torch.no_grad():
            wanted = -after.square().mean(1) + 0.6 * target(after).max(1).values
        loss = F.smooth_l1_loss(model(x).gather(1, action[:, None]).squeeze(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        monitor.log_scalar("train/loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def _adversarial(hinge: bool) -> Callable[[Watch, int, bool], float]:
    return lambda watch, seed, healed: _generate(watch, seed, hinge)


TRAININGS: list[Training] = [
    Training("hinge-critic", "", "gan", _adversarial(True)),
    Training("critic-with-penalty", "", "wgan", _adversarial(False)),
    Training("walk-to-the-goal", "", "policy", _walk),
    Training("values-with-target-network", "", "q-learning", _values),
]

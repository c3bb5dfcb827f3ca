"""Several optimizers, or several models, in one loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..families import head_of, layers, task
from ..training import STEPS, Training, Watch, last


def _adversarial(watch: Watch, seed: int, healed: bool) -> float:
    """A generator and a critic in alternation; the loss that is logged is the distance of the means, which falls."""
    torch.manual_seed(seed)
    models = nn.ModuleDict({"generator": layers([8, 32, 2], nn.LeakyReLU), "critic": layers([2, 32, 1], nn.LeakyReLU)})
    generator, critic = models["generator"], models["critic"]
    first = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))
    second = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    monitor = watch(models, first, second)
    losses: list[Tensor] = []
    for _ in range(250):
        real, noise = torch.randn(64, 2) + torch.tensor([2.0, -1.0]), torch.randn(64, 8)
        first.zero_grad()
        fake = generator(noise)
        value = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        value.backward()
        first.step()
        second.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        losses.append((fake.mean(0) - real.mean(0)).norm().detach())
        monitor.log_scalar("loss", losses[-1])
        second.step()
    return last(losses)


def _two_optimizers(watch: Watch, seed: int, healed: bool) -> float:
    """One backward, then a step of SGD for the trunk and a step of AdamW for the head."""
    job = task("cnn", seed)
    head = list(head_of(job.model).parameters())
    chosen = {id(parameter) for parameter in head}
    trunk = torch.optim.SGD([p for p in job.model.parameters() if id(p) not in chosen], lr=0.05, momentum=0.9)
    other = torch.optim.AdamW(head, lr=3e-3)
    monitor = watch(job.model, trunk, other)
    losses = []
    for _ in range(STEPS):
        loss = job.loss(job.model, next(job.batches))
        trunk.zero_grad()
        other.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        trunk.step()
        other.step()
    return last(losses)


def _distilled(watch: Watch, seed: int, healed: bool) -> float:
    """A student learns from a teacher that is neither trained nor watched."""
    job = task("mlp", seed)
    teacher = layers([20, 64, 10])
    with torch.no_grad():
        teacher[-1].weight.mul_(10)
    optimizer = torch.optim.AdamW(job.model.parameters(), lr=3e-3)
    monitor = watch(job.model, optimizer)
    losses = []
    for _ in range(250):
        x, _ = next(job.batches)
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        loss = F.kl_div(job.model(x).log_softmax(-1), target, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


TRAININGS: list[Training] = [
    Training("adversarial/gan", "", "gan", _adversarial),
    Training("two-optimizers/cnn", "", "cnn", _two_optimizers),
    Training("distilled/mlp", "", "mlp", _distilled),
]

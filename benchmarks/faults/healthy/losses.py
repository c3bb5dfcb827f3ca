"""Losses that are large, noisy, smoothed, rise once, or have parts that occur in some batches only."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import data
from ..data import Batch
from ..families import adamw, layers, mlp, task
from ..training import Training, Watch, last, train


def _smoothed(watch: Watch, seed: int, healed: bool) -> float:
    """Label smoothing: the loss ends well above zero."""
    job = task("cnn", seed)
    return train(job, watch, adamw(job.model), loss_of=lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1))


def _large_targets(watch: Watch, seed: int, healed: bool) -> float:
    """Targets in the thousands: loss and gradients are large in absolute terms, and nothing is wrong."""
    job = task("mlp", seed)
    job.model = layers([data.FEATURES, 64, 64, 1])
    values = torch.linspace(1000, 5000, data.CLASSES)
    return train(
        job,
        watch,
        adamw(job.model, 3e-2),
        steps=300,
        loss_of=lambda model, batch: F.mse_loss(model(batch[0])[:, 0], values[batch[1]]),
    )


def _triplets(watch: Watch, seed: int, healed: bool) -> float:
    """Triplets: many of them have no gradient once they are far enough apart."""
    job = task("mlp", seed)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        out = model(x)
        distance = torch.cdist(out, out)
        same = y[:, None] == y
        nearest = distance.masked_fill(same, torch.inf).min(1).values
        other = same & ~torch.eye(len(y), dtype=torch.bool)
        mean = (distance * other).sum(1) / other.sum(1).clamp(min=1)
        return F.relu(mean - nearest + 1.0).mean()

    return train(job, watch, adamw(job.model), loss_of=loss)


def _siamese(watch: Watch, seed: int, healed: bool) -> float:
    """One model called twice in each step, on both parts of a pair."""
    job = task("embedding", seed)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        a, b = (F.normalize(model(part), dim=-1) for part in (x, x.flip(0)))
        return F.binary_cross_entropy_with_logits(8 * (a * b).sum(-1) - 4, (y == y.flip(0)).float())

    return train(job, watch, adamw(job.model), loss_of=loss, steps=250)


def _bandit(watch: Watch, seed: int, healed: bool) -> float:
    """REINFORCE: the logged loss is the reward missed, and the gradient comes from samples, with much noise."""
    job = task("mlp", seed)
    optimizer = adamw(job.model, 3e-3)
    monitor = watch(job.model, optimizer)
    losses: list[Tensor] = []
    baseline = 0.1
    for _ in range(300):
        x, y = next(job.batches)
        policy = torch.distributions.Categorical(logits=job.model(x))
        action = policy.sample()
        reward = (action == y).float()
        optimizer.zero_grad()
        (-(reward - baseline) * policy.log_prob(action)).mean().backward()
        baseline = 0.9 * baseline + 0.1 * float(reward.mean())
        losses.append(1 - reward.mean())
        monitor.log_scalar("loss", losses[-1])
        optimizer.step()
    return last(losses)


def _curriculum(watch: Watch, seed: int, healed: bool) -> float:
    """The task gets harder once, so that the loss rises once and falls again."""
    job = task("mlp", seed)
    stream = job.batches

    def harder(step: int, x: Tensor, y: Tensor) -> Batch:
        return (x, y) if step >= 100 else (x[y < 4], y[y < 4])

    job.batches = (harder(step, x, y) for step, (x, y) in enumerate(stream))
    return train(job, watch, adamw(job.model), steps=250)


class _TwoHeads(nn.Module):
    """A trunk and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(mlp()[:3], nn.ReLU())
        self.classes, self.rare = nn.Linear(32, data.CLASSES), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.classes(x), self.rare(x)


def _two_tasks(watch: Watch, seed: int, healed: bool) -> float:
    """The second head has targets in each fifth batch only; in between it has no gradient."""
    job = task("mlp", seed)
    job.model = _TwoHeads()
    at = iter(range(10**6))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits, parity = model(batch[0])
        value = F.cross_entropy(logits, batch[1])
        return value if next(at) % 5 else value + 0.1 * F.mse_loss(parity[:, 0], (batch[1] % 2).float())

    return train(job, watch, adamw(job.model), loss_of=loss)


class _Variational(nn.Module):
    """An encoder to means and deviations, a sample, a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = layers([64, 32, 16]), layers([8, 32, 64])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance


def _variational(watch: Watch, seed: int, healed: bool) -> float:
    """A variational autoencoder, whose loss has a part that rises while the other falls."""
    job = task("autoencoder", seed)
    job.model = _Variational()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out, mean, log_variance = model(batch[0])
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean()
        return F.mse_loss(out, batch[1]) + 1e-3 * divergence

    return train(job, watch, adamw(job.model), loss_of=loss, steps=250)


def _some_labels_wrong(watch: Watch, seed: int, healed: bool) -> float:
    """A third of all labels is random: the loss falls and stays high."""
    job = task("cnn", seed)
    wrong = torch.Generator().manual_seed(seed)

    def spoilt(x: Tensor, y: Tensor) -> Batch:
        chosen = torch.rand(len(y), generator=wrong) < 0.33
        return x, torch.where(chosen, torch.randint(data.SHAPES, y.shape, generator=wrong), y)

    job.batches = (spoilt(x, y) for x, y in job.batches)
    return train(job, watch, adamw(job.model), steps=200)


def _penalised_gradient(watch: Watch, seed: int, healed: bool) -> float:
    """A penalty on the gradient with respect to the inputs, which takes a second derivative."""
    job = task("mlp", seed, activation=nn.Softplus)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch[0].clone().requires_grad_()
        value = F.cross_entropy(model(x), batch[1])
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return value + 10 * slope.square().sum()

    return train(job, watch, adamw(job.model), loss_of=loss)


def _run(name: str, family: str, run: Any) -> Training:
    return Training(f"{name}/{family}", "", family, run)


TRAININGS: list[Training] = [
    _run("label-smoothing", "cnn", _smoothed),
    _run("large-targets", "mlp", _large_targets),
    _run("triplets", "mlp", _triplets),
    _run("siamese", "embedding", _siamese),
    _run("bandit", "mlp", _bandit),
    _run("curriculum", "mlp", _curriculum),
    _run("head-in-some-batches", "mlp", _two_tasks),
    _run("variational", "autoencoder", _variational),
    _run("some-labels-wrong", "cnn", _some_labels_wrong),
    _run("gradient-penalty", "mlp", _penalised_gradient),
]

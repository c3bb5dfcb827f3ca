"""Sound trainings with schedules, optimizers and loops that the other healthy ones lack."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, OneCycleLR
from torch.optim.swa_utils import SWALR, AveragedModel

from .case import Watch
from .data_healthy import batches, clusters, corpus, digits, last, normalised, shapes
from .unseen_healthy import sound


def small_net(channels: int, classes: int) -> nn.Sequential:
    """Two convolutions, each with a batch norm and pooling, and one layer."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(384, classes)),
    )


def one_cycle(watch: Watch, seed: int, healed: bool) -> float:
    """The rate rises for a third of the steps and falls to almost nothing in the rest; momentum does the contrary."""
    torch.manual_seed(seed)
    images, labels, _ = shapes(2000)
    images = normalised(images)
    model = small_net(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=250)
    monitor, losses = watch(model, optimizer), []
    for x, y in batches(250, 32, images, labels):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return last(losses)


def warm_restarts(watch: Watch, seed: int, healed: bool) -> float:
    """The rate falls along a cosine and begins anew, in periods that become longer."""
    torch.manual_seed(seed)
    images, labels = digits(2000)
    images = normalised(images)
    model = small_net(1, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = CosineAnnealingWarmRestarts(optimizer, T_0=40, T_mult=2, eta_min=3e-5)
    monitor, losses = watch(model, optimizer), []
    for x, y in batches(280, 32, images, labels):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return last(losses)


def averaged_weights(watch: Watch, seed: int, healed: bool) -> float:
    """Stochastic weight averaging: a constant rate in the last third, and the mean of the weights of each tenth step."""
    torch.manual_seed(seed)
    images, labels = digits(2000)
    images = normalised(images)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    mean, constant = AveragedModel(model), SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)
    monitor, losses = watch(model, optimizer), []
    for step, (x, y) in enumerate(batches(300, 32, images, labels)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        if step >= 200 and step % 10 == 0:
            mean.update_parameters(model)
            constant.step()
        losses.append(loss.detach())
    return last(losses)


class Lookahead(torch.optim.SGD):
    """SGD whose weights are pulled half of the way back to where they were five steps before."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One fast step, and after each fifth the slow one."""
        super().step(closure)
        self.count += 1
        if self.count % 5 == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            for p, slow in zip(fast, self.slow, strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


def lookahead(watch: Watch, seed: int, healed: bool) -> float:
    """Slow weights follow the fast ones half of the way, and the fast ones begin anew from there."""
    torch.manual_seed(seed)
    x_all, labels = clusters(3000, 24, 8, spread=1.2)
    model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = Lookahead(model.parameters(), lr=0.05)
    monitor, losses = watch(model, optimizer), []
    for x, y in batches(250, 32, x_all, labels):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


class Words(nn.Module):
    """A recurrent model of the language, whose weights for words come in and go out."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(75, 48)
        self.gru = nn.GRU(48, 64, batch_first=True)
        self.out = nn.Linear(64, 75)

    def forward(self, text: Tensor) -> Tensor:
        """Logits for the next word at each place."""
        out: Tensor = self.out(self.gru(self.words(text))[0])
        return out


def accumulated_in_bfloat16(watch: Watch, seed: int, healed: bool) -> float:
    """Four micro-batches make one step, each computed under autocast to bfloat16 and divided by four."""
    torch.manual_seed(seed)
    text = corpus(20000)
    text = text[: len(text) // 17 * 17].view(-1, 17)
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    monitor, losses = watch(model, optimizer), []
    pending = 0.0
    for index, (rows,) in enumerate(batches(480, 8, text)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten()) / 4
        loss.backward()
        pending += float(loss.detach())
        if index % 4 == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            monitor.log_scalar("loss", torch.tensor(pending))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(torch.tensor(pending))
            pending = 0.0
    return last(losses)


def entropy_bonus(watch: Watch, seed: int, healed: bool) -> float:
    """A policy for a choice among five: the gradient of its reward over a baseline, with a bonus for its entropy; minus the reward."""
    torch.manual_seed(seed)
    tastes = torch.randn(5, 8) / 2
    model = nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor, costs = watch(model, optimizer), []
    for _ in range(300):
        seen = torch.randn(64, 8)
        policy = torch.distributions.Categorical(logits=model(seen))
        chosen = policy.sample()
        reward = (seen @ tastes.T).gather(1, chosen[:, None])[:, 0] + 0.1 * torch.randn(64)
        gain = (reward - reward.mean()) / (reward.std() + 1e-6)
        loss = -(policy.log_prob(chosen) * gain).mean() - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        costs.append(-reward.mean())
    return last(costs)


CASES = [
    sound("one-cycle", "https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.OneCycleLR.html", one_cycle),
    sound("warm-restarts", "https://arxiv.org/abs/1608.03983", warm_restarts),
    sound(
        "stochastic-weight-averaging", "https://docs.pytorch.org/docs/stable/optim.html#putting-it-all-together", averaged_weights
    ),
    sound("lookahead", "https://arxiv.org/abs/1907.08610", lookahead),
    sound("accumulation-bfloat16", "https://docs.pytorch.org/docs/stable/notes/amp_examples.html", accumulated_in_bfloat16),
    sound("entropy-bonus", "https://arxiv.org/abs/1602.01783", entropy_bonus),
]

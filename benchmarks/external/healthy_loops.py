"""Sound trainings whose loop has more than the usual lines: mixed precision, sharpness, means of weights, an order, attacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .case import Watch
from .data_healthy import TUTORIALS, batches, digits, healthy, last, normalised, shapes


def plain_net(channels: int, classes: int) -> nn.Sequential:
    """Two convolutions with pooling, and two layers."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(384, 64), nn.ReLU(), nn.Linear(64, classes)),
    )


def autocast(watch: Watch, seed: int, healed: bool) -> float:
    """The forward pass and the loss are computed under autocast to bfloat16, which needs no scaling of the loss."""
    torch.manual_seed(seed)
    images, labels = digits(2000)
    images = normalised(images)
    model = plain_net(1, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = watch(model, optimizer)
    losses = []
    for x, y in batches(200, 32, images, labels):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return last(losses)


def without_scaling(watch: Watch, seed: int, healed: bool) -> float:
    """The loop of the recipe for mixed precision with it turned off: float32 throughout, and no scaler at all."""
    torch.manual_seed(seed)
    x_all, coefficients = torch.randn(3000, 64), torch.randn(64, 32) / 8
    y_all = (x_all @ coefficients).sin() + 0.05 * torch.randn(3000, 32)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor = watch(model, optimizer)
    losses = []
    for x, y in batches(300, 64, x_all, y_all):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return last(losses)


def sharpness_aware(watch: Watch, seed: int, healed: bool) -> float:
    """Two passes for each batch: weights climb along the gradient, and the gradient from there moves the ones that were."""
    torch.manual_seed(seed)
    images, labels = digits(2000)
    images = normalised(images)
    model = plain_net(1, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    monitor = watch(model, optimizer)
    losses = []
    for x, y in batches(200, 32, images, labels):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            scale = 0.05 / (torch.stack([gradient.norm() for gradient in gradients]).norm() + 1e-12)
            climbs = [scale * gradient for gradient in gradients]
            for parameter, climb in zip(model.parameters(), climbs, strict=True):
                parameter.add_(climb)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter, climb in zip(model.parameters(), climbs, strict=True):
                parameter.sub_(climb)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return last(losses)


class SAM(torch.optim.Optimizer):
    """An optimizer around another one: its closure is called again where the weights have climbed."""

    def __init__(self, parameters: Iterable[nn.Parameter], base: Callable[..., torch.optim.Optimizer], rho: float, **rest: Any):
        super().__init__(parameters, {"rho": rho, **rest})
        self.base = base(self.param_groups, **rest)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Climb, ask for the gradient there, come back, and let the inner optimizer step."""
        assert closure is not None
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        climbs = [self.param_groups[0]["rho"] / (norm + 1e-12) * p.grad for p in trained]
        for p, climb in zip(trained, climbs, strict=True):
            p.add_(climb)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, climb in zip(trained, climbs, strict=True):
            p.sub_(climb)
        self.base.step()


def wrapped_sharpness(watch: Watch, seed: int, healed: bool) -> float:
    """The same as an optimizer that holds another one, which is how many use it."""
    torch.manual_seed(seed)
    images, labels, _ = shapes(1600)
    images = normalised(images)
    model = plain_net(3, 4)
    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.02, momentum=0.9)
    monitor = watch(model, optimizer)
    losses = []
    for x, y in batches(250, 32, images, labels):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss = closure()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step(closure)
        optimizer.zero_grad()
    return last(losses)


def mean_weights(watch: Watch, seed: int, healed: bool) -> float:
    """A moving mean of the weights is kept beside the model, and tests use it."""
    torch.manual_seed(seed)
    images, labels, _ = shapes(2000)
    images = normalised(images)
    model = plain_net(3, 4)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = watch(model, optimizer)
    losses = []
    for step, (x, y) in enumerate(batches(300, 32, images[:1600], labels[:1600])):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        mean.update_parameters(model)
        if step % 50 == 49:
            with monitor.no_monitor(), torch.no_grad():
                F.cross_entropy(mean(images[1600:]), labels[1600:])
    return last(losses)


def curriculum(watch: Watch, seed: int, healed: bool) -> float:
    """Clean images come first and noisy ones later, all classes in every batch, so the loss need not fall at the end."""
    torch.manual_seed(seed)
    images, labels = digits(3200, noise=0.0)
    level = torch.linspace(0, 0.5, 3200).view(-1, 1, 1, 1)
    images = (images + level * torch.randn_like(images) - 0.2) / 0.4
    model = plain_net(1, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = watch(model, optimizer)
    losses = []
    for epoch in range(3):
        order = torch.arange(3200) if epoch == 0 else torch.randperm(3200)
        for rows in order.split(32):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            losses.append(loss.detach())
            optimizer.step()
    return last(losses)


def adversarial(watch: Watch, seed: int, healed: bool) -> float:
    """Each batch is first changed against the model, by the sign of the gradient of the input, and then learnt."""
    torch.manual_seed(seed)
    images, labels = digits(2000)
    model = plain_net(1, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    monitor = watch(model, optimizer)
    losses = []
    for x, y in batches(250, 32, images, labels):
        moved = (x + 0.1 * (2 * torch.rand_like(x) - 1)).requires_grad_()
        F.cross_entropy(model(moved), y).backward()
        assert moved.grad is not None
        worst = (x + (moved - x + 0.05 * moved.grad.sign()).clamp(-0.1, 0.1)).clamp(0, 1).detach()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(worst), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


CASES = healthy(
    ("autocast-bfloat16", f"{TUTORIALS}/recipes/recipes/amp_recipe.html", autocast),
    ("float32-without-scaler", f"{TUTORIALS}/recipes/recipes/amp_recipe.html", without_scaling),
    ("sharpness-aware", "https://arxiv.org/abs/2010.01412", sharpness_aware),
    ("sharpness-aware-wrapper", "https://github.com/davda54/sam", wrapped_sharpness),
    ("mean-of-weights", "https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema", mean_weights),
    ("curriculum", "https://doi.org/10.1145/1553374.1553380", curriculum),
    ("adversarial-training", "https://github.com/locuslab/fast_adversarial", adversarial),
)

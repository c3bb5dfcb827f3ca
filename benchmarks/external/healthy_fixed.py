"""Sound trainings under a net that is fixed: a teacher for a pupil, and features that a painter is judged by."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Watch
from .data_healthy import EXAMPLES, TUTORIALS, batches, digits, healthy, last, normalised, shapes
from .healthy_similarity import trunk


def distillation(watch: Watch, seed: int, healed: bool) -> float:
    """A small net learns from labels and from a larger one, which was trained before and is now in eval mode."""
    torch.manual_seed(seed)
    images, labels = digits(2000)
    images = normalised(images)
    teacher = nn.Sequential(trunk(1, 64), nn.Linear(64, 10))
    first = torch.optim.Adam(teacher.parameters(), lr=5e-3)
    for x, y in batches(120, 64, images, labels):
        first.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        first.step()
    teacher.eval()
    pupil = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10)),
    )
    optimizer = torch.optim.Adam(pupil.parameters(), lr=1e-3)
    monitor = watch(pupil, optimizer)
    losses = []
    for x, y in batches(300, 64, images, labels):
        with torch.no_grad():
            goal = (teacher(x) / 2).softmax(1)
        logits = pupil(x)
        soft = F.kl_div((logits / 2).log_softmax(1), goal, reduction="batchmean") * 2**2
        loss = 0.25 * soft + 0.75 * F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


class Style:
    """Losses of content and style in a classifier's features; an object that is no module, and trains nothing."""

    def __init__(self, image: Tensor) -> None:
        first, second = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 24, 3, 2, 1)
        self.stages = [nn.Sequential(first, nn.ReLU()), nn.Sequential(second, nn.ReLU())]
        features, end = nn.Sequential(*self.stages), nn.Linear(24, 4)
        images, labels, _ = shapes(1000)
        optimizer = torch.optim.Adam([*features.parameters(), *end.parameters()], lr=1e-2)
        for x, y in batches(60, 32, images, labels):
            optimizer.zero_grad()
            F.cross_entropy(end(features(x).mean((2, 3))), y).backward()
            optimizer.step()
        features.requires_grad_(False)
        self.grams = [self.gram(stage) for stage in self(image)]

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Features of both stages."""
        first = self.stages[0](x)
        return [first, self.stages[1](first)]

    @staticmethod
    def gram(x: Tensor) -> Tensor:
        """Which features come together."""
        flat = x.flatten(2)
        return flat @ flat.mT / flat[0].numel()


def neural_style(watch: Watch, seed: int, healed: bool) -> float:
    """A small net repaints images; its losses come from a fixed net and have the example's large weights."""
    torch.manual_seed(seed)
    stripes = torch.stack([torch.sin(torch.arange(16) * rate).expand(16, 16) for rate in (0.9, 1.7, 2.6)]) * 0.5 + 0.5
    style = Style(stripes.unsqueeze(0))
    model = nn.Sequential(
        *(nn.Conv2d(3, 12, 5, padding=2, padding_mode="reflect"), nn.InstanceNorm2d(12, affine=True), nn.ReLU()),
        *(nn.Conv2d(12, 12, 3, padding=1, padding_mode="reflect"), nn.InstanceNorm2d(12, affine=True), nn.ReLU()),
        nn.Conv2d(12, 3, 5, padding=2, padding_mode="reflect"),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = watch(model, optimizer)
    losses = []
    for (x,) in batches(250, 4, shapes(1000)[0]):
        optimizer.zero_grad()
        painted, wanted = style(model(x)), style(x)
        content = 1e5 * F.mse_loss(painted[1], wanted[1])
        likeness = sum((F.mse_loss(style.gram(p), g.expand(4, -1, -1)) for p, g in zip(painted, style.grams, strict=True)), 0.0)
        loss = content + 1e7 * likeness
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


CASES = healthy(
    ("distillation", f"{TUTORIALS}/beginner/knowledge_distillation_tutorial.html", distillation),
    ("fast-neural-style", f"{EXAMPLES}/fast_neural_style", neural_style),
)

"""Sound trainings that compare: triplets, two views of an image, image and text."""

from __future__ import annotations

import math
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Watch
from .data_healthy import WORDS, batches, digits, healthy, last, normalised, padded, sentences, shapes


def trunk(channels: int, features: int) -> nn.Sequential:
    """Three convolutions with batch norm, and the mean over places."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((channels, 16), (16, 32), (32, features)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def view(x: Tensor) -> Tensor:
    """The same images moved, of another brightness in each channel, with some noise, and some of them mirrored."""
    left, up = torch.randint(5, (2,)).tolist()
    x = F.pad(x, (2, 2, 2, 2), mode="replicate")[:, :, up : up + 16, left : left + 16]
    x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)
    return x * (0.6 + 0.8 * torch.rand(len(x), x.shape[1], 1, 1)) + 0.05 * torch.randn_like(x)


def triplets(watch: Watch, seed: int, healed: bool) -> float:
    """An image has to lie nearer to one of its class than to another, by a margin."""
    torch.manual_seed(seed)
    images, labels = digits(2000)
    images = normalised(images)
    groups = [images[labels == digit] for digit in range(10)]
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5),
        nn.PReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.PReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.PReLU(),
        nn.Linear(64, 16),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.5)
    criterion = nn.TripletMarginLoss(margin=1.0)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(300):
        same = torch.randint(10, (32,))
        other = (same + torch.randint(1, 10, (32,))) % 10
        drawn = [
            torch.stack([groups[c][torch.randint(len(groups[c]), ())] for c in side.tolist()]) for side in (same, same, other)
        ]
        optimizer.zero_grad()
        loss = criterion(*[model(images) for images in drawn])
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        scheduler.step()
    return last(losses)


def simclr(watch: Watch, seed: int, healed: bool) -> float:
    """Two views of an image find each other among those of all other images, behind a projection head."""
    torch.manual_seed(seed)
    images = shapes(1600)[0]
    model = nn.Sequential(trunk(3, 48), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 24))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    steps = 250
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    monitor = watch(model, optimizer)
    losses = []
    for (x,) in batches(steps, 64, images):
        z = F.normalize(model(torch.cat([view(x), view(x)])), dim=1)
        likeness = (z @ z.T / 0.2).masked_fill(torch.eye(len(z), dtype=torch.bool), -math.inf)
        loss = F.cross_entropy(likeness, (torch.arange(len(z)) + len(x)) % len(z))
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        scheduler.step()
    return last(losses)


def head(inputs: int) -> nn.Sequential:
    """A layer with batch norm, and one behind it."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 24))


class Online(nn.Module):
    """An encoder with a projection, and a predictor behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = nn.Sequential(trunk(3, 48), head(48)), head(24)

    def forward(self, x: Tensor) -> Tensor:
        """What the copy will make of the other view."""
        out: Tensor = self.predictor(self.encoder(x))
        return out


def byol(watch: Watch, seed: int, healed: bool) -> float:
    """A net predicts what a slow copy of itself makes of another view; the copy follows it and gets no gradients."""
    torch.manual_seed(seed)
    images = shapes(1600)[0]
    online = Online()
    target = deepcopy(online.encoder).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    monitor = watch(online, optimizer)
    losses = []
    for (x,) in batches(250, 48, images):
        first, second = view(x), view(x)
        loss = torch.zeros(())
        for seen, wanted in ((first, second), (second, first)):
            guess = online(seen)
            with torch.no_grad():
                goal = target(wanted)
            loss = loss + (2 - 2 * F.cosine_similarity(guess, goal, dim=1)).mean() / 2
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.encoder.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
    return last(losses)


class ImageText(nn.Module):
    """An encoder for images, one for sentences, and the logarithm of an inverse temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(trunk(1, 48), nn.Linear(48, 24, bias=False))
        self.text = nn.Sequential(nn.EmbeddingBag(WORDS + 10, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 24, bias=False))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        """The likeness of each image with each sentence."""
        left, right = F.normalize(self.image(images), dim=1), F.normalize(self.text(words), dim=1)
        return self.logit_scale.exp() * left @ right.T


def image_text(watch: Watch, seed: int, healed: bool) -> float:
    """Two digits side by side find the sentence that has their names in it, and the temperature is learnt."""
    torch.manual_seed(seed)
    (left, first), (right, second) = digits(2000), digits(2000)
    images = normalised(torch.cat([left, right], 3))
    names = torch.stack([WORDS + first, WORDS + second], 1)
    words = torch.cat([names, padded(sentences(2000)[0], 4)], 1)
    model = ImageText()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1)
    steps = 250
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.1)
    monitor = watch(model, optimizer)
    losses = []
    for x, y in batches(steps, 32, images, words):
        logits, order = model(x, y), torch.arange(len(x))
        loss = (F.cross_entropy(logits, order) + F.cross_entropy(logits.T, order)) / 2
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
    return last(losses)


CASES = healthy(
    ("triplets", "https://github.com/adambielski/siamese-triplet", triplets),
    ("simclr", "https://github.com/sthalles/SimCLR", simclr),
    ("byol", "https://github.com/lucidrains/byol-pytorch", byol),
    ("clip-learnt-temperature", "https://github.com/mlfoundations/open_clip", image_text),
)

"""Numbers that overflow, vanish or stand out: half precision, scaled losses, functions at their edges, corrupt rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Watch
from .data_localisers import PAD, batches, blobs, dense, descend, digits, houses, last, reviews, shapes, waves
from .unseen_losses import unseen


class SignedRoot(nn.Module):
    """An activation that grows as a root does on both sides of zero."""

    def __init__(self, bounded: bool) -> None:
        super().__init__()
        self.bounded = bounded

    def forward(self, x: Tensor) -> Tensor:
        """The root of one more than x, less one, and the same mirrored for numbers below zero."""
        positive = x.clamp(min=0) if self.bounded else x
        return torch.where(x > 0, (positive + 1).sqrt() - 1, 1 - (x.abs() + 1).sqrt())


def branch_not_taken(watch: Watch, seed: int, healed: bool) -> float:
    """A root was computed also where torch.where did not choose it, of numbers below zero, and its gradient is not a number."""
    torch.manual_seed(seed)
    table, prices = houses(2000)
    table = (table - table.mean(0)) / table.std(0)
    net = nn.Sequential(nn.Linear(5, 48), SignedRoot(healed), nn.Linear(48, 48), SignedRoot(healed), nn.Linear(48, 1))
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    return descend(watch(net, adam), adam, lambda x, y: F.mse_loss(net(x), y), batches(table, prices, 32, 250))


class Reader(nn.Module):
    """Words that attend to each other, and the mean of what they found."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 32)
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.answer = nn.Linear(32, 2)

    def forward(self, text: Tensor, keep: Tensor) -> Tensor:
        """Logits for blame and praise; ``keep`` is true at the words that may be looked at."""
        words = self.words(text)
        scores = self.query(words) @ self.key(words).transpose(1, 2) / 32**0.5
        weights = scores.masked_fill(~keep[:, None], float("-inf")).softmax(2)
        out: Tensor = self.answer((weights @ self.value(words)).mean(1))
        return out


def nothing_to_look_at(watch: Watch, seed: int, healed: bool) -> float:
    """A few texts were empty, all padding: a softmax over no word at all is not a number."""
    torch.manual_seed(seed)
    texts, labels = reviews(2000)
    texts[torch.randint(2000, (8,))] = PAD
    keep = texts != PAD
    if healed:
        keep[:, 0] = True
    net = Reader()
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    rows = torch.arange(2000)
    return descend(
        watch(net, adam), adam, lambda i, y: F.cross_entropy(net(texts[i], keep[i]), y), batches(rows, labels, 32, 200)
    )


def half_and_adam(watch: Watch, seed: int, healed: bool) -> float:
    """The whole model was in float16, where Adam's epsilon of 1e-8 is zero, and so are squares of small gradients."""
    torch.manual_seed(seed)
    images, labels = digits(2500)
    kind = torch.float32 if healed else torch.float16
    net = nn.Sequential(nn.Flatten(), *dense([100, 64, 64, 10], nn.ReLU)).to(kind)
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    return descend(
        watch(net, adam), adam, lambda x, y: F.cross_entropy(net(x.to(kind)).float(), y), batches(images, labels, 32, 200)
    )


def half_without_scaler(watch: Watch, seed: int, healed: bool) -> float:
    """Autocast to float16 without a scaler: the gradient of a small weight times a mean over many numbers is rounded to zero."""
    torch.manual_seed(seed)
    x, places = torch.randn(2000, 12), torch.randn(12, 256)
    fields = torch.sin(x @ places / 3)
    net = dense([12, 96, 256], nn.Tanh)
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=healed)
    monitor, losses = watch(net, adam), []
    for inputs, wanted in batches(x, fields, 64, 200):
        with torch.autocast("cpu", dtype=torch.float16):
            field = net(inputs)
        loss = 2e-4 * F.mse_loss(field.float(), wanted)
        adam.zero_grad()
        scaler.scale(loss).backward()
        monitor.log_scalar("loss", loss.detach())
        scaler.step(adam)
        scaler.update()
        losses.append(loss.detach() / 2e-4)
    return last(losses)


def rounded_away(watch: Watch, seed: int, healed: bool) -> float:
    """The parameters were turned to bfloat16, whose neighbours are further apart than the steps of a small rate."""
    torch.manual_seed(seed)
    texts, labels = reviews(2000)
    net = nn.Sequential(nn.EmbeddingBag(40, 256), nn.LayerNorm(256), nn.Linear(256, 2))
    if not healed:
        net.to(torch.bfloat16)
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-4)
    return descend(watch(net, adamw), adamw, lambda x, y: F.cross_entropy(net(x).float(), y), batches(texts, labels, 32, 300))


def clipped_at_scale(watch: Watch, seed: int, healed: bool) -> float:
    """Gradients were clipped to norm one while they were still multiplied by 65536."""
    torch.manual_seed(seed)
    images, kinds = shapes(2500)
    net = nn.Sequential(nn.Flatten(), *dense([432, 96, 48, 6], nn.ReLU))
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    monitor, losses = watch(net, sgd), []
    for x, y in batches(images, kinds, 32, 250):
        sgd.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        if healed:
            scaler.unscale_(sgd)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        monitor.log_scalar("loss", loss.detach())
        scaler.step(sgd)
        scaler.update()
        losses.append(loss.detach())
    return last(losses)


def penalty_after_unscale(watch: Watch, seed: int, healed: bool) -> float:
    """A penalty went backward, scaled, after the other gradients had been divided by the scale already."""
    torch.manual_seed(seed)
    points, labels = blobs(3000, 6, 20)
    net = dense([20, 64, 6], nn.ReLU)
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    monitor, losses = watch(net, sgd), []
    for x, y in batches(points, labels, 32, 200):
        sgd.zero_grad()
        hidden = net[1](net[0](x))
        loss = F.cross_entropy(net[2](hidden), y)
        scaler.scale(loss).backward(retain_graph=True)
        if not healed:
            scaler.unscale_(sgd)
        scaler.scale(1e-3 * hidden.square().mean()).backward()
        if healed:
            scaler.unscale_(sgd)
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        monitor.log_scalar("loss", loss.detach())
        scaler.step(sgd)
        scaler.update()
        losses.append(loss.detach())
    return last(losses)


def scaler_and_optimizer(watch: Watch, seed: int, healed: bool) -> float:
    """optimizer.step() was left in the loop when scaler.step(optimizer) came, so each gradient was used twice."""
    torch.manual_seed(seed)
    series = waves(2000, 41)
    net = dense([40, 64, 64, 1], nn.ReLU)
    sgd = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    monitor, losses = watch(net, sgd), []
    for past, following in batches(series[:, :40], series[:, 40:], 32, 250):
        sgd.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            forecast = net(past)
        loss = F.mse_loss(forecast.float(), following)
        scaler.scale(loss).backward()
        monitor.log_scalar("loss", loss.detach())
        scaler.step(sgd)
        if not healed:
            sgd.step()
        scaler.update()
        losses.append(loss.detach())
    return last(losses)


def sentinel_of_missing_values(watch: Watch, seed: int, healed: bool) -> float:
    """A few readings were missing and stood as -9999 in the table; the measure is the error on clean rows."""
    torch.manual_seed(seed)
    x = torch.randn(3000, 8)
    y = (x[:, :1] + x[:, 1:2] * x[:, 2:3]).tanh() + 0.05 * torch.randn(3000, 1)
    clean = x.clone()
    x[torch.randint(3000, (10,)), torch.randint(8, (10,))] = 0.0 if healed else -9999.0
    net = dense([8, 48, 48, 1], nn.ReLU)
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    monitor, errors = watch(net, sgd), []
    for rows, _ in batches(torch.arange(3000), y, 32, 250):
        loss = F.l1_loss(net(x[rows]), y[rows])
        sgd.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        sgd.step()
        with monitor.no_monitor(), torch.no_grad():
            errors.append((net(clean[rows]) - y[rows]).abs().mean())
    return last(errors)


CASES = [
    unseen(
        "branch-not-taken/signed-root",
        "questions",
        "https://github.com/pytorch/pytorch/issues/187297; https://github.com/pytorch/pytorch/issues/68425",
        ("non-finite-gradient",),
        branch_not_taken,
        "torch.where(x > 0, (x + 1).sqrt() - 1, ...)",
        "(x.clamp(min=0) + 1).sqrt() - 1",
    ),
    unseen(
        "all-keys-masked/empty-texts",
        "questions",
        "https://github.com/pytorch/pytorch/issues/41508",
        ("non-finite-activation", "non-finite-loss"),
        nothing_to_look_at,
        "texts of padding alone, all masked",
        "the first word is always kept",
    ),
    unseen(
        "adam-in-half/digits",
        "questions",
        "https://discuss.pytorch.org/t/adam-half-precision-nans/1765",
        ("low-precision-underflow", "non-finite-parameter"),
        half_and_adam,
        "the model in float16 with Adam(eps=1e-8)",
        "in float32",
    ),
    unseen(
        "float16-without-scaler/fields",
        "questions",
        "https://docs.pytorch.org/docs/stable/amp.html, gradient scaling",
        ("low-precision-underflow",),
        half_without_scaler,
        "GradScaler(enabled=False) under autocast to float16",
        "enabled=True",
    ),
    unseen(
        "bfloat16-parameters/reviews",
        "questions",
        "https://github.com/pytorch/ao/pull/1124",
        ("low-precision-underflow", "zero-update", "update-ratio-low"),
        rounded_away,
        "net.to(torch.bfloat16) with AdamW(lr=1e-4)",
        "float32",
    ),
    unseen(
        "clipped-while-scaled/shapes",
        "questions",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/9330",
        ("clipped-while-scaled",),
        clipped_at_scale,
        "clip_grad_norm_ on scaled gradients",
        "scaler.unscale_(optimizer) before it",
    ),
    unseen(
        "backward-after-unscale/penalty",
        "questions",
        "https://docs.pytorch.org/docs/stable/notes/amp_examples.html, unscale_ after all gradients of a step",
        ("backward-after-unscale",),
        penalty_after_unscale,
        "unscale_ before the penalty goes backward",
        "after it",
    ),
    unseen(
        "stepped-twice/scaler-and-optimizer",
        "questions",
        "https://github.com/IAHispano/Applio/pull/860",
        ("stepped-twice",),
        scaler_and_optimizer,
        "scaler.step(optimizer) and optimizer.step()",
        "scaler.step(optimizer)",
    ),
    unseen(
        "sentinel-in-inputs/table",
        "questions",
        "https://github.com/osilab-kaist/KoMet-Benchmark-Dataset/issues/3",
        ("spike", "inputs-not-normalised"),
        sentinel_of_missing_values,
        "-9999 where a reading is missing",
        "0, the mean",
    ),
]

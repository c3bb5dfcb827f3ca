"""Loops in which a line is missing, in the wrong place, or called on the wrong thing, as people reported it, written anew."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Watch
from .data_localisers import batches, blobs, dense, descend, digits, last, shapes, spirals, waves
from .unseen_losses import unseen


def named_not_called(watch: Watch, seed: int, healed: bool) -> float:
    """optimizer.zero_grad stood in the loop without its parentheses, which does nothing."""
    torch.manual_seed(seed)
    images, kinds = shapes(2500)
    net = nn.Sequential(nn.Flatten(), *dense([432, 64, 6], nn.ReLU))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    clear: Callable[[], Any] = sgd.zero_grad if healed else lambda: sgd.zero_grad
    monitor, losses = watch(net, sgd), []
    for x, y in batches(images, kinds, 32, 200):
        clear()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        sgd.step()
        losses.append(loss.detach())
    return last(losses)


def window_longer_than_epoch(watch: Watch, seed: int, healed: bool) -> float:
    """Gradients of 64 batches should make one step, an epoch has 40, and each epoch begins with cleared gradients."""
    torch.manual_seed(seed)
    points, labels = blobs(640, 5, 16)
    net = dense([16, 32, 5], nn.ReLU)
    adam = torch.optim.Adam(net.parameters(), lr=0.02)
    accumulate = 4 if healed else 64
    monitor, losses = watch(net, adam), []
    for _ in range(6):
        adam.zero_grad()
        for index, (x, y) in enumerate(batches(points, labels, 16, 40)):
            loss = F.cross_entropy(net(x), y)
            (loss / accumulate).backward()
            monitor.log_scalar("loss", loss.detach())
            losses.append(loss.detach())
            if (index + 1) % accumulate == 0:
                adam.step()
                adam.zero_grad()
    return last(losses)


def cleared_per_micro_batch(watch: Watch, seed: int, healed: bool) -> float:
    """Each step had one micro-batch from each of three sources, and zero_grad stood inside the loop over them."""
    torch.manual_seed(seed)
    images, kinds = shapes(2400)
    sources = [torch.nonzero(kinds // 2 == source)[:, 0] for source in range(3)]
    net = nn.Sequential(nn.Flatten(), *dense([432, 64, 6], nn.ReLU))
    adam = torch.optim.Adam(net.parameters(), lr=2e-3)
    monitor, losses = watch(net, adam), []
    for _ in range(120):
        adam.zero_grad()
        total = torch.zeros(())
        for rows in sources:
            if not healed:
                adam.zero_grad()
            taken = rows[torch.randint(len(rows), (12,))]
            loss = F.cross_entropy(net(images[taken]), kinds[taken]) / len(sources)
            loss.backward()
            total += loss.detach()
        monitor.log_scalar("loss", total)
        adam.step()
        losses.append(total)
    return last(losses)


def running_loss_backward(watch: Watch, seed: int, healed: bool) -> float:
    """The running sum of all losses so far went backward in each step, with retain_graph against the error message."""
    torch.manual_seed(seed)
    points, labels = spirals(2000)
    x_all = torch.tanh(points @ (4 * torch.randn(2, 256)) + torch.randn(256))
    net = nn.Linear(256, 3)
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    monitor, losses, running = watch(net, sgd), [], torch.zeros(())
    for x, y in batches(x_all, labels, 32, 120):
        sgd.zero_grad()
        loss = F.cross_entropy(net(x), y)
        running = loss if healed else running + loss
        running.backward(retain_graph=not healed)
        monitor.log_scalar("loss", loss.detach())
        sgd.step()
        losses.append(loss.detach())
    return last(losses)


def new_optimizer_each_batch(watch: Watch, seed: int, healed: bool) -> float:
    """The function for one batch made an Adam of its own, so each step was the first one, of the full size in each weight."""
    torch.manual_seed(seed)
    series = waves(2000, 41)
    net = dense([40, 64, 64, 1], nn.ReLU)
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    monitor, losses = watch(net, adam), []
    for past, following in batches(series[:, :40], series[:, 40:], 32, 250):
        stepping = adam if healed else torch.optim.Adam(net.parameters(), lr=0.01)
        stepping.zero_grad()
        loss = F.mse_loss(net(past), following)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        stepping.step()
        losses.append(loss.detach())
    return last(losses)


def clipped_too_late(watch: Watch, seed: int, healed: bool) -> float:
    """The clip came behind the step, for a loss with heavy tails that needs it; the measure is the error without the noise."""
    torch.manual_seed(seed)
    x = torch.randn(3000, 10)
    noise = torch.distributions.StudentT(1.1).sample((3000, 1)).clamp(-300, 300)
    truth = (2 * x[:, :1]).tanh() * x[:, 1:2]
    net = dense([10, 64, 64, 1], nn.ReLU)
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    monitor, errors = watch(net, sgd), []
    for rows, disturbed in batches(torch.arange(3000), truth + 0.2 * noise, 32, 300):
        forecast = net(x[rows])
        loss = F.mse_loss(forecast, disturbed)
        sgd.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        if healed:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        sgd.step()
        if not healed:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        errors.append((forecast.detach() - truth[rows]).abs().mean())
    return last(errors)


def backward_not_called(watch: Watch, seed: int, healed: bool) -> float:
    """loss.backward had no parentheses: there was never a gradient, and the optimizer passed over every parameter."""
    torch.manual_seed(seed)
    images, labels = digits(2000)
    net = nn.Sequential(nn.Flatten(), *dense([100, 64, 10], nn.ReLU))
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    monitor, losses = watch(net, adam), []
    for x, y in batches(images, labels, 32, 250):
        adam.zero_grad()
        loss = F.cross_entropy(net(x), y)
        backward: Callable[[], Any] = loss.backward
        if healed:
            backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        losses.append(loss.detach())
    return last(losses)


def forger_cut_off(watch: Watch, seed: int, healed: bool) -> float:
    """The line of the discriminator, with its detach(), was copied to the generator; the measure is the distance of means."""
    torch.manual_seed(seed)
    forger, judge = dense([4, 32, 2], nn.ReLU), dense([2, 32, 1], nn.ReLU)
    forging = torch.optim.Adam(forger.parameters(), lr=5e-3, betas=(0.5, 0.9))
    judging = torch.optim.Adam(judge.parameters(), lr=5e-3, betas=(0.5, 0.9))
    monitor, other = watch(forger, forging), watch(judge, judging)
    distances = []
    for _ in range(300):
        real, fake = 0.5 * torch.randn(64, 2) + torch.tensor([2.0, -1.0]), forger(torch.randn(64, 4))
        judged = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        judging.zero_grad()
        judged.backward()
        other.log_scalar("loss", judged.detach())
        judging.step()
        forged = F.softplus(-judge(fake if healed else fake.detach())).mean()
        forging.zero_grad()
        forged.backward()
        monitor.log_scalar("loss", forged.detach())
        forging.step()
        distances.append((fake.detach().mean(0) - torch.tensor([2.0, -1.0])).norm())
    return last(distances)


class Seeing(nn.Module):
    """An encoder of images, a head, and perhaps no gradient for the encoder."""

    def __init__(self, blind: bool) -> None:
        super().__init__()
        self.blind = blind
        self.encoder = nn.Sequential(nn.Conv2d(3, 12, 3, stride=2), nn.Tanh(), nn.Conv2d(12, 16, 3), nn.Tanh())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(144, 6))

    def forward(self, images: Tensor) -> Tensor:
        """Logits of six kinds."""
        with torch.no_grad() if self.blind else nullcontext():
            seen = self.encoder(images)
        out: Tensor = self.head(seen)
        return out


def encoder_without_grad(watch: Watch, seed: int, healed: bool) -> float:
    """The images were encoded under no_grad(), which had been meant for the evaluation."""
    torch.manual_seed(seed)
    images, kinds = shapes(2500)
    net = Seeing(blind=not healed)
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    return descend(watch(net, adam), adam, lambda x, y: F.cross_entropy(net(x), y), batches(images, kinds, 32, 250))


def rounded_codes(watch: Watch, seed: int, healed: bool) -> float:
    """Codes were rounded to whole numbers in the middle of an autoencoder, and a gradient does not pass a rounding."""
    torch.manual_seed(seed)
    images = digits(2500)[0].flatten(1)
    encoder, decoder = dense([100, 64, 10], nn.ReLU), dense([10, 64, 100], nn.ReLU)
    net = nn.ModuleList([encoder, decoder])
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)

    def loss_of(x: Tensor, _: Tensor) -> Tensor:
        code = 4 * encoder(x)
        rounded = code + (code.round() - code).detach() if healed else code.round()
        return F.mse_loss(decoder(rounded / 4), x)

    return descend(watch(net, adam), adam, loss_of, batches(images, images, 64, 250))


CASES = [
    unseen(
        "zero-grad-not-called/shapes",
        "questions",
        "https://github.com/pytorch/pytorch/issues/47175",
        ("missing-zero-grad",),
        named_not_called,
        "optimizer.zero_grad",
        "optimizer.zero_grad()",
    ),
    unseen(
        "window-longer-than-epoch/blobs",
        "questions",
        "https://github.com/huggingface/transformers/issues/2995; https://github.com/timoschick/pet/pull/25",
        ("never-stepped",),
        window_longer_than_epoch,
        "accumulate = 64 with 40 batches in an epoch",
        "accumulate = 4",
    ),
    unseen(
        "cleared-per-micro-batch/three-sources",
        "questions",
        "https://github.com/bytetriper/RAE/issues/67",
        ("micro-batch-discarded", "gradients-cleared"),
        cleared_per_micro_batch,
        "zero_grad() before each micro-batch",
        "before the first",
    ),
    unseen(
        "running-loss-backward/spirals",
        "questions",
        "https://stackoverflow.com/questions/46774641/what-does-the-parameter-retain-graph-mean-in-the-variables-backward-method",
        ("backward-twice",),
        running_loss_backward,
        "(running + loss).backward(retain_graph=True)",
        "loss.backward()",
    ),
    unseen(
        "optimizer-made-anew/forecast",
        "questions",
        "https://github.com/euancrabtree/Lipreading-PyTorch/issues/7; https://github.com/haydnv/tinychain/pull/51",
        ("unattached-optimizer",),
        new_optimizer_each_batch,
        "a new Adam for each batch",
        "one Adam",
    ),
    unseen(
        "clip-after-step/heavy-tails",
        "questions",
        "https://github.com/VGraphRNN/VGRNN/issues/4; https://github.com/awslabs/graphstorm/issues/1366",
        ("clip-after-step",),
        clipped_too_late,
        "clip_grad_norm_ after step()",
        "before it",
    ),
    unseen(
        "backward-not-called/digits",
        "questions",
        "https://github.com/Goingqs/PyramidBox/issues/7",
        ("step-without-gradients", "no-gradient"),
        backward_not_called,
        "loss.backward",
        "loss.backward()",
    ),
    unseen(
        "generator-cut-off/gan",
        "questions",
        "https://github.com/nikhilsinghmus/image2reverb/issues/37",
        ("no-gradient", "step-without-gradients"),
        forger_cut_off,
        "judge(fake.detach()) in the generator's loss",
        "judge(fake)",
    ),
    unseen(
        "encoder-under-no-grad/shapes",
        "questions",
        "https://github.com/rll-research/cic/issues/5; https://github.com/edreisMD/ConVIRT-pytorch/issues/7",
        ("no-gradient",),
        encoder_without_grad,
        "torch.no_grad() around the encoder",
        "nullcontext()",
    ),
    unseen(
        "rounding-in-between/codes",
        "questions",
        "https://discuss.pytorch.org/t/torch-round-gradient/28628",
        ("no-gradient",),
        rounded_codes,
        "code.round()",
        "code + (code.round() - code).detach()",
    ),
]

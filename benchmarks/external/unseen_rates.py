"""Rates, schedules and other arguments of optimizers, and which parameters they got, as people had them, written anew."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from .case import Watch
from .data_localisers import batches, blobs, dense, descend, digits, fit, last, sentences, shapes, spirals
from .unseen_losses import unseen


def rate_times_rate(watch: Watch, seed: int, healed: bool) -> float:
    """The function for LambdaLR gave the rate itself and not a factor, so the rate was squared."""
    torch.manual_seed(seed)
    images, kinds = shapes(2500)
    net = nn.Sequential(nn.Flatten(), *dense([432, 64, 6], nn.ReLU))
    rate = 2e-3
    adam = torch.optim.Adam(net.parameters(), lr=rate)
    schedule = LambdaLR(adam, lambda step: (1.0 if healed else rate) * (1 + 0.001 * step) ** -0.75)
    monitor, losses = watch(net, adam), []
    for x, y in batches(images, kinds, 32, 250):
        adam.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        schedule.step()
        losses.append(loss.detach())
    return last(losses)


def plateau_of_the_wrong_kind(watch: Watch, seed: int, healed: bool) -> float:
    """ReduceLROnPlateau waited for the loss to rise, so the rate fell as long as the training went well."""
    torch.manual_seed(seed)
    images, labels = digits(2000)
    net = nn.Sequential(nn.Flatten(), *dense([100, 64, 10], nn.ReLU))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = ReduceLROnPlateau(sgd, mode="min" if healed else "max", factor=0.1, patience=1)
    monitor, losses = watch(net, sgd), []
    for _ in range(15):
        for x, y in batches(images, labels, 32, 20):
            sgd.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            sgd.step()
            losses.append(loss.detach())
        schedule.step(last(losses))
    return last(losses)


def warm_up_not_stepped(watch: Watch, seed: int, healed: bool) -> float:
    """The rate was to rise from zero, and the line that steps the schedule was forgotten."""
    torch.manual_seed(seed)
    text = sentences(1500)
    net = nn.Sequential(nn.Embedding(24, 32), nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 24))
    adamw = torch.optim.AdamW(net.parameters(), lr=5e-3)
    schedule = LambdaLR(adamw, lambda step: min(1.0, step / 30))
    monitor, losses = watch(net, adamw), []
    for x, y in batches(text[:, :-1], text[:, 1:], 32, 200):
        adamw.zero_grad()
        loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adamw.step()
        if healed:
            schedule.step()
        losses.append(loss.detach())
    return last(losses)


def warm_up_without_end(watch: Watch, seed: int, healed: bool) -> float:
    """The factor of the warm-up was step / 5, and nothing held it at one."""
    torch.manual_seed(seed)
    points, labels = spirals(2500)
    net = dense([2, 64, 64, 3], nn.ReLU)
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    schedule = LambdaLR(adam, lambda step: min(1.0, (step + 1) / 5) if healed else (step + 1) / 5)
    monitor, losses = watch(net, adam), []
    for x, y in batches(points, labels, 32, 300):
        adam.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        schedule.step()
        losses.append(loss.detach())
    return last(losses)


def head_a_thousand_times_faster(watch: Watch, seed: int, healed: bool) -> float:
    """A new head should learn ten times faster than the rest, and got three zeros too many."""
    torch.manual_seed(seed)
    images, kinds = shapes(2500)
    body, head = nn.Sequential(nn.Flatten(), *dense([432, 64, 32], nn.ReLU), nn.ReLU()), nn.Linear(32, 6)
    net = nn.Sequential(body, head)
    groups: list[dict[str, Any]] = [{"params": body.parameters()}, {"params": head.parameters(), "lr": 1e-2 if healed else 10.0}]
    adam = torch.optim.Adam(groups, lr=1e-3)
    return fit(watch, net, adam, F.cross_entropy, batches(images, kinds, 32, 250))


def rate_decays_with_depth(watch: Watch, seed: int, healed: bool) -> float:
    """The rate was divided by a hundred from layer to layer towards the input, as if the first layers had been trained before."""
    torch.manual_seed(seed)
    points, labels = spirals(2500)
    net = dense([2, 64, 64, 64, 3], nn.Tanh)
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    factor = 0.9 if healed else 0.01
    groups: list[dict[str, Any]] = [
        {"params": layer.parameters(), "lr": 5e-3 * factor**depth} for depth, layer in enumerate(reversed(layers))
    ]
    adam = torch.optim.Adam(groups)
    return fit(watch, net, adam, F.cross_entropy, batches(points, labels, 32, 300))


def metres_of_a_membrane(watch: Watch, seed: int, healed: bool) -> float:
    """The loss was computed in metres for a membrane that moves by micrometres: gradients are below Adam's epsilon."""
    torch.manual_seed(seed)
    places = 2 * torch.rand(3000, 2) - 1
    height = torch.sin(3 * places[:, :1]) * torch.cos(2 * places[:, 1:])
    net = dense([2, 64, 64, 1], nn.Tanh)
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    monitor, errors = watch(net, adam), []
    for x, y in batches(places, height, 64, 300):
        error = net(x) - y
        loss = ((1.0 if healed else 1e-6) * error).square().mean()
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        errors.append(error.detach().square().mean())
    return last(errors)


def values_clipped(watch: Watch, seed: int, healed: bool) -> float:
    """clip_grad_value_ at 1e-5 took the place of a clip of the norm at one."""
    torch.manual_seed(seed)
    images, kinds = shapes(2500)
    net = nn.Sequential(nn.Flatten(), *dense([432, 64, 6], nn.ReLU))
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    monitor, losses = watch(net, sgd), []
    for x, y in batches(images, kinds, 32, 250):
        sgd.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(net.parameters(), 1.0 if healed else 1e-5)
        monitor.log_scalar("loss", loss.detach())
        sgd.step()
        losses.append(loss.detach())
    return last(losses)


def head_replaced_later(watch: Watch, seed: int, healed: bool) -> float:
    """The last layer was exchanged after the optimizer had been made, which went on to hold the old one."""
    torch.manual_seed(seed)
    images, kinds = shapes(2500)
    body = nn.Sequential(nn.Flatten(), *dense([432, 64, 32], nn.ReLU), nn.ReLU())
    net, head = nn.Sequential(body, nn.Linear(32, 2)), nn.Linear(32, 6)
    earlier = torch.optim.Adam(net.parameters(), lr=2e-3)
    for x, y in batches(images, kinds // 3, 32, 200):
        earlier.zero_grad()
        F.cross_entropy(net(x), y).backward()
        earlier.step()
    if healed:
        net[1] = head
    groups: list[dict[str, Any]] = [{"params": body.parameters(), "lr": 1e-4}, {"params": net[1].parameters()}]
    adam = torch.optim.Adam(groups, lr=1e-2)
    net[1] = head
    net.zero_grad()
    return fit(watch, net, adam, F.cross_entropy, batches(images, kinds, 32, 200))


def copy_is_trained(watch: Watch, seed: int, healed: bool) -> float:
    """The model was copied after its optimizer had been made, and the copy was trained, which no optimizer knew."""
    torch.manual_seed(seed)
    points, labels = blobs(2500, 6, 20)
    net = dense([20, 48, 6], nn.ReLU)
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    trained = net if healed else copy.deepcopy(net)
    monitor = watch(trained, adam)
    return descend(monitor, adam, lambda x, y: F.cross_entropy(trained(x), y), batches(points, labels, 32, 150))


def frozen_in_name(watch: Watch, seed: int, healed: bool) -> float:
    """Frozen layers decayed on, because their gradients were cleared to zeros and not to None."""
    torch.manual_seed(seed)
    points, labels = spirals(2500)
    net = dense([2, 64, 64, 3], nn.Tanh)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    free = torch.optim.Adam(net.parameters(), lr=5e-3)
    for x, y in batches(points, labels, 64, 300):
        free.zero_grad(set_to_none=False)
        F.cross_entropy(net(x), y).backward()
        free.step()
    net[:4].requires_grad_(False)
    monitor = watch(net, sgd)
    losses = []
    for x, y in batches(points, labels, 64, 200):
        sgd.zero_grad(set_to_none=healed)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        sgd.step()
        losses.append(loss.detach())
    return last(losses)


CASES = [
    unseen(
        "lambda-gives-the-rate/shapes",
        "questions",
        "https://github.com/lhoyer/MIC/issues/60; https://github.com/pytorch/pytorch/issues/78917",
        ("learning-rate-low",),
        rate_times_rate,
        "LambdaLR(lambda step: rate * ...)",
        "LambdaLR(lambda step: 1.0 * ...)",
    ),
    unseen(
        "plateau-mode-max/digits",
        "questions",
        "https://github.com/FunctionLab/selene/issues/115",
        ("learning-rate-low", "loss-plateau"),
        plateau_of_the_wrong_kind,
        'ReduceLROnPlateau(mode="max") with the loss',
        'mode="min"',
    ),
    unseen(
        "warm-up-never-stepped/words",
        "questions",
        "https://github.com/karpathy/nanoGPT/pull/578, where the warm-up begins at zero",
        ("zero-update",),
        warm_up_not_stepped,
        "no schedule.step()",
        "schedule.step() in each step",
    ),
    unseen(
        "warm-up-without-end/spirals",
        "questions",
        "https://github.com/Adit-Jain-srm/NightmareNet/pull/158",
        ("learning-rate-high", "loss-divergence"),
        warm_up_without_end,
        "(step + 1) / 5",
        "min(1.0, (step + 1) / 5)",
    ),
    unseen(
        "rate-of-the-head/shapes",
        "questions",
        "https://docs.pytorch.org/docs/stable/optim.html#per-parameter-options",
        ("update-ratio-high", "learning-rate-high"),
        head_a_thousand_times_faster,
        '"lr": 10.0 for the head',
        '"lr": 1e-2',
    ),
    unseen(
        "rate-decays-with-depth/spirals",
        "questions",
        "https://arxiv.org/abs/1801.06146, section 3.2: discriminative fine-tuning, with a factor far too small",
        ("update-ratio-low",),
        rate_decays_with_depth,
        "0.01**depth",
        "0.9**depth",
    ),
    unseen(
        "loss-in-metres/membrane",
        "questions",
        "https://sifal.social/posts/The-Epsilon-Trap-When-Adam-Stops-Being-Adam",
        ("epsilon-dominates", "loss-scale"),
        metres_of_a_membrane,
        "1e-6 * error",
        "1.0 * error",
    ),
    unseen(
        "clipped-by-value/shapes",
        "questions",
        "https://github.com/lksshw/SRNet/issues/18",
        ("always-clipped",),
        values_clipped,
        "clip_grad_value_(1e-5)",
        "clip_grad_value_(1.0)",
    ),
    unseen(
        "head-replaced-after-optimizer/shapes",
        "questions",
        "https://github.com/pytorch/pytorch/issues/14467; https://github.com/microsoft/nni/issues/4521",
        ("not-in-optimizer",),
        head_replaced_later,
        "net[1] = head after the optimizer was made",
        "before it",
    ),
    unseen(
        "copy-after-optimizer/blobs",
        "questions",
        "https://github.com/skorch-dev/skorch/issues/317; https://github.com/pytorch/pytorch/issues/29015",
        ("not-in-optimizer", "step-without-gradients"),
        copy_is_trained,
        "copy.deepcopy(net) after the optimizer was made",
        "net itself",
    ),
    unseen(
        "frozen-layers-decay/spirals",
        "questions",
        "https://discuss.pytorch.org/t/why-there-is-still-a-small-change-in-frozen-layer-parameters/153740",
        ("frozen-but-moving",),
        frozen_in_name,
        "zero_grad(set_to_none=False) and weight decay",
        "set_to_none=True",
    ),
]

"""Loops that add up, clip, clear or send back gradients in the wrong place, and layers that the loop never reaches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Case, Watch
from .data_localisers import TAXONOMY, batches, blobs, dense, digits, fit, houses, last, shapes, spirals


def sum_of_micro_batches(watch: Watch, seed: int, healed: bool) -> float:
    """Eight micro-batches were added up and not divided by eight, so the steps were eight times too long."""
    torch.manual_seed(seed)
    x, y = digits(3000)
    model = dense([100, 64, 64, 10], nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor, losses = watch(model, optimizer), []
    for images, labels in batches(x.flatten(1), y, 64, 200):
        optimizer.zero_grad()
        total = torch.zeros(())
        for part, answers in zip(images.chunk(8), labels.chunk(8), strict=True):
            loss = functional.cross_entropy(model(part), answers)
            (loss / 8 if healed else loss).backward()
            total += loss.detach() / 8
        monitor.log_scalar("loss", total)
        optimizer.step()
        losses.append(total)
    return last(losses)


def clipped_within(watch: Watch, seed: int, healed: bool) -> float:
    """The gradient was clipped behind each micro-batch of a step, so the first ones counted for less and less."""
    torch.manual_seed(seed)
    x, y = shapes(2500)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), *dense([400, 32, 6], nn.ReLU))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor, losses = watch(model, optimizer), []
    for images, labels in batches(x, y, 32, 200):
        optimizer.zero_grad()
        total = torch.zeros(())
        for at in range(4):
            loss = functional.cross_entropy(model(images[8 * at : 8 * at + 8]), labels[8 * at : 8 * at + 8]) / 4
            loss.backward()
            total += loss.detach()
            if at == 3 or not healed:
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        monitor.log_scalar("loss", total)
        optimizer.step()
        losses.append(total)
    return last(losses)


def backward_twice(watch: Watch, seed: int, healed: bool) -> float:
    """A second backward of the same loss, allowed by retain_graph, doubled every gradient."""
    torch.manual_seed(seed)
    x, y = houses(2000)
    x = (x - x.mean(0)) / x.std(0)
    model = dense([5, 64, 64, 1], nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor, losses = watch(model, optimizer), []
    for inputs, price in batches(x, y, 32, 250):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs), price)
        if not healed:
            loss.backward(retain_graph=True)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


class Residual(nn.Module):
    """Blocks that add to what they get, kept in a container of the given kind."""

    def __init__(self, container: type) -> None:
        super().__init__()
        self.first = nn.Linear(2, 32)
        self.blocks = container([dense([32, 32, 32], nn.ReLU) for _ in range(3)])
        self.last = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of three classes."""
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        result: Tensor = self.last(hidden)
        return result


def plain_list(watch: Watch, seed: int, healed: bool) -> float:
    """The blocks lay in a plain list, of which neither the model nor the optimizer knew."""
    torch.manual_seed(seed)
    x, y = spirals(1500)
    model = Residual(nn.ModuleList if healed else list)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x, y, 32, 300))


def cleared_before_step(watch: Watch, seed: int, healed: bool) -> float:
    """The gradients were cleared behind the backward pass, and the step found none."""
    torch.manual_seed(seed)
    x, y = blobs(2000, 6, 24)
    model = dense([24, 48, 6], nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor, losses = watch(model, optimizer), []
    for inputs, labels in batches(x, y, 32, 200):
        if healed:
            optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        if not healed:
            optimizer.zero_grad()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


def wrapped_loss(watch: Watch, seed: int, healed: bool) -> float:
    """The loss was put into a new tensor, which could be sent back without an error, to nowhere."""
    torch.manual_seed(seed)
    x, y = digits(2000)
    model = dense([100, 64, 10], nn.ReLU)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor, losses = watch(model, optimizer), []
    for images, labels in batches(x.flatten(1), y, 32, 200):
        loss = functional.cross_entropy(model(images), labels)
        loss = loss if healed else torch.tensor(loss.item(), requires_grad=True)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


class Detector(nn.Module):
    """A convolutional trunk with two heads: which shape, and of which colour."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(400, 32), nn.ReLU())
        self.shape_head = nn.Linear(32, 6)
        self.colour_head = nn.Linear(32, 3)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the shape, and the mean colour."""
        hidden = self.trunk(images)
        return self.shape_head(hidden), self.colour_head(hidden)


def head_without_loss(watch: Watch, seed: int, healed: bool) -> float:
    """The loss of the second head was worked out and logged, and not added to what goes backward."""
    torch.manual_seed(seed)
    x, y = shapes(2500)
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for images, labels in batches(x, y, 32, 250):
        shape, colour = model(images)
        shape_loss = functional.cross_entropy(shape, labels)
        colour_loss = functional.mse_loss(colour, images.mean((2, 3)))
        optimizer.zero_grad()
        (shape_loss + colour_loss if healed else shape_loss).backward()
        monitor.log_scalar("loss", (shape_loss + colour_loss).detach())
        monitor.log_scalar("colour loss", colour_loss.detach())
        optimizer.step()
        losses.append((shape_loss + colour_loss).detach())
    return last(losses)


CASES = [
    Case(
        "accumulation-not-divided/digits-mlp",
        "localisers",
        "https://discuss.pytorch.org/t/pytorch-gradient-accumulation/55955",
        ("loss-scale", "learning-rate-high"),
        sum_of_micro_batches,
        "loss.backward()",
        "(loss / 8).backward()",
    ),
    Case(
        "clip-within-accumulation/shapes-cnn",
        "localisers",
        "https://github.com/huggingface/transformers/issues/1563",
        ("clip-per-micro-batch",),
        clipped_within,
        "clip behind each micro-batch",
        "clip behind the last",
    ),
    Case(
        "backward-twice/houses",
        "localisers",
        "https://deadends.dev/cuda/backward-through-graph-twice (retain_graph as a remedy)",
        ("backward-twice",),
        backward_twice,
        "loss.backward(retain_graph=True) before it",
        "one backward",
    ),
    Case(
        "layers-in-a-list/residual-blocks",
        "localisers",
        "https://www.engineermaxxing.com/micro/lessons/pytorch-internals.html",
        ("unregistered-parameters",),
        plain_list,
        "self.blocks = list(blocks)",
        "nn.ModuleList(blocks)",
    ),
    Case(
        "gradients-cleared/blobs",
        "localisers",
        f"{TAXONOMY}, category API; order of calls in https://preproom.ai/learn/model-training-pytorch.html",
        ("gradients-cleared", "step-without-gradients"),
        cleared_before_step,
        "zero_grad() between backward and step",
        "zero_grad() before the forward pass",
    ),
    Case(
        "loss-in-a-new-tensor/digits-mlp",
        "localisers",
        "https://discuss.pytorch.org/t/gradient-is-lost-when-use-torch-tensor-t1-t2/23261",
        ("no-gradient", "step-without-gradients"),
        wrapped_loss,
        "torch.tensor(loss.item(), requires_grad=True)",
        "loss",
    ),
    Case(
        "head-without-gradient/colour",
        "localisers",
        f"{TAXONOMY}, wrong loss function calculation: a term is missing",
        ("no-gradient",),
        head_without_loss,
        "shape_loss.backward()",
        "(shape_loss + colour_loss).backward()",
    ),
]

"""Data that was not looked at: raw pixels, missing values, empty images, classes in order, labels out of it, one batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from .case import Case, Watch
from .data_localisers import DEEPCRIME, DEEPLOCALIZE, TAXONOMY, UMLAUT, batches, blobs, dense, digits, fit, houses, last, shapes


def raw_pixels(watch: Watch, seed: int, healed: bool) -> float:
    """Images went in with pixels from 0 to 255, so the first products were hundreds of times too large."""
    torch.manual_seed(seed)
    x, y = shapes(2000)
    pixels = (255 * x).round()
    inputs = pixels / 255 if healed else pixels
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 6),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(inputs, y, 32, 300))


def missing_values(watch: Watch, seed: int, healed: bool) -> float:
    """Some fields of the table were empty; they came in as NaN, and one batch with one of them spoilt every weight."""
    torch.manual_seed(seed)
    x, y = houses(2000)
    x = (x - x.mean(0)) / x.std(0)
    x[torch.rand(len(x)) < 0.002, 4] = torch.nan
    x = torch.nan_to_num(x) if healed else x
    model = dense([5, 48, 48, 1], nn.ReLU)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return fit(watch, model, optimizer, functional.mse_loss, batches(x, y, 32, 200))


class Contrast(nn.Module):
    """Each image less its mean over its deviation, to which ``least`` is added."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least

    def forward(self, images: Tensor) -> Tensor:
        """The images, all of one contrast."""
        mean = images.mean((1, 2, 3), keepdim=True)
        return (images - mean) / (images.std((1, 2, 3), keepdim=True) + self.least)


def zero_deviation(watch: Watch, seed: int, healed: bool) -> float:
    """A layer divides by the deviation of an image, and among the images are some that are black throughout."""
    torch.manual_seed(seed)
    x, y = digits(3000)
    x[::300] = 0
    model = nn.Sequential(
        Contrast(1e-5 if healed else 0.0),
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(400, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x, y, 32, 250))


def sorted_by_class(watch: Watch, seed: int, healed: bool) -> float:
    """The examples lay in the order of their classes and were never shuffled: the net forgot each class in the next one."""
    torch.manual_seed(seed)
    x, y = blobs(2400, 6, 24)
    held_x, held_y, x, y = x[:400], y[:400], x[400:], y[400:]
    model = dense([24, 48, 6], nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor, losses = watch(model, optimizer), []
    for _ in range(5):
        order = torch.randperm(len(x)) if healed else y.argsort()
        for taken in order.split(40):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x[taken]), y[taken])
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            optimizer.step()
            losses.append(loss.detach())
        with monitor.no_monitor(), torch.no_grad():
            accuracy = (model(held_x).argmax(1) == held_y).float().mean()
        monitor.log_scalar("held-out accuracy", accuracy)
    return last(losses)


def labels_out_of_order(watch: Watch, seed: int, healed: bool) -> float:
    """Images and labels were shuffled one after the other, each in an order of its own."""
    torch.manual_seed(seed)
    x, y = digits(4000)
    order = torch.randperm(len(x))
    x, y = x[order], y[order if healed else torch.randperm(len(y))]
    model = dense([100, 64, 10], nn.ReLU)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x.flatten(1), y, 32, 300))


def one_batch(watch: Watch, seed: int, healed: bool) -> float:
    """The loop asked for a new iterator in each step, and took its first batch, which was always the same."""
    torch.manual_seed(seed)
    x, y = shapes(2300)
    held_x, held_y, x, y = x[:300], y[:300], x[300:], y[300:]
    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    stream = (batch for _ in range(3) for batch in loader)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), *dense([400, 32, 6], nn.ReLU))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for step in range(300):
        inputs, labels = next(stream) if healed else next(iter(loader))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
        if step % 50 == 49:
            with monitor.no_monitor(), torch.no_grad():
                held_out = functional.cross_entropy(model(held_x), held_y)
            monitor.log_scalar("held-out loss", held_out)
    return last(losses)


CASES = [
    Case(
        "inputs-to-255/shapes-cnn",
        "localisers",
        f"{UMLAUT}, heuristic 'input data exceeds typical limits'",
        ("inputs-not-normalised",),
        raw_pixels,
        "pixels from 0 to 255",
        "pixels / 255",
    ),
    Case(
        "nan-in-inputs/houses",
        "localisers",
        f"{UMLAUT}, heuristic 'NaN in input'",
        ("non-finite-activation", "non-finite-loss", "non-finite-gradient"),
        missing_values,
        "the table with its NaNs",
        "torch.nan_to_num(table)",
    ),
    Case(
        "numerical-error-in-layer/deviation-of-a-black-image",
        "localisers",
        f"{DEEPLOCALIZE}, numerical errors of a layer in the forward pass",
        ("non-finite-activation", "non-finite-loss", "non-finite-gradient"),
        zero_deviation,
        "/ std",
        "/ (std + 1e-5)",
    ),
    Case(
        "not-shuffled/blobs",
        "localisers",
        f"{TAXONOMY}, category API: wrong position of data shuffle operation",
        ("labels-not-mixed",),
        sorted_by_class,
        "order of the classes",
        "torch.randperm",
    ),
    Case(
        "labels-out-of-order/digits-mlp",
        "localisers",
        f"{DEEPCRIME}, operator TCL (labels changed); {TAXONOMY}, wrong labels in training data",
        ("loss-at-chance",),
        labels_out_of_order,
        "labels in an order of their own",
        "labels in the order of the images",
    ),
    Case(
        "one-batch/new-iterator-each-step",
        "localisers",
        f"{TAXONOMY}, training data quality and batching: the model is trained on a small part of the data",
        ("repeated-batch",),
        one_batch,
        "next(iter(loader))",
        "next(stream)",
    ),
]

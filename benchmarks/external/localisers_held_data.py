"""Data that was not looked at once more: pixels row by row, counts under a logarithm, equal pairs, sorted and mislaid texts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from torch_gradmon import Checks

from .case import Case, Watch
from .data_localisers import (
    DEEPCRIME,
    DEEPLOCALIZE,
    PAD,
    TAXONOMY,
    UMLAUT,
    batches,
    descend,
    digits,
    last,
    reviews,
    sentences,
    topics,
)


class Rows(nn.Module):
    """An image read row by row by a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(10, 48, batch_first=True)
        self.head = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the digits."""
        _, state = self.gru(images[:, 0])
        result: Tensor = self.head(state[0])
        return result


def bytes_row_by_row(watch: Watch, seed: int, healed: bool) -> float:
    """Rows of bytes, up to 255, went into a GRU whose gates take numbers about one."""
    torch.manual_seed(seed)
    images, labels = digits(3000)
    stored = (255 * images).to(torch.uint8)
    net = Rows()
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        pixels = x.float() / 255 if healed else x.float()
        return functional.cross_entropy(net(pixels), y)

    return descend(watch(net, adam), adam, loss_of, batches(stored, labels, 32, 300))


def logarithm_of_nothing(watch: Watch, seed: int, healed: bool) -> float:
    """Counts of words went through a logarithm on the way in, and most words do not occur."""
    torch.manual_seed(seed)
    present, labels = topics(3000, words=200)
    counts = present * torch.randint(1, 5, present.shape)
    features = torch.log1p(counts) if healed else torch.log(counts)
    net = nn.Sequential(nn.Linear(200, 64), nn.ReLU(), nn.Linear(64, 8))
    adam = torch.optim.Adam(net.parameters(), lr=2e-3)
    return descend(watch(net, adam), adam, lambda x, y: functional.cross_entropy(net(x), y), batches(features, labels, 32, 200))


class Twins(nn.Module):
    """The distance between two images in a learned space."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least
        self.embed = nn.Sequential(nn.Flatten(), nn.Linear(100, 64), nn.ReLU(), nn.Linear(64, 12))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """The root of the sum of squares, which has no slope at zero."""
        squares: Tensor = (self.embed(one) - self.embed(other)).square()
        return (squares.sum(1) + self.least).sqrt()


def root_at_zero(watch: Watch, seed: int, healed: bool) -> float:
    """Some pairs were an image with itself: their distance is zero, and the slope of the root there infinite times nothing."""
    torch.manual_seed(seed)
    images, labels = digits(3000)
    net = Twins(1e-6 if healed else 0.0)
    adam = torch.optim.Adam(net.parameters(), lr=2e-3)
    losses, monitor = [], watch(net, adam)
    for step in range(600):
        one, other = torch.randint(3000, (2, 64))
        other[0] = one[0] if step % 40 == 30 else other[0]
        same = (labels[one] == labels[other]).float()
        away = net(images[one], images[other])
        loss = (same * away.square() + (1 - same) * functional.relu(2 - away).square()).mean()
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        losses.append(loss.detach())
    return last(losses)


class BagOfWords(nn.Module):
    """The mean of a text's words, padding left out, and a classifier of it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(40, 24, padding_idx=PAD)
        self.head = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 2))

    def forward(self, text: Tensor) -> Tensor:
        """Logits of blame and praise."""
        result: Tensor = self.head(self.words(text))
        return result


def loader_in_order(watch: Watch, seed: int, healed: bool) -> float:
    """All blame came first in the file and all praise after it, and the loader was not told to shuffle."""
    torch.manual_seed(seed)
    texts, labels = reviews(2560)
    order = labels[:2048].argsort()
    loader = DataLoader(TensorDataset(texts[order], labels[order]), batch_size=32, shuffle=healed)
    net = BagOfWords()
    adam = torch.optim.Adam(net.parameters(), lr=0.03)
    losses, monitor = [], watch(net, adam)
    for _ in range(4):
        for x, y in loader:
            loss = functional.cross_entropy(net(x), y)
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            losses.append(loss.detach())
            adam.step()
            adam.zero_grad()
        with monitor.no_monitor(), torch.no_grad():
            accuracy = (net(texts[2048:]).argmax(1) == labels[2048:]).float().mean()
        monitor.log_scalar("held-out accuracy", accuracy)
    return last(losses)


def sorted_by_length(watch: Watch, seed: int, healed: bool) -> float:
    """Texts were sorted by their length, as packed sequences want it, and their labels were not."""
    torch.manual_seed(seed)
    texts, labels = reviews(3000)
    order = (texts != PAD).sum(1).argsort(descending=True)
    texts, labels = texts[order], labels[order] if healed else labels
    net = BagOfWords()
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    return descend(watch(net, adam), adam, lambda x, y: functional.cross_entropy(net(x), y), batches(texts, labels, 32, 250))


def window_stands_still(watch: Watch, seed: int, healed: bool) -> float:
    """The window over the text was never moved on: each step had the first lines again. Batches were meant to vary."""
    torch.manual_seed(seed)
    text = sentences(2300)
    held_out, text = text[:300], text[300:]
    net = nn.Sequential(nn.Embedding(24, 16), nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 24))
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    monitor = watch(net, adam, checks=Checks(batch_varies=True))
    losses, start = [], 0
    for step in range(300):
        lines = text[start : start + 32]
        loss = functional.cross_entropy(net(lines[:, :4]), lines[:, 4])
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        losses.append(loss.detach())
        start = (start + 32) % 1984 if healed else start
        if step % 100 == 99:
            with monitor.no_monitor(), torch.no_grad():
                surprise = functional.cross_entropy(net(held_out[:, :4]), held_out[:, 4])
            monitor.log_scalar("held-out loss", surprise)
    return last(losses)


CASES = [
    Case(
        "inputs-to-255/rows-into-gru",
        "localisers",
        f"{UMLAUT}, heuristic 'input data exceeds typical limits'",
        ("inputs-not-normalised", "saturated-units"),
        bytes_row_by_row,
        "bytes as floats",
        "bytes / 255",
    ),
    Case(
        "nan-in-inputs/logarithm-of-counts",
        "localisers",
        f"{UMLAUT}, heuristic 'NaN in input' (or infinity)",
        ("non-finite-activation", "non-finite-loss", "non-finite-gradient"),
        logarithm_of_nothing,
        "torch.log(counts)",
        "torch.log1p(counts)",
    ),
    Case(
        "numerical-error-in-layer/root-at-zero",
        "localisers",
        f"{DEEPLOCALIZE}, numerical errors of a layer in the backward pass",
        ("non-finite-gradient",),
        root_at_zero,
        "squares.sum().sqrt()",
        "(squares.sum() + 1e-6).sqrt()",
    ),
    Case(
        "not-shuffled/loader-in-order",
        "localisers",
        f"{TAXONOMY}, category API: wrong position of data shuffle operation",
        ("labels-not-mixed",),
        loader_in_order,
        "shuffle=False",
        "shuffle=True",
    ),
    Case(
        "labels-out-of-order/sorted-by-length",
        "localisers",
        f"{DEEPCRIME}, operator TCL (labels changed); {TAXONOMY}, wrong labels in training data",
        ("loss-at-chance",),
        sorted_by_length,
        "labels",
        "labels[order]",
    ),
    Case(
        "one-batch/window-stands-still",
        "localisers",
        f"{TAXONOMY}, training data quality and batching: the model is trained on a small part of the data",
        ("repeated-batch", "expectation-broken"),
        window_stands_still,
        "start",
        "start + 32",
    ),
]

"""Loops that add up, clip, clear or send back gradients in the wrong place once more, in other models and other words."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Case, Watch
from .data_localisers import PAD, TAXONOMY, batches, descend, digits, last, reviews, sentences, shapes, waves
from .localisers_held_gradients import Forecaster
from .localisers_held_losses import Writer


def accumulated_sum(watch: Watch, seed: int, healed: bool) -> float:
    """Every sixteenth batch a step, of gradients that were added and never averaged."""
    torch.manual_seed(seed)
    images, labels = shapes(2500)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(400, 48), nn.ReLU(), nn.Linear(48, 6))
    sgd = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    accumulate, shares, losses = 16, [], []
    monitor = watch(net, sgd)
    for count, (x, y) in enumerate(batches(images, labels, 8, 16 * 150), 1):
        loss = functional.cross_entropy(net(x), y)
        scaled = loss / accumulate if healed else loss
        scaled.backward()
        shares.append(loss.detach())
        if count % accumulate == 0:
            losses.append(torch.stack(shares[-accumulate:]).mean())
            monitor.log_scalar("loss", losses[-1])
            sgd.step()
            sgd.zero_grad()
    return last(losses)


def clipped_before_the_if(watch: Watch, seed: int, healed: bool) -> float:
    """The clip stood before the line that asks whether it is time for a step, not behind it."""
    torch.manual_seed(seed)
    text = sentences(2000)
    net = Writer(normalised=False)
    sgd = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    monitor, shares, losses = watch(net, sgd), [], []
    for count, (lines, _) in enumerate(batches(text, text, 8, 4 * 150), 1):
        loss = functional.cross_entropy(net(lines[:, :-1]).flatten(0, 1), lines[:, 1:].flatten())
        (loss / 4).backward()
        shares.append(loss.detach())
        due = count % 4 == 0
        if due or not healed:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        if due:
            losses.append(torch.stack(shares[-4:]).mean())
            monitor.log_scalar("loss", losses[-1])
            sgd.step()
            sgd.zero_grad()
    return last(losses)


class Sketcher(nn.Module):
    """An autoencoder that also says which digit it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(100, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU())
        self.decoder = nn.Linear(24, 100)
        self.digit = nn.Linear(24, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The image again, and logits of the digits."""
        code = self.encoder(images)
        return self.decoder(code), self.digit(code)


def first_term_twice(watch: Watch, seed: int, healed: bool) -> float:
    """The first loss was sent back by itself, and then once more within the sum of both."""
    torch.manual_seed(seed)
    images, labels = digits(3000)
    net = Sketcher()
    sgd = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    monitor, losses = watch(net, sgd), []
    for x, y in batches(images.flatten(1), labels, 32, 250):
        again, digit = net(x)
        which = functional.cross_entropy(digit, y)
        if not healed:
            which.backward(retain_graph=True)
        total = which + functional.mse_loss(again, x)
        total.backward()
        monitor.log_scalar("loss", total.detach())
        losses.append(total.detach())
        sgd.step()
        sgd.zero_grad()
    return last(losses)


class WindowReader(nn.Module):
    """Convolutions of two, three and four words over a text, each with its maximum, and a classifier of all of them."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16, padding_idx=PAD)
        windows = [nn.Conv1d(16, 12, width) for width in (2, 3, 4)]
        self.windows = nn.ModuleList(windows) if registered else windows
        self.head = nn.Linear(36, 2)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of blame and praise."""
        words = self.words(text).transpose(1, 2)
        result: Tensor = self.head(torch.cat([functional.relu(window(words)).amax(2) for window in self.windows], 1))
        return result


def windows_unknown(watch: Watch, seed: int, healed: bool) -> float:
    """The convolutions of a text classifier lay in a list comprehension's list, and stayed as they were drawn."""
    torch.manual_seed(seed)
    texts, labels = reviews(3000)
    net = WindowReader(registered=healed)
    adam = torch.optim.Adam(net.parameters(), lr=2e-3)
    return descend(watch(net, adam), adam, lambda x, y: functional.cross_entropy(net(x), y), batches(texts, labels, 32, 200))


def set_to_nought(watch: Watch, seed: int, healed: bool) -> float:
    """Gradients were set to zero after the backward pass; AdamW went on with nothing but its decay."""
    torch.manual_seed(seed)
    series = waves(2000, 31)
    net = Forecaster(nn.GRU(1, 32, batch_first=True))
    adamw = torch.optim.AdamW(net.parameters(), lr=5e-3)
    monitor, losses = watch(net, adamw), []
    for x, y in batches(series[:, :-1], series[:, 1:], 32, 200):
        if healed:
            net.zero_grad(set_to_none=False)
        loss = functional.mse_loss(net(x), y)
        loss.backward()
        if not healed:
            net.zero_grad(set_to_none=False)
        monitor.log_scalar("loss", loss.detach())
        adamw.step()
        losses.append(loss.detach())
    return last(losses)


def copied_outputs(watch: Watch, seed: int, healed: bool) -> float:
    """The outputs were turned into numbers and back into a tensor that asks for a gradient, which ends there."""
    torch.manual_seed(seed)
    texts, labels = reviews(2000)
    net = nn.Sequential(nn.EmbeddingBag(40, 24, padding_idx=PAD), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 2))
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        outputs = net(x) if healed else torch.tensor(net(x).tolist(), requires_grad=True)
        return functional.cross_entropy(outputs, y)

    return descend(watch(net, adam), adam, loss_of, batches(texts, labels, 32, 200))


CASES = [
    Case(
        "accumulation-not-divided/every-sixteenth",
        "localisers",
        "https://discuss.pytorch.org/t/pytorch-gradient-accumulation/55955",
        ("loss-scale", "learning-rate-high"),
        accumulated_sum,
        "loss.backward()",
        "(loss / accumulate).backward()",
    ),
    Case(
        "clip-within-accumulation/words",
        "localisers",
        "https://github.com/facebookresearch/lingua/pull/59",
        ("clip-per-micro-batch",),
        clipped_before_the_if,
        "clip in each micro-batch",
        "clip when a step is due",
    ),
    Case(
        "backward-twice/term-and-sum",
        "localisers",
        "https://deadends.dev/cuda/backward-through-graph-twice (retain_graph as a remedy)",
        ("backward-twice",),
        first_term_twice,
        "which.backward(retain_graph=True) before total.backward()",
        "total.backward()",
    ),
    Case(
        "layers-in-a-list/windows-of-words",
        "localisers",
        "https://www.engineermaxxing.com/micro/lessons/pytorch-internals.html",
        ("unregistered-parameters",),
        windows_unknown,
        "self.windows = windows",
        "nn.ModuleList(windows)",
    ),
    Case(
        "gradients-cleared/set-to-zero",
        "localisers",
        f"{TAXONOMY}, category API; order of calls in https://preproom.ai/learn/model-training-pytorch.html",
        ("gradients-cleared", "zero-update"),
        set_to_nought,
        "zero_grad(set_to_none=False) between backward and step",
        "before the forward pass",
    ),
    Case(
        "loss-in-a-new-tensor/outputs-copied",
        "localisers",
        "https://discuss.pytorch.org/t/gradient-is-lost-when-use-torch-tensor-t1-t2/23261",
        ("no-gradient", "step-without-gradients"),
        copied_outputs,
        "torch.tensor(outputs.tolist(), requires_grad=True)",
        "outputs",
    ),
]

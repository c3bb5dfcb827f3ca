"""Loops that clear, step and go backward in the wrong places, from a second round of reports, written anew."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Case, Watch
from .data_localisers import batches, dense, digits, houses, last, reviews, sentences, spirals, waves


def second(
    name: str,
    judge: str,
    source: str,
    rules: tuple[str, ...],
    run: Callable[[Watch, int, bool], float],
    bug: str,
    fix: str,
) -> Case:
    """A broken training of the second round."""
    return Case(name, judge, source, rules, run, bug=bug, fix=fix)


def other_one_cleared(watch: Watch, seed: int, healed: bool) -> float:
    """The generator's step cleared the discriminator's gradients a second time; the measure is the distance of the means."""
    torch.manual_seed(seed)
    goal = torch.tensor([1.5, -1.0])
    forger, judge = dense([4, 32, 2], nn.ReLU), dense([2, 32, 1], nn.ReLU)
    forging = torch.optim.SGD(forger.parameters(), lr=0.05)
    judging = torch.optim.SGD(judge.parameters(), lr=0.2)
    monitor, other, distances = watch(forger, forging), watch(judge, judging), []
    for _ in range(300):
        real, fake = 0.5 * torch.randn(64, 2) + goal, forger(torch.randn(64, 4))
        judging.zero_grad()
        judged = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        judged.backward()
        other.log_scalar("loss", judged.detach())
        judging.step()
        (forging if healed else judging).zero_grad()
        forged = F.softplus(-judge(fake)).mean()
        forged.backward()
        monitor.log_scalar("loss", forged.detach())
        forging.step()
        distances.append((fake.detach().mean(0) - goal).norm())
    return last(distances)


class Forecaster(nn.Module):
    """A GRU and a layer that tells the next value."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.gru = nn.GRU(1, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, past: Tensor) -> Tensor:
        """The value after the last one."""
        out: Tensor = self.head(self.gru(past)[0][:, -1])
        return out


def cleared_in_each_epoch(watch: Watch, seed: int, healed: bool) -> float:
    """Gradients were cleared at the beginning of an epoch and not of a batch."""
    torch.manual_seed(seed)
    series = waves(1280, 21)
    net = Forecaster()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    monitor, losses = watch(net, sgd), []
    for step, (past, following) in enumerate(batches(series[:, :20, None], series[:, 20:], 32, 200)):
        if healed or step % 40 == 0:
            sgd.zero_grad()
        loss = F.mse_loss(net(past), following)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        sgd.step()
        losses.append(loss.detach())
    return last(losses)


def propagated_once(watch: Watch, seed: int, healed: bool) -> float:
    """Films' vectors were spread over the graph once before the loop, so all steps went backward through the first ones."""
    torch.manual_seed(seed)
    tastes = torch.randn(60, 4)
    films = torch.arange(60)
    near = torch.softmax(tastes @ tastes.T, 1)
    scores = tastes @ torch.randn(4, 3)
    vectors, judge = nn.Embedding(60, 16), dense([16, 32, 3], nn.ReLU)
    net = nn.ModuleDict({"vectors": vectors, "judge": judge})
    adam = torch.optim.Adam(net.parameters(), lr=1e-2)
    monitor, losses = watch(net, adam), []
    spread = near @ vectors.weight
    for chosen, wanted in batches(films, scores, 20, 250):
        if healed:
            spread = near @ vectors.weight
        loss = F.mse_loss(judge(spread[chosen] * 4), wanted)
        adam.zero_grad()
        loss.backward(retain_graph=True)
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        with torch.no_grad():
            losses.append(F.mse_loss(judge(near[chosen] @ vectors.weight * 4), wanted))
    return last(losses)


def total_in_the_loop(watch: Watch, seed: int, healed: bool) -> float:
    """The running total of six tasks went backward after each task, so that the first one counted six times."""
    torch.manual_seed(seed)
    x, price = houses(2000)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.cat([price, *(torch.sin(price + shift) for shift in range(1, 6))], 1)
    net = dense([5, 64, 6], nn.Tanh)
    sgd = torch.optim.SGD(net.parameters(), lr=0.04, momentum=0.9)
    monitor, losses = watch(net, sgd), []
    for inputs, wanted in batches(x, y, 32, 250):
        sgd.zero_grad()
        outputs, total = net(inputs), torch.zeros(())
        for task in range(6):
            loss = F.mse_loss(outputs[:, task], wanted[:, task])
            total = total + loss
            (loss if healed else total).backward(retain_graph=True)
        monitor.log_scalar("loss", total.detach())
        sgd.step()
        losses.append(total.detach())
    return last(losses)


def same_one_stepped_twice(watch: Watch, seed: int, healed: bool) -> float:
    """Of two optimizers the first one stepped twice and the second one never, a copied line."""
    torch.manual_seed(seed)
    images, labels = digits(2500)
    encoder = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    head = dense([192, 48, 10], nn.ReLU)
    net = nn.Sequential(encoder, head)
    first = torch.optim.SGD(encoder.parameters(), lr=0.02, momentum=0.9)
    other = torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.9)
    monitor, losses = watch(net, first, other), []
    for x, y in batches(images, labels, 32, 200):
        first.zero_grad()
        other.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        first.step()
        (other if healed else first).step()
        losses.append(loss.detach())
    return last(losses)


class Reader(nn.Module):
    """A transformer that guesses the next of 24 words."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(24, width)
        self.places = nn.Parameter(0.1 * torch.randn(16, width))
        self.block = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 24)

    def forward(self, text: Tensor) -> Tensor:
        """Logits for the word after each word."""
        mask = torch.ones(text.shape[1], text.shape[1], dtype=torch.bool).triu(1)
        out: Tensor = self.head(self.block(self.words(text) + self.places[: text.shape[1]], src_mask=mask))
        return out


def scheduler_alone(watch: Watch, seed: int, healed: bool) -> float:
    """Only the schedule stepped, because it seemed to wrap the optimizer."""
    torch.manual_seed(seed)
    text = sentences(1000)
    net = Reader()
    adam = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 150)
    monitor, losses = watch(net, adam), []
    for before, after in batches(text[:, :-1], text[:, 1:], 32, 150):
        adam.zero_grad()
        loss = F.cross_entropy(net(before).transpose(1, 2), after)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        if healed:
            adam.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule.step()
        losses.append(loss.detach())
    return last(losses)


def cleared_in_the_window(watch: Watch, seed: int, healed: bool) -> float:
    """Eight micro-batches made one step, but gradients were cleared at the top of each, so that one eighth of one was left."""
    torch.manual_seed(seed)
    points, labels = spirals(3000)
    net = dense([2, 64, 64, 3], nn.Tanh)
    sgd = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    monitor, losses = watch(net, sgd), []
    for step, (x, y) in enumerate(batches(points, labels, 16, 1600)):
        if not healed or step % 8 == 0:
            sgd.zero_grad()
        loss = F.cross_entropy(net(x), y)
        (loss / 8).backward()
        losses.append(loss.detach())
        if step % 8 == 7:
            monitor.log_scalar("loss", torch.stack(losses[-8:]).mean())
            sgd.step()
    return last(losses)


def old_gradients_kept(watch: Watch, seed: int, healed: bool) -> float:
    """Word vectors were frozen after a while, and then only the head was cleared: their last gradient moved them in each step."""
    torch.manual_seed(seed)
    texts, praise = reviews(2000)
    words, head = nn.Embedding(40, 24), dense([24, 32, 2], nn.ReLU)
    net = nn.ModuleDict({"words": words, "head": head})
    sgd = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    monitor, losses = watch(net, sgd), []
    for step, (x, y) in enumerate(batches(texts, praise, 32, 250)):
        if step == 50:
            words.requires_grad_(False)
        if step < 50 or healed:
            sgd.zero_grad()
        else:
            head.zero_grad()
        loss = F.cross_entropy(head(words(x).mean(1)), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        sgd.step()
        losses.append(loss.detach())
    return last(losses)


CASES: list[Case] = [
    second(
        "other-optimizer-cleared/gan",
        "questions",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/591; https://github.com/Adversarial-Deep-Learning/code-soup/issues/69",
        ("missing-zero-grad",),
        other_one_cleared,
        "judging.zero_grad() before the generator's loss",
        "forging.zero_grad()",
    ),
    second(
        "zero-grad-per-epoch/gru",
        "questions",
        "https://github.com/salesforce/corr_based_prediction/issues/1",
        ("missing-zero-grad",),
        cleared_in_each_epoch,
        "zero_grad() once in an epoch",
        "in each batch",
    ),
    second(
        "propagated-once/films",
        "questions",
        "https://discuss.pytorch.org/t/runtimeerror-trying-to-backward-through-the-graph-a-second-time-"
        "but-the-buffers-have-already-been-freed-specify-retain-graph-true-when-calling-backward-the-first-time/6795",
        ("backward-twice",),
        propagated_once,
        "near @ vectors.weight before the loop",
        "in each step",
    ),
    second(
        "running-total-backward/six-tasks",
        "questions",
        "https://discuss.pytorch.org/t/what-exactly-does-retain-variables-true-in-loss-backward-do/3508",
        ("backward-twice",),
        total_in_the_loop,
        "total.backward(retain_graph=True) after each task",
        "loss.backward(retain_graph=True)",
    ),
    second(
        "one-optimizer-stepped-twice/digits",
        "questions",
        "https://github.com/Lornatang/ESRGAN-PyTorch/issues/39",
        ("stepped-twice", "never-stepped"),
        same_one_stepped_twice,
        "first.step() twice",
        "first.step() and other.step()",
    ),
    second(
        "scheduler-steps-alone/words",
        "questions",
        "https://github.com/pytorch/pytorch/issues/3814",
        ("never-stepped",),
        scheduler_alone,
        "schedule.step() without optimizer.step()",
        "both",
    ),
    second(
        "cleared-in-the-window/spirals",
        "questions",
        "https://github.com/ultralytics/ultralytics/pull/11217",
        ("micro-batch-discarded",),
        cleared_in_the_window,
        "zero_grad() at the top of each micro-batch",
        "of the first of eight",
    ),
    second(
        "old-gradient-of-frozen-words/reviews",
        "questions",
        "https://discuss.pytorch.org/t/why-there-is-still-a-small-change-in-frozen-layer-parameters/153740",
        ("frozen-but-moving",),
        old_gradients_kept,
        "head.zero_grad() after the words are frozen",
        "optimizer.zero_grad()",
    ),
]

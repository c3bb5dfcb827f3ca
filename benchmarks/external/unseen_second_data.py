"""Data that are not what the net was meant to get, from a second round of reports, written anew."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from .case import Case, Watch
from .data_localisers import batches, blobs, dense, descend, digits, last, reviews, shapes, waves
from .unseen_second_loops import second


def largest_of_one_label(watch: Watch, seed: int, healed: bool) -> float:
    """Labels in a column went through argmax(1), as if they were one-hot; the measure is the error on the true ones."""
    torch.manual_seed(seed)
    points, labels = blobs(3000, 4, 12)
    column = labels[:, None]
    targets = F.one_hot(column[:, 0]).argmax(1) if healed else column.argmax(1)
    net = dense([12, 32, 4], nn.ReLU)
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    monitor, wrong = watch(net, adam), []
    for x, (y, true) in ((x, y.T) for x, y in batches(points, torch.stack([targets, labels], 1), 32, 150)):
        scores = net(x)
        loss = F.cross_entropy(scores, y)
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        wrong.append((scores.argmax(1) != true).float().mean())
    return last(wrong)


def norm_of_one_number(watch: Watch, seed: int, healed: bool) -> float:
    """A layer norm over the only feature of a series made zeros of all values."""
    torch.manual_seed(seed)
    series = 2 * waves(2000, 21)
    norm = nn.Identity() if healed else nn.LayerNorm(1)
    body, head = nn.GRU(1, 24, batch_first=True), nn.Linear(24, 1)
    net = nn.ModuleDict({"norm": norm, "body": body, "head": head})
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(head(body(norm(x[..., None]))[0][:, -1]), y)

    return descend(watch(net, adam), adam, loss_of, batches(series[:, :20], series[:, 20:], 32, 150))


def first_batch_for_ever(watch: Watch, seed: int, healed: bool) -> float:
    """next(iter(loader)) in the loop began the loader anew, in order, in each step; the measure is the error on other images."""
    torch.manual_seed(seed)
    images, labels = digits(3000)
    loader = DataLoader(TensorDataset(images[500:], labels[500:]), 32, shuffle=False)
    net = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 10))
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    monitor, errors, once = watch(net, adam), [], iter(loader)
    for step in range(156):
        if step == 78:
            once = iter(loader)
        x, y = next(once if healed else iter(loader))
        adam.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        if step % 26 == 25:
            with torch.no_grad():
                errors.append(F.cross_entropy(net(images[:200]), labels[:200]))
    return last(errors)


def divided_twice(watch: Watch, seed: int, healed: bool) -> float:
    """Pixels were divided by 255, although the conversion to tensors had done so."""
    torch.manual_seed(seed)
    images, kinds = shapes(2500)
    images = images - images.mean() if healed else images / 255
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 6)
    )
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return descend(watch(net, sgd), sgd, lambda x, y: F.cross_entropy(net(x), y), batches(images, kinds, 32, 200))


def read_from_the_padding(watch: Watch, seed: int, healed: bool) -> float:
    """The last of 80 outputs of an LSTM was taken for each text, while texts ended long before in padding."""
    torch.manual_seed(seed)
    texts, praise = reviews(2000, 12)
    texts = F.pad(texts, (0, 68))
    words, lstm, head = nn.Embedding(40, 16, padding_idx=0), nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 2)
    net = nn.ModuleDict({"words": words, "lstm": lstm, "head": head})
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        outputs, ends = lstm(words(x))[0], (x > 0).sum(1) - 1
        return F.cross_entropy(head(outputs[torch.arange(len(x)), ends] if healed else outputs[:, -1]), y)

    return descend(watch(net, adam), adam, loss_of, batches(texts, praise, 32, 150))


def pixels_added_up(watch: Watch, seed: int, healed: bool) -> float:
    """The loss of a mask was the sum over all pixels of the batch."""
    torch.manual_seed(seed)
    images, _ = shapes(1500)
    masks = (images.mean(1, keepdim=True) > 0.35).float()
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1)
    )
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    monitor, losses = watch(net, sgd), []
    for x, y in batches(images, masks, 32, 120):
        loss = F.binary_cross_entropy_with_logits(net(x), y, reduction="mean" if healed else "sum")
        sgd.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        sgd.step()
        losses.append(loss.detach() / (1 if healed else y.numel()))
    return last(losses)


CASES: list[Case] = [
    second(
        "argmax-of-a-column/blobs",
        "localisers",
        "Humbatova et al. (ICSE 2020), https://arxiv.org/abs/1910.11015, training data quality: wrong labels",
        ("labels-constant",),
        largest_of_one_label,
        "column.argmax(1)",
        "one_hot(column[:, 0]).argmax(1)",
    ),
    second(
        "layer-norm-of-one-feature/series",
        "questions",
        "https://github.com/pytorch/pytorch/issues/108956; https://github.com/pytorch/pytorch/pull/12968",
        ("constant-input", "loss-at-chance"),
        norm_of_one_number,
        "nn.LayerNorm(1) over the only feature",
        "no norm",
    ),
    second(
        "loader-begun-anew/digits",
        "questions",
        "https://github.com/wandb/examples/issues/444; https://github.com/leohsuofnthu/Pytorch-IterativeFCN/issues/7",
        ("repeated-batch",),
        first_batch_for_ever,
        "next(iter(loader)) in the loop",
        "next(once)",
    ),
    second(
        "divided-by-255-twice/shapes",
        "questions",
        "https://github.com/facebookresearch/InterHand2.6M/issues/110; https://github.com/pytorch/pytorch/issues/6390",
        ("inputs-not-normalised",),
        divided_twice,
        "images / 255 for images from 0 to 1",
        "images - images.mean()",
    ),
    second(
        "output-of-the-padding/lstm",
        "questions",
        "https://github.com/keitakurita/practical-torchtext/issues/5; https://github.com/thtrieu/qclass_dl/issues/1",
        ("loss-at-chance",),
        read_from_the_padding,
        "outputs[:, -1]",
        "the output of the last word",
    ),
    second(
        "sum-over-pixels/masks",
        "questions",
        "https://github.com/mkocabas/focal-loss-keras/issues/18; https://github.com/XPixelGroup/BasicSR/issues/359",
        ("loss-scale", "learning-rate-high"),
        pixels_added_up,
        'reduction="sum"',
        'reduction="mean"',
    ),
]

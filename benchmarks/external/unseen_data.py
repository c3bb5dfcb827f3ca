"""Data, labels and weights of classes that were damaged on their way, as people reported it, written anew."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Watch
from .data_localisers import batches, blobs, dense, descend, digits, fit, last, reviews, shapes, waves
from .unseen_losses import unseen


def mask_below_one(watch: Watch, seed: int, healed: bool) -> float:
    """Masks were scaled to below one as images are, and then turned to whole numbers: all zero; the measure is the error."""
    torch.manual_seed(seed)
    images, kinds = shapes(1500)
    truth = (images.mean(1) > 0.3).long() * (1 + kinds[:, None, None] // 3)
    stored = (100 * truth).to(torch.uint8)
    labels = (stored // 100).long() if healed else (stored / 255).long()
    net = nn.Sequential(
        nn.Conv2d(3, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 3, 1)
    )
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    monitor, mistakes = watch(net, adam), []
    for rows, _ in batches(torch.arange(1500), labels, 16, 150):
        scores = net(images[rows])
        loss = F.cross_entropy(scores, labels[rows])
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        mistakes.append((scores.argmax(1) != truth[rows]).float().mean())
    return last(mistakes)


def one_buffer_for_all(watch: Watch, seed: int, healed: bool) -> float:
    """Each row was written into one buffer and the buffer put on a list, which held the last row many times."""
    torch.manual_seed(seed)
    points, labels = blobs(2000, 5, 16)
    buffer, rows = torch.empty(16), []
    for point in points:
        buffer.copy_(point)
        rows.append(buffer.clone() if healed else buffer)
    net = dense([16, 48, 5], nn.ReLU)
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    return fit(watch, net, adam, F.cross_entropy, batches(torch.stack(rows), labels, 32, 200))


def divided_and_cut(watch: Watch, seed: int, healed: bool) -> float:
    """Pixels were divided by 255 and stored as bytes again, which leaves nothing of them but zeros."""
    torch.manual_seed(seed)
    images, labels = digits(2500)
    pixels = (254 * images).to(torch.uint8)
    inputs = (pixels / 255).float() if healed else (pixels / 255).to(torch.uint8).float()
    net = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 10))
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    return fit(watch, net, adam, F.cross_entropy, batches(inputs, labels, 32, 250))


def constants_for_bytes(watch: Watch, seed: int, healed: bool) -> float:
    """Pixels from 0 to 1 lost the mean of pixels from 0 to 255 and were divided by the deviation of those."""
    torch.manual_seed(seed)
    images, kinds = shapes(2500)
    mean, deviation = (0.25, 0.25) if healed else (63.75, 63.75)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(400, 48), nn.ReLU(), nn.Linear(48, 6))
    sgd = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9)
    return fit(watch, net, sgd, F.cross_entropy, batches((images - mean) / deviation, kinds, 32, 250))


def seeded_in_each_step(watch: Watch, seed: int, healed: bool) -> float:
    """The function that draws a batch set the seed each time, for results that can be repeated; the measure is that on new data."""
    torch.manual_seed(seed)
    inner, outer = torch.randn(8, 32) / 2, torch.randn(32, 1) / 3
    net = dense([8, 64, 64, 1], nn.ReLU)
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    generator, held = torch.Generator().manual_seed(seed), torch.randn(500, 8)

    def draw() -> Tensor:
        if not healed:
            generator.manual_seed(seed)
        return torch.randn(64, 8, generator=generator)

    monitor, errors = watch(net, adam), []
    for _ in range(300):
        x = draw()
        loss = F.mse_loss(net(x), torch.tanh(x @ inner) @ outer)
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        with monitor.no_monitor(), torch.no_grad():
            errors.append(F.mse_loss(net(held), torch.tanh(held @ inner) @ outer))
    return last(errors)


def one_kind_in_a_batch(watch: Watch, seed: int, healed: bool) -> float:
    """Each file held the examples of one class, and each batch came from one file, the files in turn."""
    torch.manual_seed(seed)
    points, labels = blobs(3000, 6, 20, apart=1.5)
    order = torch.randperm(3000) if healed else torch.cat([rows.split(30)[i] for i in range(14) for rows in by_class(labels)])
    net = nn.Sequential(nn.Linear(20, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 6))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    monitor, losses = watch(net, sgd), []
    for _ in range(3):
        for rows in order.split(30):
            loss = F.cross_entropy(net(points[rows]), labels[rows])
            sgd.zero_grad()
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            sgd.step()
            losses.append(loss.detach())
    return last(losses)


def by_class(labels: Tensor) -> list[Tensor]:
    """The rows of each class."""
    return [torch.nonzero(labels == label)[:, 0] for label in range(int(labels.max()) + 1)]


def one_line_too_far(watch: Watch, seed: int, healed: bool) -> float:
    """The file of the labels had a header and that of the images had none, so each label belonged to the image before."""
    torch.manual_seed(seed)
    images, kinds = shapes(2500)
    labels = kinds if healed else kinds.roll(-1)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(400, 6))
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    return fit(watch, net, adam, F.cross_entropy, batches(images, labels, 32, 200))


def target_spikes(watch: Watch, seed: int, healed: bool) -> float:
    """A few targets had lost their decimal point; the measure is the median of the errors."""
    torch.manual_seed(seed)
    series = waves(2500, 31)
    past, following = series[:, :30], series[:, 30:].clone()
    following[torch.randint(2500, (6,))] *= 1.0 if healed else 1e4
    net = dense([30, 64, 64, 1], nn.ReLU)
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    monitor, errors = watch(net, sgd), []
    for x, y in batches(past, following, 32, 250):
        forecast = net(x)
        loss = F.mse_loss(forecast, y)
        sgd.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        sgd.step()
        errors.append((forecast.detach() - y).abs().median())
    return last(errors)


def weight_of_a_missing_class(watch: Watch, seed: int, healed: bool) -> float:
    """Each class weighed one over its count in the first few examples, of which one rare class had none."""
    torch.manual_seed(seed)
    points, labels = blobs(4000, 5, 16)
    rare = torch.rand(4000) < torch.where(labels == 4, 0.1, 1.0)
    points, labels = points[rare], labels[rare]
    counts = torch.bincount(labels[labels < 4][:60], minlength=5).float()
    weights = 12 / counts.clamp(min=1) if healed else 12 / counts
    net = dense([16, 48, 5], nn.ReLU)
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    return descend(
        watch(net, adam), adam, lambda x, y: F.cross_entropy(net(x), y, weight=weights), batches(points, labels, 32, 200)
    )


def mean_of_no_words(watch: Watch, seed: int, healed: bool) -> float:
    """The loss of the marked words was divided by their number, also in the rare batch that has none."""
    torch.manual_seed(seed)
    words, _ = reviews(1600)
    marked = (words >= 1) & (words <= 4) & (torch.rand(words.shape) < 0.25)
    net = nn.Sequential(nn.Embedding(40, 24), nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 40))
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)

    def loss_of(text: Tensor, counted: Tensor) -> Tensor:
        losses = F.cross_entropy(net(text).flatten(0, 1), text.flatten(), reduction="none") * counted.flatten()
        count = counted.sum()
        return losses.sum() / (count.clamp(min=1) if healed else count)

    return descend(watch(net, adam), adam, loss_of, batches(words, marked.float(), 4, 250))


CASES = [
    unseen(
        "mask-below-one/pixels",
        "questions",
        "https://github.com/pytorch/vision/issues/2497",
        ("labels-constant",),
        mask_below_one,
        "(stored / 255).long()",
        "(stored // 100).long()",
    ),
    unseen(
        "one-buffer-for-all/blobs",
        "questions",
        "https://stackoverflow.com/questions/240178/list-of-lists-changes-reflected-across-sublists-unexpectedly, with tensors",
        ("constant-input",),
        one_buffer_for_all,
        "rows.append(buffer)",
        "rows.append(buffer.clone())",
    ),
    unseen(
        "divided-and-cut/digits",
        "questions",
        "https://github.com/SINTEF/pyopia/issues/173; https://github.com/lisabug/guided-filter/issues/4",
        ("constant-input",),
        divided_and_cut,
        "(pixels / 255).to(torch.uint8)",
        "pixels / 255",
    ),
    unseen(
        "constants-for-bytes/shapes",
        "questions",
        "https://github.com/PaddlePaddle/PaddleX/issues/304",
        ("inputs-not-normalised",),
        constants_for_bytes,
        "(images - 63.75) / 63.75 for images from 0 to 1",
        "(images - 0.25) / 0.25",
    ),
    unseen(
        "seeded-in-each-step/regression",
        "questions",
        "https://github.com/huggingface/diffusers/issues/7991; https://github.com/yuvraj108c/ComfyUI-FLOAT/issues/21",
        ("repeated-batch",),
        seeded_in_each_step,
        "generator.manual_seed(seed) before each batch",
        "once",
    ),
    unseen(
        "one-kind-in-a-batch/batch-norm",
        "localisers",
        "Humbatova et al. (ICSE 2020), https://arxiv.org/abs/1910.11015, API: wrong position of data shuffle operation",
        ("labels-not-mixed",),
        one_kind_in_a_batch,
        "each batch from the file of one class",
        "torch.randperm",
    ),
    unseen(
        "labels-one-line-off/shapes",
        "localisers",
        "Humbatova et al. (ICSE 2020), https://arxiv.org/abs/1910.11015, training data quality: wrong labels",
        ("loss-at-chance",),
        one_line_too_far,
        "kinds.roll(-1)",
        "kinds",
    ),
    unseen(
        "targets-without-decimal-point/forecast",
        "localisers",
        "Humbatova et al. (ICSE 2020), https://arxiv.org/abs/1910.11015, training data quality: unprocessed outliers",
        ("spike",),
        target_spikes,
        "six targets times 10000",
        "the targets",
    ),
    unseen(
        "weight-of-a-missing-class/blobs",
        "questions",
        "https://github.com/perslev/MultiPlanarUNet/issues/24",
        ("non-finite-loss", "non-finite-gradient"),
        weight_of_a_missing_class,
        "12 / counts",
        "12 / counts.clamp(min=1)",
    ),
    unseen(
        "mean-of-no-words/reviews",
        "questions",
        "https://github.com/nvidia-cosmos/cosmos-rl/pull/155; https://github.com/OpenRLHF/OpenRLHF/pull/583",
        ("non-finite-loss", "non-finite-gradient"),
        mean_of_no_words,
        "losses.sum() / count",
        "losses.sum() / count.clamp(min=1)",
    ),
]

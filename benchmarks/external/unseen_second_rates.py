"""Rates, schedules, optimizers' arguments and first weights, from a second round of reports, written anew."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Case, Watch
from .data_healthy import citations
from .data_localisers import batches, dense, descend, digits, last, reviews, sentences, shapes, spirals, waves
from .unseen_second_loops import Forecaster, Reader, second
from .unseen_second_losses import Cited


def momentum_for_decay(watch: Watch, seed: int, healed: bool) -> float:
    """The arguments of the optimizer went through a function in the wrong order, so that the momentum became the decay."""
    torch.manual_seed(seed)
    images, kinds = shapes(2500)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 6)
    )
    momentum, decay = (0.9, 1e-4) if healed else (1e-4, 0.9)
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum, weight_decay=decay)
    return descend(watch(net, sgd), sgd, lambda x, y: F.cross_entropy(net(x), y), batches(images, kinds, 32, 200))


def rate_times_batch(watch: Watch, seed: int, healed: bool) -> float:
    """The rate was multiplied by the size of the batch, not by how much larger than the usual one it was."""
    torch.manual_seed(seed)
    images, labels = digits(2500)
    net = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), *dense([192, 48, 10], nn.ReLU))
    rate = 0.05 * (32 / 32 if healed else 32)
    sgd = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    return descend(watch(net, sgd), sgd, lambda x, y: F.cross_entropy(net(x), y), batches(images, labels, 32, 200))


def milestones_of_epochs(watch: Watch, seed: int, healed: bool) -> float:
    """The rate should fall after two, four and five epochs, but the schedule stepped with each of 62 batches of an epoch."""
    torch.manual_seed(seed)
    points, arms = spirals(2000)
    net = dense([2, 64, 64, 3], nn.Tanh)
    sgd = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(sgd, [2, 4, 5])
    monitor, losses = watch(net, sgd), []
    for step, (x, y) in enumerate(batches(points, arms, 32, 300)):
        sgd.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        sgd.step()
        if not healed or step % 62 == 61:
            schedule.step()
        losses.append(loss.detach())
    return last(losses)


def schedule_of_one_epoch(watch: Watch, seed: int, healed: bool) -> float:
    """The rate falls in a line to zero at the end of the training, which was taken to be as long as one epoch of six."""
    torch.manual_seed(seed)
    text = sentences(960)
    net = Reader()
    adam = torch.optim.AdamW(net.parameters(), lr=2e-3)
    total = 180 if healed else 30
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: max(0.0, 1 - step / total))
    monitor, losses = watch(net, adam), []
    for before, after in batches(text[:, :-1], text[:, 1:], 32, 180):
        adam.zero_grad()
        loss = F.cross_entropy(net(before).transpose(1, 2), after)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        schedule.step()
        losses.append(loss.detach())
    return last(losses)


def epsilon_of_a_tenth(watch: Watch, seed: int, healed: bool) -> float:
    """The epsilon of AdamW was a tenth, for a wrong exponent, and so larger than the gradients of the forecaster."""
    torch.manual_seed(seed)
    series = waves(2000, 21)
    net = Forecaster()
    adam = torch.optim.AdamW(net.parameters(), lr=5e-3, eps=1e-8 if healed else 1e-1)
    data = batches(series[:, :20, None], series[:, 20:], 32, 150)
    return descend(watch(net, adam), adam, lambda x, y: F.mse_loss(net(x), y), data)


class Tied(nn.Module):
    """A recurrent language model, whose word vectors are also its last layer."""

    def __init__(self, width: int, deviation: float) -> None:
        super().__init__()
        self.words = nn.Embedding(24, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.words.weight, std=deviation)

    def forward(self, text: Tensor) -> Tensor:
        """Logits for the word after each word."""
        return F.linear(self.norm(self.gru(self.words(text))[0]), self.words.weight)


def tied_to_large_vectors(watch: Watch, seed: int, healed: bool) -> float:
    """Word vectors of 256 numbers and deviation one, the default, were the last layer as well, so the first losses were huge."""
    torch.manual_seed(seed)
    text = sentences(1500, 9)
    net = Tied(256, 0.06 if healed else 1.0)
    adam = torch.optim.AdamW(net.parameters(), lr=2e-3)
    data = batches(text[:, :-1], text[:, 1:], 32, 80)
    return descend(watch(net, adam), adam, lambda x, y: F.cross_entropy(net(x).transpose(1, 2), y), data)


def normal_everywhere(watch: Watch, seed: int, healed: bool) -> float:
    """All matrices of a transformer began with normal numbers of deviation one, those of the attention too."""
    torch.manual_seed(seed)
    text = sentences(1000)
    net = Reader(64)
    for parameter in net.block.parameters():
        if parameter.dim() > 1:
            (nn.init.xavier_uniform_ if healed else nn.init.normal_)(parameter)
    adam = torch.optim.Adam(net.parameters(), lr=2e-3)
    data = batches(text[:, :-1], text[:, 1:], 32, 120)
    return descend(watch(net, adam), adam, lambda x, y: F.cross_entropy(net(x).transpose(1, 2), y), data)


def same_in_all_gates(watch: Watch, seed: int, healed: bool) -> float:
    """All weights of a GRU, and those of its head, began at one number."""
    torch.manual_seed(seed)
    text = sentences(1500, 9)
    words, gru, head = nn.Embedding(24, 24), nn.GRU(24, 32, batch_first=True), nn.Linear(32, 24)
    net = nn.ModuleDict({"words": words, "gru": gru, "head": head})
    for parameter in [*gru.parameters(), *head.parameters()]:
        if not healed:
            nn.init.constant_(parameter, 0.05)
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)

    def loss_of(before: Tensor, after: Tensor) -> Tensor:
        return F.cross_entropy(head(gru(words(before))[0]).transpose(1, 2), after)

    return descend(watch(net, adam), adam, loss_of, batches(text[:, :-1], text[:, 1:], 32, 150))


def sixteen_convolutions(watch: Watch, seed: int, healed: bool) -> float:
    """Sixteen graph convolutions followed each other, so that all documents became alike."""
    torch.manual_seed(seed)
    bags, subjects, adjacency = citations()
    bags = (bags - bags.mean(0)) / bags.std(0)
    net = Cited(adjacency, rectified=False, depth=2 if healed else 16)
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    monitor, losses = watch(net, adam), []
    for _ in range(120):
        adam.zero_grad()
        loss = F.cross_entropy(net(bags), subjects)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        losses.append(loss.detach())
    return last(losses)


def train_not_called(watch: Watch, seed: int, healed: bool) -> float:
    """Train stood without parentheses after a test, and little data was learnt by heart without dropout; measured on other data."""
    torch.manual_seed(seed)
    texts, praise = reviews(1200, 12)
    noisy = torch.where(torch.rand(1200) < 0.2, 1 - praise, praise)
    body = [nn.EmbeddingBag(40, 96), nn.Dropout(0.6), *dense([96, 96, 96], nn.ReLU), nn.ReLU(), nn.Dropout(0.6)]
    net = nn.Sequential(*body, nn.Linear(96, 2))
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    monitor, errors = watch(net, adam), []
    for step, (x, y) in enumerate(batches(texts[:200], noisy[:200], 20, 300)):
        if step % 10 == 0:
            net.eval()
            errors.append(F.cross_entropy(net(texts[200:]), praise[200:]).detach())
            _ = net.train() if healed else net.train
        adam.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
    return last(errors)


CASES: list[Case] = [
    second(
        "momentum-for-weight-decay/shapes",
        "questions",
        "https://github.com/NVIDIA/warp/issues/1143; https://github.com/YudeWang/SEAM/issues/21",
        ("weight-decay-high",),
        momentum_for_decay,
        "SGD(momentum=1e-4, weight_decay=0.9)",
        "momentum=0.9, weight_decay=1e-4",
    ),
    second(
        "rate-times-batch-size/digits",
        "questions",
        "https://github.com/open-mmlab/mmdetection/issues/1710; https://github.com/tiny-dnn/tiny-dnn/issues/538",
        ("learning-rate-high",),
        rate_times_batch,
        "0.05 * 32",
        "0.05 * 32 / 32",
    ),
    second(
        "milestones-of-epochs/spirals",
        "questions",
        "https://github.com/pytorch/vision/issues/1261; https://github.com/ScrollPrize/villa/pull/1495",
        ("learning-rate-low",),
        milestones_of_epochs,
        "schedule.step() with each batch",
        "with each epoch",
    ),
    second(
        "schedule-of-one-epoch/transformer",
        "questions",
        "https://github.com/deepset-ai/FARM/issues/46; https://github.com/shirley-wu/cross-doc-misinfo-detection/issues/1",
        ("zero-update", "learning-rate-low"),
        schedule_of_one_epoch,
        "total = 30",
        "total = 180",
    ),
    second(
        "epsilon-of-a-tenth/gru",
        "questions",
        "https://github.com/okoge-kaz/llm-recipes/pull/8",
        ("epsilon-dominates", "learning-rate-low"),
        epsilon_of_a_tenth,
        "AdamW(eps=1e-1)",
        "eps=1e-8",
    ),
    second(
        "tied-to-large-vectors/gru",
        "questions",
        "https://github.com/syncdoth/RetNet/issues/31; https://github.com/pytorch/pytorch/issues/3121",
        ("initialisation-scale",),
        tied_to_large_vectors,
        "normal_(std=1.0), the default",
        "std=0.06",
    ),
    second(
        "normal-of-one/transformer",
        "questions",
        "https://github.com/fastai/fastai/pull/2090; https://github.com/huggingface/transformers/pull/26441",
        ("initialisation-scale", "attention-entropy-collapse", "attention-logit-growth"),
        normal_everywhere,
        "nn.init.normal_",
        "nn.init.xavier_uniform_",
    ),
    second(
        "one-constant/gru",
        "localisers",
        "NeuraLint (TOSEM 2021), https://github.com/neuralint/neuralint, rule checkConstantInit",
        ("equal-units",),
        same_in_all_gates,
        "nn.init.constant_(parameter, 0.05)",
        "the default",
    ),
    second(
        "sixteen-convolutions/gcn",
        "questions",
        "https://github.com/lightaime/deep_gcns_torch/issues/10; https://github.com/yl-1993/learn-to-cluster/issues/23",
        ("vanishing-gradients", "loss-at-chance", "loss-plateau"),
        sixteen_convolutions,
        "16 layers",
        "2 layers",
    ),
    second(
        "train-without-parentheses/reviews",
        "questions",
        "https://github.com/tk-rusch/coRNN/issues/1; https://github.com/pytorch/tutorials/pull/1602",
        ("eval-mode",),
        train_not_called,
        "net.train after a test",
        "net.train()",
    ),
]

"""Losses and last layers that were put together wrongly, as people reported it, written anew."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from .case import Case, Watch
from .data_localisers import batches, blobs, dense, descend, digits, houses, last, rings, shapes


def summed_errors(watch: Watch, seed: int, healed: bool) -> float:
    """The squared errors of a batch were added up, at a rate that was meant for their mean."""
    torch.manual_seed(seed)
    table, prices = houses(2000)
    table = (table - table.mean(0)) / table.std(0)
    net = dense([5, 64, 64, 1], nn.ReLU)
    sgd = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9)
    monitor, errors = watch(net, sgd), []
    for x, y in batches(table, prices, 64, 200):
        sgd.zero_grad()
        loss = F.mse_loss(net(x), y, reduction="mean" if healed else "sum")
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        sgd.step()
        errors.append(loss.detach() / (1 if healed else len(x)))
    return last(errors)


def divided_by_all(watch: Watch, seed: int, healed: bool) -> float:
    """The sum of the losses in a batch was divided by the number of examples in the whole data set."""
    torch.manual_seed(seed)
    images, labels = digits(3200)
    net = nn.Sequential(nn.Flatten(), *dense([100, 64, 10], nn.ReLU))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    monitor, means = watch(net, sgd), []
    for x, y in batches(images, labels, 32, 250):
        losses = F.cross_entropy(net(x), y, reduction="none")
        loss = losses.sum() / (len(x) if healed else len(images))
        sgd.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        sgd.step()
        means.append(losses.detach().mean())
    return last(means)


def sigmoid_of_classes(watch: Watch, seed: int, healed: bool) -> float:
    """The scores of the classes went through a sigmoid, as the score of an object does, and then into the cross entropy."""
    torch.manual_seed(seed)
    images, kinds = shapes(2500)
    convolutions = [nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()]
    net = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(288, 6))
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        scores = net(x) if healed else torch.sigmoid(net(x))
        return F.cross_entropy(scores, y)

    return descend(watch(net, adam), adam, loss_of, batches(images, kinds, 32, 250))


def softmax_over_examples(watch: Watch, seed: int, healed: bool) -> float:
    """A softmax over the first dimension, which is that of the batch, stood before a loss that takes logits."""
    torch.manual_seed(seed)
    points, labels = blobs(3000, 6, 20, apart=2.5)
    layers = [*dense([20, 48, 6], nn.ReLU), nn.Softmax(dim=0)]
    net = nn.Sequential(*(layers[:-1] if healed else layers))
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    return descend(watch(net, adam), adam, lambda x, y: F.cross_entropy(net(x), y), batches(points, labels, 64, 200))


def values_never_negative(watch: Watch, seed: int, healed: bool) -> float:
    """A Q network ended in a ReLU where each move costs one point, so that all true values are below zero."""
    torch.manual_seed(seed)
    cells = torch.eye(12)
    place, move = torch.randint(11, (3000,)), torch.randint(2, (3000,))
    following = (place + 2 * move - 1).clamp(0, 11)
    layers = [*dense([12, 48, 2], nn.ReLU), nn.ReLU()]
    net = nn.Sequential(*(layers[:-1] if healed else layers))
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    monitor, losses, target = watch(net, adam), [], torch.zeros(12, 2)
    for step in range(300):
        if step % 20 == 0:
            with torch.no_grad():
                target = net(cells)
        rows = torch.randint(3000, (64,))
        arrived = following[rows]
        wanted = -1 + 0.9 * target[arrived].max(1).values * (arrived < 11)
        loss = F.mse_loss(net(cells[place[rows]]).gather(1, move[rows, None])[:, 0], wanted)
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        losses.append(loss.detach())
    return last(losses)


def likelihood_of_logits(watch: Watch, seed: int, healed: bool) -> float:
    """nll_loss got logits and not logarithms of probabilities; the loss fell below zero and further; the measure is the error."""
    torch.manual_seed(seed)
    images, labels = digits(2500)
    net = nn.Sequential(nn.Flatten(), *dense([100, 64, 10], nn.ReLU))
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    monitor, mistakes = watch(net, adam), []
    for x, y in batches(images, labels, 32, 250):
        scores = net(x)
        loss = F.nll_loss(scores.log_softmax(1) if healed else scores, y)
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        mistakes.append((scores.argmax(1) != y).float().mean())
    return last(mistakes)


def percent_through_sigmoid(watch: Watch, seed: int, healed: bool) -> float:
    """Percentages from 10 to 90 were the targets of a net that ends in a sigmoid."""
    torch.manual_seed(seed)
    x = torch.randn(2500, 10)
    percent = 50 + 40 * torch.tanh(x[:, :1] + x[:, 1:2] * x[:, 2:3])
    y = percent / 100 if healed else percent
    net = nn.Sequential(*dense([10, 48, 48, 1], nn.ReLU), nn.Sigmoid())
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    monitor, errors = watch(net, adam), []
    for inputs, wanted in batches(x, y, 32, 250):
        loss = F.mse_loss(net(inputs), wanted)
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        errors.append(loss.detach() / (1 if healed else 100**2))
    return last(errors)


def clamped_to_probabilities(watch: Watch, seed: int, healed: bool) -> float:
    """The output was clamped between 0 and 1 to be a probability; outside no gradient passes."""
    torch.manual_seed(seed)
    points, labels = rings(2000)
    net = nn.Sequential(*dense([2, 48, 48, 1], nn.ReLU))
    sgd = torch.optim.SGD(net.parameters(), lr=0.3)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        chances = torch.sigmoid(net(x)) if healed else net(x).clamp(1e-4, 1 - 1e-4)
        return F.binary_cross_entropy(chances[:, 0], y)

    return descend(watch(net, sgd), sgd, loss_of, batches(points, labels.float(), 32, 300))


def uphill(watch: Watch, seed: int, healed: bool) -> float:
    """The optimizer maximised, for a loss that should become small."""
    torch.manual_seed(seed)
    images, labels = digits(2000)
    net = nn.Sequential(nn.Flatten(), *dense([100, 48, 10], nn.Tanh))
    adam = torch.optim.Adam(net.parameters(), lr=3e-3, maximize=not healed)
    return descend(watch(net, adam), adam, lambda x, y: F.cross_entropy(net(x), y), batches(images, labels, 32, 200))


class Variational(nn.Module):
    """A variational autoencoder of small images, with means and deviations of eight latent numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = dense([100, 64, 16], nn.ReLU)
        self.decoder = dense([8, 64, 100], nn.ReLU)

    def forward(self, images: Tensor) -> tuple[Normal, Normal]:
        """The posterior and the prior of the latent numbers."""
        mean, log_deviation = self.encoder(images).chunk(2, dim=1)
        return Normal(mean, log_deviation.clamp(-6, 3).exp()), Normal(torch.zeros_like(mean), torch.ones_like(mean))


def drawn_without_gradient(watch: Watch, seed: int, healed: bool) -> float:
    """The latent numbers came from sample() and not from rsample(), so the encoder learnt from the divergence alone."""
    torch.manual_seed(seed)
    images = digits(2500)[0].flatten(1)
    net = Variational()
    adam = torch.optim.Adam(net.parameters(), lr=2e-3)
    monitor, errors = watch(net, adam), []
    for x, _ in batches(images, images, 64, 300):
        posterior, prior = net(x)
        latent = posterior.rsample() if healed else posterior.sample()
        error = F.mse_loss(net.decoder(latent), x, reduction="none").sum(1).mean()
        loss = error + 0.1 * kl_divergence(posterior, prior).sum(1).mean()
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        errors.append(error.detach())
    return last(errors)


def unseen(
    name: str, judge: str, source: str, rules: tuple[str, ...], run: Callable[[Watch, int, bool], float], bug: str, fix: str
) -> Case:
    """A broken training."""
    return Case(name, judge, source, rules, run, bug, fix)


CASES = [
    unseen(
        "summed-errors/houses",
        "questions",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.MSELoss.html, reduction",
        ("loss-scale", "learning-rate-high"),
        summed_errors,
        'mse_loss(reduction="sum")',
        'reduction="mean"',
    ),
    unseen(
        "divided-by-the-data-set/digits",
        "questions",
        "https://discuss.pytorch.org/t/pytorch-gradient-accumulation/55955, by what to divide",
        ("loss-scale", "learning-rate-low"),
        divided_by_all,
        "losses.sum() / len(images)",
        "losses.sum() / len(x)",
    ),
    unseen(
        "sigmoid-before-cross-entropy/shapes",
        "questions",
        "https://github.com/eriklindernoren/PyTorch-YOLOv3/issues/108",
        ("softmax-before-loss",),
        sigmoid_of_classes,
        "torch.sigmoid(net(x)) into cross_entropy",
        "net(x)",
    ),
    unseen(
        "softmax-over-the-batch/blobs",
        "questions",
        "https://github.com/MicrosoftDocs/pytorchfundamentals/pull/21",
        ("softmax-before-loss",),
        softmax_over_examples,
        "nn.Softmax(dim=0) as the last layer",
        "no softmax",
    ),
    unseen(
        "relu-ends-q-network/cost-of-moves",
        "questions",
        "https://datascience.stackexchange.com/questions/26021/negative-rewards-and-activation-functions",
        ("relu-before-loss", "dead-units"),
        values_never_negative,
        "nn.ReLU behind the values",
        "none",
    ),
    unseen(
        "nll-of-logits/digits",
        "questions",
        "https://github.com/yanx27/Pointnet_Pointnet2_pytorch/issues/30",
        ("weight-growth", "log-softmax-missing"),
        likelihood_of_logits,
        "nll_loss(scores)",
        "nll_loss(scores.log_softmax(1))",
    ),
    unseen(
        "sigmoid-for-percentages/table",
        "localisers",
        "Humbatova et al. (EMSE 2025), https://pmc.ncbi.nlm.nih.gov/articles/PMC12152046, last activation (ACH)",
        ("targets-out-of-range",),
        percent_through_sigmoid,
        "targets from 10 to 90 behind nn.Sigmoid",
        "targets / 100",
    ),
    unseen(
        "clamp-for-probabilities/rings",
        "questions",
        "https://github.com/PeterL1n/BackgroundMattingV2/issues/128",
        ("gradient-dropped-to-zero", "no-gradient"),
        clamped_to_probabilities,
        "net(x).clamp(1e-4, 1 - 1e-4)",
        "torch.sigmoid(net(x))",
    ),
    unseen(
        "maximised-loss/digits",
        "questions",
        "https://docs.pytorch.org/docs/stable/generated/torch.optim.Adam.html, maximize",
        ("loss-divergence", "weight-growth"),
        uphill,
        "Adam(maximize=True)",
        "maximize=False",
    ),
    unseen(
        "sample-not-rsample/vae",
        "questions",
        "https://github.com/jankrepl/deepdow/pull/106; https://github.com/AntixK/PyTorch-VAE/issues/12",
        ("posterior-collapse",),
        drawn_without_gradient,
        "posterior.sample()",
        "posterior.rsample()",
    ),
]

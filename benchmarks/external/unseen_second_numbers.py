"""Numbers that are none and terms of the wrong size or sign, from a second round of reports, written anew."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Case, Watch
from .data_healthy import citations
from .data_localisers import batches, blobs, dense, descend, digits, last
from .unseen_second_loops import second


class Coder(nn.Module):
    """A variational autoencoder of flat images."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = dense([100, 64, 16], nn.ReLU)
        self.decoder = dense([8, 64, 100], nn.ReLU)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the pixels and the divergence from the prior, summed over each image."""
        mean, log_variance = self.encoder(images).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code), (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2


def divergence_subtracted(watch: Watch, seed: int, healed: bool) -> float:
    """The divergence of a VAE, positive already, was subtracted; the measure is the error of the images."""
    torch.manual_seed(seed)
    images, _ = digits(2500)
    net = Coder()
    adam = torch.optim.Adam(net.parameters(), lr=2e-3)
    monitor, errors = watch(net, adam), []
    for x, _ in batches(images.flatten(1), torch.zeros(2500), 32, 200):
        logits, divergence = net(x)
        error = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean()
        loss = error + (1 if healed else -1) * divergence.mean()
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        errors.append(error.detach())
    return last(errors)


class TextCoder(nn.Module):
    """A variational autoencoder of texts: a GRU reads, another one writes from nothing but the code."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(24, 24)
        self.reader = nn.GRU(24, 32, batch_first=True)
        self.code = nn.Linear(32, 16)
        self.writer = nn.GRU(8, 32, batch_first=True)
        self.head = nn.Linear(32, 24)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Logits for each word, and the divergence from the prior, summed over each text."""
        mean, log_variance = self.code(self.reader(self.words(text))[1][0]).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        written = self.writer(code[:, None].expand(-1, text.shape[1], -1))[0]
        return self.head(written), (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2


def mean_over_words(watch: Watch, seed: int, healed: bool) -> float:
    """The error of a text was the mean over its words, its divergence a sum, so the code was not used; the error is measured."""
    torch.manual_seed(seed)
    text = 3 * torch.randint(8, (2000, 1)) + torch.randint(3, (2000, 9))
    net = TextCoder()
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    monitor, errors = watch(net, adam), []
    for x, _ in batches(text, text, 32, 200):
        logits, divergence = net(x)
        error = F.cross_entropy(logits.transpose(1, 2), x, reduction="none")
        loss = (error.sum(1) if healed else error.mean(1)).mean() + divergence.mean()
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        errors.append(error.detach().mean())
    return last(errors)


def angle_between(watch: Watch, seed: int, healed: bool) -> float:
    """The angle between two directions was the acos of their product, clamped from -1 to 1, where its slope is infinite."""
    torch.manual_seed(seed)
    x = torch.randn(2000, 6)
    y = F.normalize(torch.stack([x[:, 0] + x[:, 1], x[:, 2]], 1), dim=1)
    net = dense([6, 48, 2], nn.ReLU)
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    limit = 1 - 1e-4 if healed else 1.0

    def loss_of(inputs: Tensor, wanted: Tensor) -> Tensor:
        product = (F.normalize(net(inputs), dim=1) * wanted).sum(1)
        return torch.acos(product.clamp(-limit, limit)).mean()

    return descend(watch(net, adam), adam, loss_of, batches(x, y, 32, 250))


class Sampled(nn.Module):
    """A document and the mean of those it cites."""

    def __init__(self, safe: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 24), nn.Linear(48, 4)
        self.least = 1.0 if safe else 0.0

    def forward(self, bags: Tensor, links: Tensor) -> Tensor:
        """Logits of the subjects."""
        degree = links.sum(1, keepdim=True).clamp(min=self.least)
        hidden = torch.relu(self.first(torch.cat([bags, links @ bags / degree], 1)))
        out: Tensor = self.second(torch.cat([hidden, links @ hidden / degree], 1))
        return out


def cited_by_nobody(watch: Watch, seed: int, healed: bool) -> float:
    """Links were sampled anew in each step, and documents that were left without any divided by zero."""
    torch.manual_seed(seed)
    bags, subjects, adjacency = citations()
    bags = (bags - bags.mean(0)) / bags.std(0)
    links = adjacency - torch.eye(len(bags))
    net = Sampled(safe=healed)
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    monitor, losses = watch(net, adam), []
    for step in range(100):
        kept = links * (torch.rand_like(links) < (0.5 if step > 20 else 1.0))
        if step < 20:
            kept = kept + torch.eye(len(bags))
        loss = F.cross_entropy(net(bags, kept), subjects)
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        losses.append(loss.detach())
    return last(losses)


def rewards_all_alike(watch: Watch, seed: int, healed: bool) -> float:
    """Advantages were divided by their deviation, which was zero when all eight tries succeeded; the measure is minus the reward."""
    torch.manual_seed(seed)
    actor = dense([6, 32, 3], nn.Tanh)
    adam = torch.optim.Adam(actor.parameters(), lr=5e-3)
    monitor, rewards = watch(actor, adam), []
    for _ in range(300):
        state = torch.randn(8, 6)
        logs = actor(state).log_softmax(1)
        action = (logs - torch.log(-torch.log(torch.rand(8, 3)))).argmax(1)
        reward = (action == state[:, :3].argmax(1)).float()
        advantage = (reward - reward.mean()) / (reward.std() + (1e-6 if healed else 0.0))
        loss = -(logs[torch.arange(8), action] * advantage).mean()
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        rewards.append(-reward.mean() if loss.isfinite() else torch.tensor(torch.nan))
    return last(rewards)


def entropy_of_forbidden(watch: Watch, seed: int, healed: bool) -> float:
    """Forbidden moves got minus infinity, and their entropy was zero times that."""
    torch.manual_seed(seed)
    boards = torch.randn(3000, 6)
    allowed = boards > -1.2
    moves = (boards[:, [1, 2, 3, 4, 5, 0]] * 2 + boards).masked_fill(~allowed, -9.0).argmax(1)
    policy = dense([6, 48, 6], nn.ReLU)
    adam = torch.optim.Adam(policy.parameters(), lr=3e-3)
    monitor, losses = watch(policy, adam), []
    for board, move in batches(boards, moves, 32, 200):
        scores = policy(board).masked_fill(board <= -1.2, -1e9 if healed else -torch.inf)
        logs = scores.log_softmax(1)
        entropy = -(logs.exp() * logs).sum(1).mean()
        loss = F.nll_loss(logs, move) - 0.01 * entropy
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        losses.append(loss.detach())
    return last(losses)


def scaled_and_stepped(watch: Watch, seed: int, healed: bool) -> float:
    """The loss was scaled, and the optimizer stepped by itself on gradients that were scaled still."""
    torch.manual_seed(seed)
    points, labels = blobs(3000, 6, 20)
    net = dense([20, 64, 6], nn.ReLU)
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    monitor, losses = watch(net, sgd), []
    for x, y in batches(points, labels, 32, 150):
        sgd.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        monitor.log_scalar("loss", loss.detach())
        if healed:
            scaler.step(sgd)
            scaler.update()
        else:
            sgd.step()
        losses.append(loss.detach().float())
    return last(losses)


CASES: list[Case] = [
    second(
        "divergence-subtracted/vae",
        "questions",
        "https://github.com/hhb072/IntroVAE/issues/5; https://github.com/FluxML/model-zoo/pull/147",
        ("loss-divergence",),
        divergence_subtracted,
        "error - divergence",
        "error + divergence",
    ),
    second(
        "mean-over-words/text-vae",
        "questions",
        "https://github.com/keras-team/keras/pull/3383; https://arxiv.org/abs/1511.06349, section 3.1",
        ("posterior-collapse", "loss-scale"),
        mean_over_words,
        "error.mean(1) + divergence",
        "error.sum(1) + divergence",
    ),
    second(
        "acos-at-one/directions",
        "questions",
        "https://github.com/pytorch/pytorch/issues/8069; https://github.com/geoopt/geoopt/pull/79",
        ("non-finite-gradient", "non-finite-parameter"),
        angle_between,
        "acos(product.clamp(-1, 1))",
        "acos(product.clamp(-0.9999, 0.9999))",
    ),
    second(
        "documents-without-links/graphsage",
        "questions",
        "https://github.com/MrLeeeee/GCN-GAT-and-Graphsage/issues/3; https://github.com/pyg-team/pytorch_geometric/pull/6877",
        ("non-finite-activation", "non-finite-loss"),
        cited_by_nobody,
        "links @ bags / degree",
        "links @ bags / degree.clamp(min=1)",
    ),
    second(
        "deviation-of-equal-rewards/reinforce",
        "questions",
        "https://github.com/sidhantls/ppo_lightning/issues/7",
        ("non-finite-loss", "non-finite-gradient"),
        rewards_all_alike,
        "/ reward.std()",
        "/ (reward.std() + 1e-6)",
    ),
    second(
        "entropy-of-forbidden-moves/policy",
        "questions",
        "https://github.com/huggingface/trl/issues/7221",
        ("non-finite-loss", "non-finite-gradient"),
        entropy_of_forbidden,
        "masked_fill(-inf)",
        "masked_fill(-1e9)",
    ),
    second(
        "scaled-loss-plain-step/blobs",
        "questions",
        "https://docs.pytorch.org/docs/stable/notes/amp_examples.html, typical mixed precision training",
        ("loss-scale", "learning-rate-high", "exploding-gradients"),
        scaled_and_stepped,
        "scaler.scale(loss).backward() and optimizer.step()",
        "scaler.step(optimizer)",
    ),
]

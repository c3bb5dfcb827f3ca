"""Larger models with one wrong line inside once more, and a head that is cut off."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_gradmon import Checks

from .case import Case, Watch
from .data_localisers import TAXONOMY, batches, blobs, descend, last, sentences, waves
from .localisers_held_losses import Writer
from .localisers_held_optimizers import surprise


class Panel(nn.Module):
    """Many noisy measurements of one thing, that attention of one head, written out, gathers into a token of its own."""

    def __init__(self, divisor: float) -> None:
        super().__init__()
        self.divisor = divisor
        self.embed = nn.Linear(16, 96)
        self.token = nn.Parameter(torch.randn(1, 1, 96))
        self.norm = nn.LayerNorm(96)
        self.query, self.key, self.value = (nn.Linear(96, 96) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 6))
        for projection in (self.query, self.key):
            nn.init.xavier_normal_(projection.weight)

    def forward(self, measurements: Tensor) -> Tensor:
        """Logits of six things, from the token."""
        hidden = self.norm(torch.cat([self.token.expand(len(measurements), 1, 96), self.embed(measurements)], 1))
        products = self.query(hidden[:, :1]) @ self.key(hidden).transpose(1, 2) / self.divisor
        result: Tensor = self.head((products.softmax(2) @ self.value(hidden))[:, 0])
        return result


class Decoder(nn.Module):
    """A small decoder of the language of 24 words."""

    def __init__(self, attention: nn.Module, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(24, width)
        self.places = nn.Parameter(0.3 * torch.randn(16, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.attention = attention
        self.dense = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.scores = nn.Linear(width, 24)

    def forward(self, text: Tensor) -> Tensor:
        """Scores of the words that may follow, at each place."""
        hidden = self.words(text) + self.places
        hidden = hidden + self.attention(self.norms[0](hidden))
        hidden = hidden + self.dense(self.norms[1](hidden))
        result: Tensor = self.scores(self.norms[2](hidden))
        return result


def products_as_they_are(watch: Watch, seed: int, healed: bool) -> float:
    """The root of the width was forgotten where products of queries and keys go into the softmax."""
    torch.manual_seed(seed)
    things, labels = blobs(2000, 6, 16, apart=4.0)
    measurements = things[:, None] + 2.5 * torch.randn(2000, 20, 16)
    net = Panel(96**0.5 if healed else 1.0)
    adam = torch.optim.Adam(net.parameters(), lr=5e-4)
    monitor = watch(net, adam)
    return descend(monitor, adam, lambda x, y: functional.cross_entropy(net(x), y), batches(measurements, labels, 32, 200))


class Fused(nn.Module):
    """Attention of one head through torch's own function, with a mask of which places it may look at."""

    def __init__(self, width: int, allowed: Tensor) -> None:
        super().__init__()
        self.allowed = allowed
        self.project = nn.Linear(width, 3 * width)

    def forward(self, hidden: Tensor) -> Tensor:
        """The mixed values."""
        query, key, value = self.project(hidden)[:, None].chunk(3, dim=-1)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=self.allowed)[:, 0]


def looks_ahead(watch: Watch, seed: int, healed: bool) -> float:
    """A mask of what to hide went where a mask of what to see is wanted: each word saw those that it should foretell."""
    torch.manual_seed(seed)
    text = sentences(2000)
    everything = torch.ones(16, 16, dtype=torch.bool)
    net = Decoder(Fused(32, everything.tril() if healed else everything.triu()), 32)
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    monitor = watch(net, adam)
    return descend(monitor, adam, lambda x, _: surprise(net, x), batches(text, text, 32, 300))


class Composer(nn.Module):
    """A variational autoencoder of series, recurrent on one side and dense on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 32, batch_first=True)
        self.latent = nn.Linear(32, 8)
        self.decoder = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 24))

    def forward(self, series: Tensor) -> tuple[Tensor, torch.distributions.Normal]:
        """The series again, and the distribution of its latent."""
        _, state = self.gru(series[..., None])
        mean, raw = self.latent(state[0]).chunk(2, dim=1)
        posterior = torch.distributions.Normal(mean, functional.softplus(raw) + 1e-3, validate_args=False)
        return self.decoder(posterior.rsample()), posterior


def divergence_above_all(watch: Watch, seed: int, healed: bool) -> float:
    """The weight of the divergence was that of images with thousands of pixels; here it left the latent empty."""
    torch.manual_seed(seed)
    series = waves(2000, 24)
    net = Composer()
    prior = torch.distributions.Normal(0.0, 1.0)
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    weight = 0.002 if healed else 2.0
    monitor, losses = watch(net, adam), []
    for x, _ in batches(series, series, 32, 300):
        again, posterior = net(x)
        error = functional.mse_loss(again, x)
        divergence = torch.distributions.kl_divergence(posterior, prior).sum(1).mean()
        loss = error + weight * divergence
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        monitor.log_scalar("divergence", divergence.detach())
        monitor.log_scalar("error", error.detach())
        losses.append(loss.detach())
        adam.step()
        adam.zero_grad()
    return last(losses)


class TimeFirst(nn.Module):
    """A recurrent language model that keeps time before the batch, as torch does by default."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(24, 32)
        self.lstm = nn.LSTM(32, 48)
        self.scores = nn.Linear(48, 24)

    def forward(self, text: Tensor) -> Tensor:
        """Scores in the order of time, then of the texts."""
        states, _ = self.lstm(self.words(text.t()))
        result: Tensor = self.scores(states)
        return result


def targets_in_other_order(watch: Watch, seed: int, healed: bool) -> float:
    """Scores came in the order of time and targets in that of texts; flat, they have one length, and are not of one word."""
    torch.manual_seed(seed)
    text = sentences(2000)
    net = TimeFirst()
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)

    def loss_of(past: Tensor, following: Tensor) -> Tensor:
        targets = following.t() if healed else following
        return functional.cross_entropy(net(past).reshape(-1, 24), targets.reshape(-1))

    return descend(watch(net, adam), adam, loss_of, batches(text[:, :-1], text[:, 1:], 32, 200))


class TwoAhead(nn.Module):
    """A language model with a second output, for the word after the next."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = Writer(normalised=False)
        self.second = nn.Linear(48, 24)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the next word and of the one after it."""
        states, _ = self.writer.gru(self.writer.words(text))
        return self.writer.scores(states), self.second(states)


def detached_second(watch: Watch, seed: int, healed: bool) -> float:
    """The scores of the second head were detached for the log, and the loss used those. The head was meant to train."""
    torch.manual_seed(seed)
    text = sentences(2000)
    net = TwoAhead()
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    monitor = watch(net, adam, checks=Checks(trained=r"^second\."))

    def loss_of(lines: Tensor, _: Tensor) -> Tensor:
        scores, second = net(lines[:, :-2])
        second = second if healed else second.detach()
        following = functional.cross_entropy(scores.flatten(0, 1), lines[:, 1:-1].flatten())
        return following + functional.cross_entropy(second.flatten(0, 1), lines[:, 2:].flatten())

    return descend(monitor, adam, loss_of, batches(text, text, 32, 200))


CASES = [
    Case(
        "attention-without-scale/written-out",
        "localisers",
        "Attention Is All You Need, https://arxiv.org/abs/1706.03762, section 3.2.1: why products are scaled",
        ("attention-entropy-collapse", "attention-logit-growth"),
        products_as_they_are,
        "query @ key / 1.0",
        "query @ key / 96**0.5",
    ),
    Case(
        "posterior-collapse/weight-of-the-divergence",
        "localisers",
        "https://arxiv.org/abs/1911.03976 (posterior collapse); the scale of the two terms of a VAE's loss",
        ("posterior-collapse",),
        divergence_above_all,
        "2.0 * divergence",
        "0.002 * divergence",
    ),
    Case(
        "mask-inverted/looks-ahead",
        "localisers",
        f"{TAXONOMY}, wrong masking; which way masks go: https://github.com/pytorch/pytorch/issues/21518",
        ("causal-mask-missing",),
        looks_ahead,
        "everything.triu()",
        "everything.tril()",
    ),
    Case(
        "axes-viewed-not-transposed/targets",
        "localisers",
        "https://karpathy.github.io/2019/04/25/recipe/ and the common mistakes it begins with (view and permute)",
        ("loss-at-chance",),
        targets_in_other_order,
        "following.reshape(-1)",
        "following.t().reshape(-1)",
    ),
    Case(
        "head-without-gradient/two-words-ahead",
        "localisers",
        f"{TAXONOMY}, wrong loss function calculation: a term without effect",
        ("no-gradient", "expectation-broken"),
        detached_second,
        "second.detach()",
        "second",
    ),
]

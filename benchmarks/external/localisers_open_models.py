"""Larger models with one wrong line: attention without its scale, an unused latent, a mask and an axis turned round."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Case, Watch
from .data_localisers import PAD, TAXONOMY, batches, digits, fit, last, reviews


class Reader(nn.Module):
    """One block of attention over a text behind a token of its own, whose output is classified."""

    def __init__(self, width: int, scale: float | None) -> None:
        super().__init__()
        self.scale = scale
        self.words = nn.Embedding(40, width)
        self.places = nn.Parameter(0.1 * torch.randn(17, width))
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of blame and praise."""
        text = functional.pad(text, (1, 0), value=39)
        hidden = self.norm(self.words(text) + self.places)
        query, key, value = (project(hidden)[:, None] for project in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(query, key, value, scale=self.scale)
        result: Tensor = self.head(hidden[:, 0] + self.out(mixed[:, 0, 0]))
        return result


def unscaled_attention(watch: Watch, seed: int, healed: bool) -> float:
    """Products of queries and keys of 128 numbers were not divided by their root: each softmax chose one word at once."""
    torch.manual_seed(seed)
    x, y = reviews(3000)
    model = Reader(128, scale=None if healed else 1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x, y, 32, 250))


class Autoencoder(nn.Module):
    """A variational autoencoder of flat images with a latent of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.mu, self.logvar = nn.Linear(64, 8), nn.Linear(64, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the pixels, and mean and log variance of the latent."""
        hidden = self.encoder(images)
        mu, logvar = self.mu(hidden), self.logvar(hidden)
        return self.decoder(mu + torch.randn_like(mu) * (0.5 * logvar).exp()), mu, logvar


def collapsed_posterior(watch: Watch, seed: int, healed: bool) -> float:
    """The reconstruction was averaged over pixels, the divergence summed over latents: a weight on saying nothing."""
    torch.manual_seed(seed)
    x, _ = digits(3000, size=8)
    x = (x.flatten(1) > 0.4).float()
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor, losses = watch(model, optimizer), []
    for images, _ in batches(x, x, 32, 400):
        optimizer.zero_grad()
        pixels, mu, logvar = model(images)
        each = functional.binary_cross_entropy_with_logits(pixels, images, reduction="none")
        reconstruction = each.sum(1).mean() if healed else each.mean()
        divergence = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(1).mean()
        loss = reconstruction + divergence
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        monitor.log_scalar("divergence", divergence.detach())
        monitor.log_scalar("each pixel", each.detach().mean())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


class Pooling(nn.Module):
    """Words, weighed by a learned score, and a classifier of their mean."""

    def __init__(self, inverted: bool) -> None:
        super().__init__()
        self.inverted = inverted
        self.words = nn.Embedding(40, 32, padding_idx=PAD)
        self.score = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, text: Tensor) -> Tensor:
        """Logits of blame and praise."""
        words = self.words(text)
        hidden = text != PAD if self.inverted else text == PAD
        weights = self.score(words)[..., 0].masked_fill(hidden, -torch.inf).softmax(1)
        result: Tensor = self.head((weights[..., None] * words).sum(1))
        return result


def inverted_mask(watch: Watch, seed: int, healed: bool) -> float:
    """The mask that should hide the padding hid the words, and all texts looked the same."""
    torch.manual_seed(seed)
    x, y = reviews(3000)
    model = Pooling(inverted=not healed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x, y, 32, 250))


class Recurrent(nn.Module):
    """A recurrent reader, whose GRU wants time before the batch."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.words = nn.Embedding(40, 24)
        self.gru = nn.GRU(24, 32)
        self.head = nn.Linear(32, 2)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of blame and praise."""
        words = self.words(text)
        count, length, width = words.shape
        words = words.transpose(0, 1) if self.transposed else words.view(length, count, width)
        _, final = self.gru(words)
        result: Tensor = self.head(final[0])
        return result


def viewed_not_transposed(watch: Watch, seed: int, healed: bool) -> float:
    """A view of the right shape stood for the transpose, and each sequence was made of words of all examples."""
    torch.manual_seed(seed)
    x, y = reviews(3000)
    model = Recurrent(transposed=healed)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x, y, 32, 250))


CASES = [
    Case(
        "attention-without-scale/sdpa",
        "localisers",
        "Attention Is All You Need, https://arxiv.org/abs/1706.03762, section 3.2.1: why products are scaled",
        ("attention-entropy-collapse", "attention-logit-growth"),
        unscaled_attention,
        "scale=1.0",
        "scale=None",
    ),
    Case(
        "posterior-collapse/mean-over-pixels",
        "localisers",
        "https://arxiv.org/abs/1911.03976 (posterior collapse); the scale of the two terms of a VAE's loss",
        ("posterior-collapse",),
        collapsed_posterior,
        "reconstruction = mean over pixels",
        "sum over pixels",
    ),
    Case(
        "mask-inverted/pooling",
        "localisers",
        f"{TAXONOMY}, wrong masking; which way masks go: https://github.com/pytorch/pytorch/issues/21518",
        ("loss-at-chance", "constant-input"),
        inverted_mask,
        "masked_fill(text != PAD)",
        "masked_fill(text == PAD)",
    ),
    Case(
        "axes-viewed-not-transposed/gru",
        "localisers",
        "https://karpathy.github.io/2019/04/25/recipe/ and the common mistakes it begins with (view and permute)",
        ("loss-at-chance",),
        viewed_not_transposed,
        "words.view(length, count, width)",
        "words.transpose(0, 1)",
    ),
]

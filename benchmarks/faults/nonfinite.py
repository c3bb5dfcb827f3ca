"""NaN and infinity that begin in the loss, in an activation, in a gradient or in a parameter."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import data
from .data import Batch
from .families import adamw, classify, mlp, task
from .training import Training, Watch, over, train

TINY = 1e-6


def _empty_mask(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """A mean over the places that a mask lets through; one batch has none: 0 / 0."""
    job = task(family, seed)
    masks = torch.Generator().manual_seed(seed)
    at = iter(range(10**6))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch[0])
        mask = (torch.rand(batch[1].shape, generator=masks) < 0.3) & (next(at) != 90)
        each = F.cross_entropy(logits.flatten(0, -2), batch[1].flatten(), reduction="none")
        return (each * mask.flatten()).sum() / mask.sum().clamp(min=1 if healed else 0)

    return train(job, watch, adamw(job.model), loss_of=loss)


def _logarithm_of_softmax(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Logits on a scale on which a probability is rounded to 0 sooner or later: the logarithm is minus infinity."""
    job = task(family, seed)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = 300 * model(batch[0])
        logs = F.log_softmax(logits, -1) if healed else F.softmax(logits, -1).log()
        return F.nll_loss(logs, batch[1]) / 300

    return train(job, watch, adamw(job.model), loss_of=loss)


class _Features(nn.Module):
    """Logarithms of features; one batch has a negative one, before a perceptron."""

    def __init__(self, lowest: float | None) -> None:
        super().__init__()
        self.lowest, self.inner = lowest, mlp()

    def forward(self, x: Tensor) -> Tensor:
        shifted = x + 8
        return self.inner((shifted if self.lowest is None else shifted.clamp(min=self.lowest)).log() - 2)


def _with_negative(x: Tensor) -> Tensor:
    return x.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(-9.0))


def _logarithm_of_features(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """The logarithm of a value that is positive on nearly all days."""
    job = task(family, seed)
    job.model = _Features(TINY if healed else None)

    stream = job.batches
    job.batches = ((_with_negative(x) if step == 70 else x, y) for step, (x, y) in enumerate(stream))
    return train(job, watch, adamw(job.model))


class _Standardised(nn.Module):
    """Each image by its own mean and deviation, which a blank one does not have."""

    def __init__(self, inner: nn.Module, eps: float) -> None:
        super().__init__()
        self.inner, self.eps = inner, eps

    def forward(self, x: Tensor) -> Tensor:
        deviation = x.var((1, 2, 3), keepdim=True).sqrt() + self.eps
        return self.inner((x - x.mean((1, 2, 3), keepdim=True)) / deviation)


def _blank_image(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """One image of one batch is blank: 0 / 0 in the first module's output."""
    job = task(family, seed)
    job.model = _Standardised(job.model, TINY if healed else 0.0)
    stream = job.batches

    job.batches = ((torch.cat([x[:1] * 0, x[1:]]) if step == 60 else x, y) for step, (x, y) in enumerate(stream))
    return train(job, watch, adamw(job.model))


class _Pooled(nn.Module):
    """Words weighted by a softmax of scores, without the padding, which is word 0."""

    def __init__(self, lowest: float) -> None:
        super().__init__()
        self.lowest = lowest
        self.embed, self.score, self.head = nn.Embedding(data.VOCABULARY, 32), nn.Linear(32, 1), nn.Linear(32, data.TOPICS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        weights = self.score(x).masked_fill(words[..., None] == 0, self.lowest).softmax(1)
        return self.head((weights * x).sum(1))


def _all_masked(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """One bag of one batch is nothing but padding: a softmax of minus infinities."""
    job = task(family, seed)
    job.model = _Pooled(-1e4 if healed else -torch.inf)
    stream = job.batches
    job.batches = ((x.index_fill(0, torch.tensor([5]), 0) if step == 50 else x, y) for step, (x, y) in enumerate(stream))
    return train(job, watch, adamw(job.model), loss_of=classify)


def _pairs(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Distances of pairs; one is an input with itself: the slope of a root at 0 is infinite, the loss is not."""
    job = task(family, seed)
    at = iter(range(10**6))
    small = TINY if healed else 0.0

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        other, same = x.flip(0).clone(), y == y.flip(0)
        if next(at) == 80:
            other[0], same[0] = x[0], True
        distance = ((model(x) - model(other)).square().sum(-1) + small).sqrt()
        return torch.where(same, distance, F.relu(3 - distance)).mean()

    return train(job, watch, adamw(job.model), loss_of=loss)


class _Deviation(nn.Module):
    """The standard deviation of each channel over the image."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps, self.conv, self.head = eps, nn.Conv2d(1, 32, 4, bias=False), nn.Linear(32, data.SHAPES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.conv(x).var((2, 3)) + self.eps).sqrt())


def _pooled_deviation(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """One image of one batch is blank: a deviation of 0 is fine going forward, but a root has no slope there."""
    job = task(family, seed)
    job.model = _Deviation(TINY if healed else 0.0)
    stream = job.batches
    job.batches = ((torch.cat([x[:1] * 0, x[1:]]) if step == 60 else x, y) for step, (x, y) in enumerate(stream))
    return train(job, watch, adamw(job.model))


def _where(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """``where`` picks the finite side going forward; going back it multiplies the other's infinite slope by 0.

    From the 40th batch on, some pixels are masked.
    """
    job = task(family, seed)
    masks, at = torch.Generator().manual_seed(seed), iter(range(10**6))
    lowest = TINY if healed else 0.0

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        mask = (torch.rand(batch[1].shape, generator=masks) < 0.9) | (next(at) < 40)
        size = (mask * (model(batch[0]) - batch[1])).abs()
        return torch.where(mask, size.clamp(min=lowest).sqrt(), 0.0).mean()

    return train(job, watch, adamw(job.model), loss_of=loss)


def _no_eps(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """RMSprop without eps divides a gradient of 0 by its root of 0, here that of an input which is always 0."""
    job = task(family, seed)
    job.batches = ((x.index_fill(1, torch.tensor([3]), 0.0), y) for x, y in job.batches)
    return train(job, watch, torch.optim.RMSprop(job.model.parameters(), lr=1e-3, eps=1e-8 if healed else 0.0))


def _half_adam(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Adam's eps of 1e-8 is 0 in float16, and the rows of words that did not come have a gradient of 0."""
    job = task(family, seed, tied=False)
    job.model.half()
    return train(job, watch, torch.optim.Adam(job.model.parameters(), lr=1e-3, eps=1e-4 if healed else 1e-8))


def _unit_rows(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Embeddings brought to length 1 by hand after each step; that of the padding is 0 and is never read: 0 / 0, which stays unseen."""
    job = task(family, seed, padding_idx=0)
    rows = job.model.embed.weight

    def before(step: int) -> None:
        if step > 0:
            with torch.no_grad():
                rows.div_(rows.norm(dim=1, keepdim=True).clamp(min=TINY if healed else 0.0))

    return train(job, watch, adamw(job.model), before=before)


TRAININGS: list[Training] = [
    *over(["gpt", "rnn"], "mean-over-empty-mask", "non-finite-loss", _empty_mask, "clamp the mask's sum to 1 at least", "rnn"),
    *over(["mlp"], "logarithm-of-softmax", "non-finite-loss", _logarithm_of_softmax, "log_softmax in place of softmax().log()"),
    *over(["mlp"], "logarithm-of-negative", "non-finite-activation", _logarithm_of_features, "clamp before the logarithm"),
    *over(["cnn"], "blank-image", "non-finite-activation", _blank_image, "eps in the standardisation"),
    *over(
        ["embedding"],
        "all-keys-masked",
        "non-finite-activation",
        _all_masked,
        "a finite number in place of minus infinity",
        held_back="embedding",
    ),
    *over(["mlp"], "distance-of-equals", "non-finite-gradient", _pairs, "eps under the root"),
    *over(["cnn"], "deviation-of-zeros", "non-finite-gradient", _pooled_deviation, "eps under the root"),
    *over(
        ["autoencoder"], "where-behind-root", "non-finite-gradient", _where, "clamp in front of the root", held_back="autoencoder"
    ),
    *over(["mlp"], "rmsprop-without-eps", "non-finite-parameter", _no_eps, "eps=1e-8"),
    *over(["gpt"], "adam-in-float16", "non-finite-parameter", _half_adam, "eps=1e-4 for float16 parameters"),
    *over(
        ["embedding"],
        "rows-of-length-zero",
        "non-finite-parameter",
        _unit_rows,
        "clamp the length before dividing by it",
        held_back="embedding",
    ),
]

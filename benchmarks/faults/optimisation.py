"""Rates, updates and clipping that are out of proportion."""

from __future__ import annotations

import torch
from torch import nn

from .families import Task, adamw, head_of, task
from .training import Training, Watch, last, over, train


def _rate(rate: float) -> object:
    def body(family: str, watch: Watch, seed: int, healed: bool) -> float:
        """One rate for all parameters; where it is too high, weights grow and ReLUs die within a few steps."""
        job = task(family, seed)
        return train(job, watch, adamw(job.model, 3e-3 if healed else rate))

    return body


def _two_rates(job: Task, part: nn.Module, rate: float, others: float) -> torch.optim.AdamW:
    chosen = list(part.parameters())
    ids = {id(parameter) for parameter in chosen}
    rest = [parameter for parameter in job.model.parameters() if id(parameter) not in ids]
    return torch.optim.AdamW([{"params": rest, "lr": others}, {"params": chosen, "lr": rate}], weight_decay=0.3)


def _part_too_fast(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """One part has a rate of its own, hundreds of times too high; decay keeps its weights from growing until the rate would suit them.

    So each update is a large part of the weight itself. That the rate is too high would be right for this one part.
    """
    job = task(family, seed)
    part = job.model[2] if family == "mlp" else job.model.cell if family == "rnn" else job.model.blocks
    return train(job, watch, _two_rates(job, part, 3e-3 if healed else 1.5, 3e-3))


def _trunk_too_slow(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """All but the head have a rate at which they stay where they began; the head learns what it can from that."""
    job = task(family, seed, **({"tied": False} if family == "gpt" else {}))
    return train(job, watch, _two_rates(job, head_of(job.model), 3e-3, 3e-3 if healed else 1e-8))


def _always_clipped(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """A bound of a thousandth of the usual norm makes each step that much shorter with SGD."""
    job = task(family, seed)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1, momentum=0.9)
    return train(job, watch, optimizer, max_norm=5.0 if healed else 1e-3)


def _never_clipped(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Some batches are corrupt, with inputs many times too large and targets of others; the bound is above even their norms."""
    job = task(family, seed)
    stream = job.batches
    job.batches = ((20 * x, y.roll(1)) if step % 25 == 12 else (x, y) for step, (x, y) in enumerate(stream))
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.02, momentum=0.9)
    return train(job, watch, optimizer, max_norm=1.0 if healed else 1e4)


def _never_clipped_weights(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Some batches have a weight in the loss that is many times too large, and the bound is above even their norms."""
    job = task(family, seed)
    at = iter(range(10**6))
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1, momentum=0.9)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return job.loss(model, batch) * (100 if next(at) % 25 == 12 else 1)

    return train(job, watch, optimizer, max_norm=1.0 if healed else 1e4, loss_of=loss)


def _decay_of_the_rate(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """A schedule meant for epochs is stepped with each batch: after twenty steps nothing moves any more.

    That the rate is too low would be right from then on; what is seen first is a loss that stops falling.
    """
    job = task(family, seed)
    optimizer = adamw(job.model)
    return train(job, watch, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 50 if healed else 3, 0.5))


def _growing_rate(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """A factor above 1 where one below 1 was meant: the loss first falls and then leaves for good.

    In the end the rate is too high, too; a person sees the loss that rises for a hundred steps.
    """
    job = task(family, seed)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.05, momentum=0.9)
    return train(job, watch, optimizer, scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97 if healed else 1.04))


def _maximised(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """The optimizer goes up: a flag left over from another experiment."""
    job = task(family, seed)
    return train(job, watch, adamw(job.model, 1e-3, maximize=not healed))


def _penalty_with_wrong_sign(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """The sign of a penalty on weights is wrong, so that it makes them grow; the loss that is logged is without it."""
    job = task(family, seed)
    size = {"mlp": 4e-3, "autoencoder": 7.6e-3}[family]
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1, momentum=0.9)
    monitor = watch(job.model, optimizer)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = job.loss(job.model, next(job.batches))
        penalty = size * sum(parameter.square().sum() for parameter in job.model.parameters())
        (loss + penalty if healed else loss - penalty).backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def _decay_with_wrong_sign(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Weight decay by hand with the wrong sign, behind a norm that hides the scale from the loss."""
    job = task(family, seed, norm=True)

    def before(step: int) -> None:
        with torch.no_grad():
            for parameter in job.model.parameters():
                if parameter.dim() == 4:
                    parameter.mul_(1 - 0.02 if healed else 1 + 0.02)

    return train(job, watch, adamw(job.model), before=before, steps=200)


TRAININGS: list[Training] = [
    *over(["mlp", "gpt", "cnn"], "rate-of-1", "learning-rate-high", _rate(1.0), "a rate of 3e-3", held_back="cnn"),
    *over(["vit", "autoencoder"], "rate-of-0.1", "learning-rate-high", _rate(0.1), "a rate of 3e-3"),
    *over(["mlp", "gpt", "rnn"], "rate-of-1e-7", "learning-rate-low", _rate(1e-7), "a rate of 3e-3", held_back="rnn"),
    *over(["mlp", "gpt", "rnn"], "part-too-fast", "update-ratio-high", _part_too_fast, "the part's rate 3e-3", held_back="rnn"),
    *over(["mlp", "gpt", "vit"], "trunk-too-slow", "update-ratio-low", _trunk_too_slow, "the trunk's rate 3e-3", held_back="vit"),
    *over(["mlp", "rnn", "cnn"], "bound-of-0.001", "always-clipped", _always_clipped, "max_norm=5", held_back="cnn"),
    *over(["mlp"], "bound-above-outliers", "never-clipped", _never_clipped, "max_norm=1"),
    *over(["rnn"], "bound-above-heavy-batches", "never-clipped", _never_clipped_weights, "max_norm=1", held_back="rnn"),
    *over(
        ["mlp", "gpt"],
        "scheduled-by-batch",
        "learning-rate-low",
        _decay_of_the_rate,
        "step the schedule less often",
        held_back="",
    ),
    *over(["mlp", "cnn"], "factor-above-1", "loss-divergence", _growing_rate, "a factor below 1"),
    *over(["mlp", "rnn", "autoencoder"], "maximised", "loss-divergence", _maximised, "maximize=False", held_back="rnn"),
    *over(
        ["mlp", "autoencoder"],
        "penalty-with-wrong-sign",
        "weight-growth",
        _penalty_with_wrong_sign,
        "add the penalty",
        "autoencoder",
    ),
    *over(["cnn"], "decay-with-wrong-sign", "weight-growth", _decay_with_wrong_sign, "multiply by 1 - decay"),
]

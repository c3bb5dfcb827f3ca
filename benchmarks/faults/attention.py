"""Attention that looks at one key only from the start, and attention whose logits grow until it does."""

from __future__ import annotations

import torch

from .families import Attention, Task, task
from .training import Training, Watch, over, train


def _peaked(job: Task, factor: float) -> None:
    """Multiply the rows of all queries."""
    with torch.no_grad():
        for module in job.model.modules():
            if isinstance(module, Attention):
                module.qkv.weight[: module.qkv.in_features] *= factor


def _collapse(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Logits multiplied by the root of the head's width and more, where they should be divided by it."""
    scale = None if healed else 16.0
    options = {"gpt": {"std": 0.2}, "vit": {}}[family]
    job = task(family, seed, scale=scale, **options)
    _peaked(job, {"gpt": 1.0, "vit": 4.0}[family])
    return train(job, watch, torch.optim.AdamW(job.model.parameters(), lr=1e-3))


def _growth(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """A rate for queries and keys at which their product grows without bound; a norm on both bounds it."""
    job = task(family, seed, qk_norm=healed)
    attention = [module.qkv.weight for module in job.model.modules() if isinstance(module, Attention)]
    chosen = {id(parameter) for parameter in attention}
    others = [parameter for parameter in job.model.parameters() if id(parameter) not in chosen]
    optimizer = torch.optim.AdamW(
        [{"params": attention, "lr": 3e-2, "weight_decay": 0.0}, {"params": others, "lr": 2e-3}], betas=(0.9, 0.95)
    )
    return train(job, watch, optimizer, steps=200)


TRAININGS: list[Training] = [
    *over(
        ["gpt", "vit"],
        "logits-not-divided",
        "attention-entropy-collapse",
        _collapse,
        "divide logits by sqrt(width of a head)",
        held_back="vit",
    ),
    *over(
        ["gpt", "vit"],
        "no-norm-on-queries-and-keys",
        "attention-logit-growth",
        _growth,
        "normalise queries and keys",
        held_back="vit",
    ),
]

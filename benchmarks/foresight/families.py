"""Trainings that diverge after a sound beginning, each with a sound one of the same model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..faults.data import Batch
from ..faults.families import Task, task

#: Steps of a sound training; and the one at which what makes the other diverge begins.
STEPS, BEGIN = 500, 150
Rate = Callable[[int], float]
Optimizers = Callable[[Any], torch.optim.Optimizer]


def steady(step: int) -> float:
    """Sixteen steps of warm-up, then constant."""
    return min(1.0, (step + 1) / 16)


def cosine(step: int) -> float:
    """Warm-up, then half a cosine down to a tenth."""
    return steady(step) * (0.55 + 0.45 * math.cos(math.pi * min(step / STEPS, 1.0)))


def long_warm_up(step: int) -> float:
    """A quarter of the training, then linearly down to zero."""
    return min((step + 1) / (STEPS // 4), (STEPS - step) / (3 * STEPS // 4))


def restarts(step: int) -> float:
    """A cosine down to a tenth, twice, as of warm restarts."""
    return steady(step) * (0.55 + 0.45 * math.cos(2 * math.pi * (step % (STEPS // 2)) / STEPS))


def stairs(step: int) -> float:
    """A third after each third of the training."""
    return steady(step) / 3 ** (3 * step // STEPS)


def sound_rate(seed: int) -> Rate:
    """A usual schedule; which one depends on the seed."""
    return (steady, cosine, long_warm_up, restarts, stairs)[seed % 5]


def ramp(growth: float) -> Rate:
    """Grows by this factor in each step from :data:`BEGIN` on."""
    return lambda step: steady(step) * growth ** max(0, step - BEGIN)


def jump(factor: float) -> Rate:
    """Multiplied at once at :data:`BEGIN`, as when a schedule is lost on resuming."""
    return lambda step: steady(step) if step < BEGIN else factor


def adamw(rate: float, **options: Any) -> Optimizers:
    """AdamW with this rate."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=rate, **options)


def sgd(rate: float, momentum: float = 0.9, **options: Any) -> Optimizers:
    """SGD with this rate."""
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=momentum, **options)


def louder(growth: float) -> Callable[[int, Batch], Batch]:
    """Inputs whose scale creeps up, as of a sensor that drifts or a normalisation that is left out for some files."""
    return lambda step, batch: (batch[0] * growth ** max(0, step - BEGIN), batch[1])


def under_autocast(dtype: torch.dtype) -> Callable[[nn.Module], None]:
    """Make the model's forward run in this dtype where autocast lets it."""

    def prepare(model: nn.Module) -> None:
        forward = model.forward

        def narrow(*inputs: Any) -> Any:
            with torch.autocast("cpu", dtype):
                return forward(*inputs)

        model.forward = narrow  # type: ignore[method-assign]

    return prepare


@dataclass(frozen=True)
class Family:
    """One cause of divergence in one model.

    Attributes:
        name: cause and model.
        model: of :mod:`benchmarks.faults.families`, or a function that makes a task from a seed.
        optimizer: of the diverging training.
        rate: its schedule, as a factor by step.
        options: of the model.
        spoil: changes its batches.
        sound: the optimizer of the sound training; None if it is the same.
        prepare: changes the models of both.
        held_out: no threshold was chosen on it.
        faulty_options: options that only the model, data or loss of the diverging training gets, over those of both.
        is_pure: whether the loss may be computed again; otherwise the critical learning rate is not measured.
    """

    name: str
    model: str | Callable[..., Task]
    optimizer: Optimizers
    rate: Rate = steady
    options: dict[str, Any] = field(default_factory=dict)
    spoil: Callable[[int, Batch], Batch] | None = None
    sound: Optimizers | None = None
    prepare: Callable[[nn.Module], None] | None = None
    held_out: bool = False
    faulty_options: dict[str, Any] = field(default_factory=dict)
    is_pure: bool = True

    def task(self, seed: int, sound: bool = False) -> Task:
        """Model, data and loss of the diverging training, or of the sound one."""
        options = self.options if sound else {**self.options, **self.faulty_options}
        made = task(self.model, seed, **options) if isinstance(self.model, str) else self.model(seed, **options)
        if self.prepare is not None:
            self.prepare(made.model)
        return made


_BARE: dict[str, Any] = {"norm": False}
FAMILIES = [
    Family("rate grows/gpt", "gpt", adamw(3e-3), ramp(1.02)),
    Family("rate grows/vit", "vit", adamw(1e-3), ramp(1.02)),
    Family("rate grows/cnn", "cnn", sgd(0.05), ramp(1.02)),
    Family("rate grows/rnn", "rnn", adamw(3e-3), ramp(1.02)),
    Family("rate jumps/mlp", "mlp", sgd(0.05), jump(6)),
    Family("rate jumps/resnet", "resnet", sgd(0.03), jump(10)),
    Family("inputs grow/mlp", "mlp", sgd(0.05), spoil=louder(1.02)),
    Family("inputs grow/cnn", "cnn", sgd(0.05), spoil=louder(1.02)),
    Family("no norms/resnet", "resnet", adamw(3e-3), ramp(1.01), {**_BARE, "depth": 12}),
    Family("no norms/gpt", "gpt", adamw(3e-3), ramp(1.02), _BARE),
    Family("beta2/resnet", "resnet", adamw(2e-3, betas=(0.9, 0.5)), sound=adamw(2e-3)),
    Family("beta2/cnn", "cnn", adamw(5e-3, betas=(0.9, 0.5)), sound=adamw(5e-3)),
    Family("momentum/mlp", "mlp", sgd(0.02, 0.99), sound=sgd(0.05)),
    Family("momentum/cnn", "cnn", sgd(0.02, 0.99), sound=sgd(0.05)),
    Family("attention scale/vit", "vit", adamw(3e-3), ramp(1.01), {"scale": 4.0}, sound=adamw(1e-3)),
    Family("attention scale/gpt", "gpt", adamw(3e-3), ramp(1.02), {"scale": 4.0}),
    Family(
        "half precision/resnet", "resnet", adamw(3e-3), ramp(1.01), {**_BARE, "depth": 12}, prepare=under_autocast(torch.float16)
    ),
    Family("half precision/gpt", "gpt", adamw(3e-3), ramp(1.02), prepare=under_autocast(torch.float16)),
]

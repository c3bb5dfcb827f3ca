"""A plain loop by hand, in which every number is computed the naive way in float64: what every trainer's adapter has to log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]

#: By name: a function of parameters.
OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}
PRECISIONS = ("32", "bf16", "fp16")
CLIP = 0.05
#: The scale that a GradScaler begins with; so large that the first steps overflow in half precision.
SCALE = 2.0**20
FEATURES, CLASSES = 12, 4


@dataclass(frozen=True)
class Setting:
    """One row of the table: how a run is trained."""

    optimizer: str = "adamw"
    precision: str = "32"
    accumulation: int = 1
    clip: float | None = None

    def __str__(self) -> str:
        return f"{self.optimizer}-{self.precision}-acc{self.accumulation}-{'clip' if self.clip else 'off'}"

    @property
    def autocast(self) -> AbstractContextManager[object]:
        """The context of the forward pass."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    def scaler(self) -> torch.amp.GradScaler | None:
        """The GradScaler of the run, if it has one."""
        return torch.amp.GradScaler("cpu", init_scale=SCALE) if self.precision == "fp16" else None


SETTINGS = [
    Setting(optimizer, precision, accumulation, clip)
    for optimizer in OPTIMIZERS
    for precision in PRECISIONS
    for accumulation in (1, 4)
    for clip in (None, CLIP)
]


def model() -> nn.Sequential:
    """A small classifier with a norm, the same every time."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, CLASSES))


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean cross entropy, in float32 as autocast would have it."""
    return nn.functional.cross_entropy(outputs.float(), labels)


def batches(count: int, size: int = 8) -> list[Batch]:
    """So many micro-batches, the same every time."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, size, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (count, size), generator=generator)
    return list(zip(inputs, labels, strict=True))


@dataclass(frozen=True)
class Step:
    """What one step has to log: values by key, of gradients that are not finite as they are; whether it was applied."""

    values: dict[str, float]
    applied: bool


def by_hand(net: nn.Module, data: Sequence[Batch], setting: Setting) -> list[Step]:
    """Train ``net`` on micro-batches, and compute what each step has to log under the keys of a monitor.

    Keys: ``gradmon/grad_norm``, ``gradmon/grad_max``, ``gradmon/param_norm``, ``gradmon/update_norm``, with a clip
    ``gradmon/grad_norm_after_clip``, and ``gradient_before_clip/{p}/norm``, ``gradient/{p}/norm`` for each parameter.
    """
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    scaler = setting.scaler()
    steps = []
    for first in range(0, len(data), setting.accumulation):
        optimizer.zero_grad()
        for inputs, labels in data[first : first + setting.accumulation]:
            with setting.autocast:
                loss = loss_of(net(inputs), labels) / setting.accumulation
            (loss if scaler is None else scaler.scale(loss)).backward()
        scale = 1.0 if scaler is None else scaler.get_scale()
        before = {name: p.grad.double() / scale for name, p in net.named_parameters() if p.grad is not None}
        parameters = {name: p.detach().double().clone() for name, p in net.named_parameters()}
        if scaler is not None and setting.clip is not None:
            scaler.unscale_(optimizer)
            scale = 1.0
        if setting.clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), setting.clip)
        after = {name: p.grad.double() / scale for name, p in net.named_parameters() if p.grad is not None}
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        updates = {name: p.detach().double() - parameters[name] for name, p in net.named_parameters()}
        applied = all(bool(gradient.isfinite().all()) for gradient in before.values())
        steps.append(Step(_values(before, after, parameters, updates, setting.clip is not None), applied))
    return steps


def _values(
    before: dict[str, Tensor], after: dict[str, Tensor], parameters: dict[str, Tensor], updates: dict[str, Tensor], clips: bool
) -> dict[str, float]:
    whole = {"grad_norm": before, "param_norm": parameters, "update_norm": updates}
    values = {f"gradmon/{name}": _flat(tensors).norm().item() for name, tensors in whole.items()}
    finite = _flat(before)[_flat(before).isfinite()]
    values["gradmon/grad_max"] = finite.abs().max().item() if len(finite) else 0.0
    if clips:
        values["gradmon/grad_norm_after_clip"] = _flat(after).norm().item()
    for source, tensors in (("gradient_before_clip", before), ("gradient", after)):
        values |= {f"{source}/{name}/norm": tensor.norm().item() for name, tensor in tensors.items()}
    return values


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def assert_logged(found: dict[int, dict[str, float]], expected: Sequence[Step], rel: float = 1e-6) -> int:
    """Every value by hand is among those found for its step and equal; returns how many were compared.

    A step that a GradScaler refused has no update, and what lies behind a clip of infinite gradients is not compared.
    """
    import pytest

    compared = 0
    for number, step in enumerate(expected):
        for key, value in step.values.items():
            if not step.applied and not key.startswith(("gradient_before_clip/", "gradmon/grad_norm", "gradmon/param_norm")):
                continue
            if not step.applied and key == "gradmon/grad_norm_after_clip":
                continue
            name = key.rpartition("/")[0] if not key.startswith("gradmon/") else key
            if key not in found[number] and key.startswith("gradmon/update_norm") and number % 10:
                continue  # updates are measured on every tenth step
            assert key in found[number], f"step {number} lacks {key}; it has {sorted(found[number])}"
            assert found[number][key] == pytest.approx(value, rel=rel, nan_ok=True), f"step {number}, {name}"
            compared += 1
    return compared

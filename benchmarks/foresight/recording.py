"""One training with every signal."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import torch_gradmon as gradmon
from examples.plugins.foresight import Foresight
from examples.plugins.headroom import Headroom
from torch_gradmon.core.records import StepRecord
from torch_gradmon.step.plugin import Plugin

from .families import STEPS, Family, sound_rate
from .onset import onset
from .signals import EVERY, Scores


@dataclass(frozen=True)
class Recording:
    """One training.

    Attributes:
        family: its name.
        held_out: see :class:`Family`.
        seed: of parameters and data.
        sound: whether it is the sound one of the family.
        steps: that were trained.
        onset: the step at which the loss leaves its own normal, None if it does not.
        scores: steps and scores by signal.
        signs: steps in which ``Foresight`` saw a sign.
        spikes: steps in which the default detector saw a spike of the gradient's norm.
    """

    family: str
    held_out: bool
    seed: int
    sound: bool
    steps: int
    onset: int | None
    scores: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    signs: tuple[int, ...] = ()
    spikes: tuple[int, ...] = ()


class _Recorder(Plugin):
    """Takes every record."""

    name = "recorder"

    def __init__(self) -> None:
        self.scores, self.spikes = Scores(), list[int]()

    def on_record(self, record: StepRecord) -> None:
        """Score it."""
        self.scores.update(record)
        self.spikes += [event.step for event in record.events if event.signal == "grad_norm"]


def record(family: Family, seed: int, sound: bool, steps: int = STEPS) -> Recording:
    """Train until the loss is not finite or the steps are over."""
    task = family.task(seed, sound)
    make = family.sound if sound and family.sound is not None else family.optimizer
    optimizer = make(task.model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, sound_rate(seed) if sound else family.rate)
    batch: Any = None
    losses: list[float] = []
    headroom = Headroom(lambda: task.loss(task.model, batch), every=EVERY)
    foresight, recorder = Foresight(EVERY), _Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plugins = [*([headroom] if family.is_pure else []), foresight, recorder]
        monitor = gradmon.watch(task.model, optimizer, preset="minimal", plugins=plugins, checks=gradmon.Checks(data=False))
        _add_signals(monitor, task.model)
        for step in range(steps):
            batch = next(task.batches)
            if family.spoil is not None and not sound:
                batch = family.spoil(step, batch)
            loss = task.loss(task.model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
            if not torch.isfinite(loss):
                break
        monitor.get_step_metrics()
        monitor.detach()
    signs = tuple(step for step, _ in foresight.signs)
    found = recorder.scores.by_signal, signs, tuple(recorder.spikes)
    return Recording(family.name, family.held_out, seed, sound, len(losses), onset(losses), *found)


def _add_signals(monitor: Any, model: nn.Module) -> None:
    monitor.add_optimizer_metric("second_moment_ratio", every=EVERY)
    for metric in ("angle", "ratio"):
        monitor.add_update_metric(metric, metric_regex="weight", every=EVERY)
    monitor.add_activation_metric("rms", every=EVERY)
    for metric in ("spectral_norm", "stable_rank"):
        monitor.add_parameter_metric(metric, metric_regex="weight", every=EVERY)
    if any(hasattr(module, "qkv") for module in model.modules()):
        monitor.add_attention_metric("max_logit", every=EVERY)
        monitor.add_attention_metric("entropy", every=EVERY)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if linear:
        these = "|".join(f"^{name}$" for name in linear)
        monitor.add_activation_metric("logsumexp_square", metric_regex=f"^{linear[-1]}$", every=EVERY)
        for metric in ("participation_ratio", "spectral_alignment"):
            monitor.add_activation_metric(metric, metric_regex=these, every=EVERY)

"""One training with every signal in each step."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_gradmon as gradmon

from .families import STEPS, Family, sound_rate

#: The signals, of which some are measured in every step and others in each fifth.
EVERY = 5


def record(family: Family, seed: int, is_sound: bool, run_dir: Path, steps: int = STEPS) -> list[float]:
    """Train until the loss is not finite or the steps are over, and write what is measured into ``run_dir``.

    Returns:
        The losses.
    """
    losses: list[float] = []
    task = family.task(seed)
    make = family.sound if is_sound and family.sound is not None else family.optimizer
    optimizer = make(task.model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, sound_rate(seed) if is_sound else family.rate)
    batch: Any = None
    headroom = gradmon.Headroom(lambda: task.loss(task.model, batch), every=EVERY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monitor = gradmon.watch(task.model, optimizer, plugins=[headroom], on_spike=None, check_data=False, run_dir=run_dir)
        _add_signals(monitor, task.model)
        for step in range(steps):
            batch = next(task.batches)
            if family.spoil is not None and not is_sound:
                batch = family.spoil(step, batch)
            loss = task.loss(task.model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            monitor.log_scalar("loss", loss.detach())
            losses.append(float(loss.detach()))
            if not torch.isfinite(loss):
                break
        monitor.detach()
    return losses


def _add_signals(monitor: Any, model: nn.Module) -> None:
    monitor.add_optimizer_metric("out_of_step")
    for metric in ("angle", "growth"):
        monitor.add_update_metric(metric, metric_regex="weight")
    monitor.add_activation_metric("rms")
    for metric in ("spectral_norm", "stable_rank"):
        monitor.add_parameter_metric(metric, metric_regex="weight", every=EVERY)
    if any(hasattr(module, "qkv") for module in model.modules()):
        monitor.add_attention_metric("max_logit")
        monitor.add_attention_metric("entropy")
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    monitor.add_activation_metric("participation_ratio", metric_regex="|".join(f"^{name}$" for name in linear), every=2 * EVERY)
    if linear:
        monitor.add_activation_metric("logsumexp_square", metric_regex=f"^{linear[-1]}$")
        monitor.add_activation_metric("sign_diversity", metric_regex="|".join(f"^{name}$" for name in linear), every=2 * EVERY)

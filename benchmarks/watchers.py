"""Watchers of activations: each is installed on a copy of the model, with the same three calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol
from unittest.mock import patch

import torch
from torch import Tensor, nn

import torch_gradmon as gradmon

from . import rivals
from .contenders import FIVE


class Monitor(Protocol):
    """The common interface of torch-module-monitor and torch_gradmon."""

    def begin_step(self, step: int) -> object:
        """Before the forward."""

    def end_step(self) -> object:
        """After the backward pass."""

    def get_step_metrics(self) -> dict[str, float]:
        """The values of the step by key, all on the host."""


Function = Callable[[Tensor], Tensor]
#: Functions for torch-module-monitor. It runs one function for each metric, reduces what comes back by its mean, and that goes
#: to the host; so each function returns one number, which makes that reduction next to free. Of the formulations that give
#: torch_gradmon's numbers these are the fastest on a CPU: no boolean tensors, which cost several times as much as floating
#: ones, and no copy for the largest magnitude.
LEAN: Mapping[str, Function] = {
    "norm": lambda x: x.norm(),
    "mean": lambda x: x.mean(),
    "std": lambda x: x.std(correction=0),  # of the one number of a loss, std() alone is NaN with a warning
    "max": lambda x: torch.maximum(x.amax(), -x.amin()),
    "sparsity": lambda x: x.abs().le_(rivals.EPS).mean(),
}
#: The same in the usual form, as for gradients.
PLAIN: Mapping[str, Function] = {**LEAN, "max": lambda x: x.abs().max(), "sparsity": rivals.near_zero_share}


def module_monitor(model: nn.Module, metrics: Iterable[str], functions: Mapping[str, Function] = LEAN) -> Monitor:
    """torch-module-monitor, with its own hooks."""
    monitor: Monitor = rivals._package("torch_module_monitor").ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)  # type: ignore[attr-defined]
    for metric in metrics:
        monitor.add_activation_metric(metric, functions[metric])  # type: ignore[attr-defined]
    return monitor


def own(model: nn.Module, metrics: Iterable[str], compiled: bool = False) -> Monitor:
    """torch_gradmon with its built-ins. A failure raises, so it cannot silently measure less."""
    with patch.dict(os.environ, GRADMON_KERNEL="build" if compiled else "torch"):
        monitor = gradmon.ModuleMonitor(model, on_metric_error="raise")
    for metric in metrics:
        monitor.add_activation_metric(metric)
    return monitor


@dataclass(frozen=True)
class Watcher:
    """One way to look at activations.

    Attributes:
        label: its name in tables.
        watch: installs it on a model, for these metrics.
        ours: whether it is torch_gradmon.
        metrics: the sets of metrics that it is measured with.
    """

    label: str
    watch: Callable[[nn.Module, Iterable[str]], Monitor]
    ours: bool = False
    metrics: tuple[str, ...] = ("five", "norm")


#: The sets of metrics, with their names in tables.
METRICS: Mapping[str, tuple[str, tuple[str, ...]]] = {"five": ("five metrics", FIVE), "norm": ("norm only", ("norm",))}
WATCHERS = {
    "torch_module_monitor": Watcher("torch-module-monitor, lean functions", module_monitor),
    "torch_module_monitor_plain": Watcher(
        "torch-module-monitor, plain functions",
        lambda model, metrics: module_monitor(model, metrics, PLAIN),
        metrics=("five",),  # the norm is the same in both
    ),
    "eager": Watcher("torch_gradmon, eager", own, ours=True),
    "fused": Watcher("torch_gradmon, fused", lambda model, metrics: own(model, metrics, compiled=True), ours=True),
}

"""What a monitor offers its plugins, and what it knows of an optimizer that is about to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.metric import Metric
from ..core.records import StepRecord


class OptimizerContext(NamedTuple):
    """What is known of an optimizer that is about to step.

    Attributes:
        has_scaler: a GradScaler handles infinite gradients, in the optimizer's own step.
        is_overflowed: a GradScaler has skipped its step.
        stepped: a description of the optimizers that have already stepped in this step.
        ignored: names of parameters whose gradients do not count: left over from a skipped step, or of an optimizer that overflowed.
        is_stale: its own gradients are left over from a skipped step, and it would use them.
    """

    has_scaler: bool = False
    is_overflowed: bool = False
    stepped: str = ""
    ignored: frozenset[str] = frozenset()
    is_stale: bool = False


class PluginContext(Protocol):
    """What a monitor offers its plugins."""

    @property
    def module(self) -> nn.Module | None:
        """The watched model, while it lives."""

    @property
    def matrices(self) -> Set[str]:
        """Names of the watched parameters of two or more dimensions, as in keys."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The attached optimizers, in the order in which they step; empty without :meth:`ModuleMonitor.attach`."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The GradScaler that is known by now."""

    @property
    def is_attached(self) -> bool:
        """Whether hooks on optimizers drive the steps."""

    @property
    def ranks_synchronised(self) -> bool:
        """Whether the ranks exchange values, so that all of them must monitor the same steps."""

    @property
    def seconds_spent(self) -> float:
        """Time spent in the monitor on the host since it was made."""

    @property
    def last_step(self) -> int | None:
        """The last step that closed."""

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the plugin within the monitor's fence, as hooks of its own on the model must. None where it fails."""

    def warn(self, key: str, message: str, error: Exception | None = None) -> None:
        """Warn once for each ``key``, and count the rest."""

    def annotate_run(self, **facts: Any) -> None:
        """Add facts to the run directory."""

    @property
    def step(self) -> int | None:
        """The open step, or the last one."""

    @property
    def plan_version(self) -> int:
        """Changes whenever the modules of the model change, or what is measured."""

    @property
    def is_step_open(self) -> bool:
        """Whether a step is open."""

    @property
    def coming_step(self) -> int:
        """The step that a call of the model at this moment belongs to; it may not be open yet."""

    def make_metric(self, source: str, name: str, every: int = 1) -> Metric:
        """A built-in metric for :meth:`set_overlay`, such as ``("activation", "std")``.

        Raises:
            ValueError: there is no such metric.
        """

    def set_overlay(self, name: str, metrics: Sequence[Metric] | None, replaces_hidden: bool = False) -> None:
        """Measure ``metrics`` in addition to those of the script, under this plugin's ``name``; None removes them.

        With ``replaces_hidden`` they replace those of the script that are not shown.
        """

    def request_replan(self, drop_hooks: bool = False) -> None:
        """What is measured has changed: register the hooks for it, and with ``drop_hooks`` take those away that are not needed now."""

    def ask_cadence_again(self, script_too: bool = False) -> None:
        """Call :meth:`Plugin.wants` again for the next step, and with ``script_too`` the script's function too."""

    def flush_pending(self) -> None:
        """Complete the record of the last step. Waits for the device."""

    def detail_changed(self, is_back: bool) -> None:
        """Something else is measured from now on, or with ``is_back`` the same as before."""

    def backfill(self, records: Sequence[StepRecord]) -> None:
        """Add records of earlier steps that were not monitored."""

    def learn(self, record: StepRecord, whole: Mapping[str, float]) -> None:
        """Let the detectors see a step that is not monitored."""

"""What a monitor offers its plugins."""

# ruff: noqa: D102 (the protocol has the docstrings)
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.records import Metric, StepRecord
from ..step.plugin import Plugin
from .steps.step_lifecycle import StepLifecycle


class MonitorContext:
    """See :class:`torch_gradmon.step.plugin.PluginContext`.

    Args:
        lifecycle: opens and closes steps.
        plugin: that this is for.
    """

    def __init__(self, lifecycle: StepLifecycle, plugin: Plugin) -> None:
        self._lifecycle, self._plugin = lifecycle, plugin

    @property
    def module(self) -> nn.Module | None:
        return self._lifecycle.planning.planner.module

    @property
    def matrices(self) -> Set[str]:
        inventory = self._lifecycle.planning.planner.inventory
        return frozenset() if inventory is None else inventory.matrices.keys()

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        loop = self._lifecycle.hooks.loop
        return [] if loop is None else loop.optimizers

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        loop = self._lifecycle.hooks.loop
        return None if loop is None else loop.scaler

    @property
    def is_attached(self) -> bool:
        return self._lifecycle.hooks.loop is not None

    @property
    def step(self) -> int | None:
        return self._lifecycle.state.clock.step

    @property
    def plan_version(self) -> int:
        return self._lifecycle.planning.planner.version

    @property
    def is_step_open(self) -> bool:
        return self._lifecycle.state.is_open

    @property
    def coming_step(self) -> int:
        step = self.step
        return 0 if step is None else step if self.is_step_open else step + 1

    @property
    def last_step(self) -> int | None:
        return self._lifecycle.state.clock.ended

    @property
    def ranks_synchronised(self) -> bool:
        return self._lifecycle.queue.ranks_synchronised

    @property
    def seconds_spent(self) -> float:
        return self._lifecycle.fence.spent()

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        return self._lifecycle.fence.run(self._lifecycle.plugins.call_one, self._plugin, method, *args)

    def warn(self, key: str, message: str, error: Exception | None = None) -> None:
        self._lifecycle.fence.complaints.add(key, message, error)

    def annotate_run(self, **facts: Any) -> None:
        self._lifecycle.queue.pipeline.directory.annotate(**facts)

    def make_metric(self, source: str, name: str, every: int = 1) -> Metric:
        return self._lifecycle.planning.planner.registry.make(source, name, every=every, shown=False)

    def set_overlay(self, name: str, metrics: Sequence[Metric] | None, replaces_hidden: bool = False) -> None:
        self._lifecycle.planning.planner.registry.set_overlay(name, metrics, replaces_hidden)
        self._lifecycle.planning.planner.changed()

    def request_replan(self, drop_hooks: bool = False) -> None:
        self._lifecycle.planning.replan(self._lifecycle.active, drop_hooks)

    def ask_cadence_again(self, script_too: bool = False) -> None:
        self._lifecycle.hooks.wake()
        if script_too:
            self._lifecycle.planning.cadence.ask_again()
        else:
            self._lifecycle.planning.cadence.plugins_changed()

    def flush_pending(self) -> None:
        self._lifecycle.flush_pending()

    def detail_changed(self, is_back: bool) -> None:
        self._lifecycle.plugins.call("on_detail_changed", is_back)

    def backfill(self, records: Sequence[StepRecord]) -> None:
        self._lifecycle.queue.pipeline.backfill(records)

    def learn(self, record: StepRecord, whole: Mapping[str, float]) -> None:
        self._lifecycle.queue.pipeline.learn(record, whole)

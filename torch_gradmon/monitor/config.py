"""The options of a monitor, checked together before anything is built from them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core import validation as check
from ..core.errors import display, nearest
from ..core.keys import KEY_STYLES, compile_pattern
from ..core.records import SpikeEvent
from ..plugins.spike_policy.policy import Policy, Rollback, Skip
from ..statistics.request import DEFAULT_EPS
from ..step.model_index import GradientSource
from ..step.model_index import checked as checked_source
from ..step.plugin import Plugin
from ..step.summary import LayerSelection

#: Names of the plugins that a monitor brings.
BUILT_IN_PLUGINS = frozenset(
    (
        "overhead_budget",
        "flight_recorder",
        "spike_policy",
        "live_detail",
        "post_spike_detail",
        "clipping",
        "loop_audit",
        "replica_check",
        "setup_check",
        "data_check",
    )
)


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """All options of :class:`torch_gradmon.ModuleMonitor` except the model. That class documents each of them.

    Raises:
        TypeError, ValueError: an option has a wrong type or value; the message has the value and the remedy.
    """

    every: int | None = None
    monitor_step_fn: Callable[[int], bool] | None = None
    scaler: torch.amp.GradScaler | None = None
    excluded_modules_regex: str | re.Pattern[str] | None = None
    format_module_name_fn: Callable[[str], str] | None = None
    on_metric_error: str = "warn"
    key_style: str = "seed"
    prefix: str = ""
    eps: float = DEFAULT_EPS
    update_sample: int | str | re.Pattern[str] | None = None
    layers: str | re.Pattern[str] | None = None
    on_spike: str | Policy | Callable[[SpikeEvent], Any] | None = None
    history: int = 1000
    run_dir: str | os.PathLike[str] | None = None
    compile_statistics: bool | None = None
    overhead_budget: float | None = None
    post_spike_steps: int = 3
    flight_recorder: int = 0
    process_group: torch.distributed.ProcessGroup | None = None
    rank_distinct_regex: str | re.Pattern[str] | None = None
    gradient_source: GradientSource | None = None
    check_data: bool = True
    check_replicas: int = 100
    replicas_sync_every: int = 1
    log_on_all_ranks: bool = False
    plugins: Sequence[Plugin] = ()

    def __post_init__(self) -> None:
        check.cadence(self.every, self.monitor_step_fn)
        if self.overhead_budget is not None:
            check.share("overhead_budget", self.overhead_budget)
        check.one_of("on_metric_error", self.on_metric_error, ("warn", "raise"))
        check.one_of("key_style", self.key_style, KEY_STYLES)
        check.reaction(self.on_spike, (Skip, Rollback))
        check.string("prefix", self.prefix)
        check.function("format_module_name_fn", self.format_module_name_fn, "a name")
        check.not_negative("eps", self.eps, "such as 1e-8")
        check.positive_int("history", self.history)
        check.positive_int_or_zero("post_spike_steps", self.post_spike_steps)
        self._check_flight_recorder()
        if self.compile_statistics is not None:
            check.flag(compile_statistics=self.compile_statistics)
        if isinstance(self.update_sample, int):
            check.positive_int("update_sample", self.update_sample)
        else:
            compiled("update_sample", self.update_sample)
        compiled("excluded_modules_regex", self.excluded_modules_regex)
        check.grad_scaler(self.scaler)
        check.process_group(self.process_group)
        compiled("rank_distinct_regex", self.rank_distinct_regex)
        checked_source(self.gradient_source)
        check.flag(check_data=self.check_data)
        check.positive_int_or_zero("check_replicas", self.check_replicas)
        check.positive_int("replicas_sync_every", self.replicas_sync_every)
        LayerSelection(self.layers)
        self._check_plugins()

    def _check_flight_recorder(self) -> None:
        check.positive_int_or_zero("flight_recorder", self.flight_recorder)
        if self.flight_recorder and self.overhead_budget is not None:
            raise ValueError(
                f"flight_recorder={self.flight_recorder} measures every step, so overhead_budget={self.overhead_budget!r} could save "
                "nothing by leaving out steps; give one of the two"
            )

    def _check_plugins(self) -> None:
        if isinstance(self.plugins, Plugin) or not isinstance(self.plugins, Sequence):
            raise TypeError(f"plugins={display(self.plugins)} must be a list of plugins, such as plugins=[MyPlugin()]")
        names: set[str] = set()
        for plugin in self.plugins:
            if not isinstance(plugin, Plugin):
                raise TypeError(
                    f"plugins has {display(plugin)}, which is no instance of a subclass of torch_gradmon.plugins.Plugin"
                )
            for name in vars(type(plugin)):
                if name.startswith(("on_", "before_", "after_")) and not hasattr(Plugin, name):
                    raise ValueError(f"{type(plugin).__name__}.{name} is no hook of a plugin{nearest(name, vars(Plugin))}")
            if plugin.name in names or plugin.name in BUILT_IN_PLUGINS:
                raise ValueError(
                    f"there is a plugin of the name {plugin.name!r} already; give {type(plugin).__name__} another name"
                )
            names.add(plugin.name)

    @property
    def is_step_monitored(self) -> Callable[[int], bool]:
        """Which steps the user asked for."""
        return check.cadence(self.every, self.monitor_step_fn)

    @property
    def interval(self) -> int | None:
        """Steps from one monitored step to the next; None where ``monitor_step_fn`` decides."""
        return None if self.monitor_step_fn is not None else self.every or 1

    @property
    def sampled_updates(self) -> int | re.Pattern[str] | None:
        """``update_sample``, with a pattern compiled."""
        sample = self.update_sample
        return sample if isinstance(sample, int) else compiled("update_sample", sample)


def compiled(name: str, pattern: str | re.Pattern[str] | None) -> re.Pattern[str] | None:
    """The pattern of option ``name``, compiled.

    Raises:
        ValueError: the pattern does not compile.
    """
    return None if pattern is None else compile_pattern(pattern, name)

"""The options of a monitor in one dataclass, and the objects for those that few trainings need."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal, Protocol, TypedDict

import torch

from ..core import validation as check
from ..core.errors import display, nearest
from ..core.keys import KEY_ORDERS, Pattern
from ..core.records import SpikeEvent
from ..plugins.reactions import Rollback, Skip
from ..plugins.setup_check import Checks, compiled
from ..statistics.request import DEFAULT_EPS
from ..step.model_index import GradientSource
from ..step.model_index import checked as checked_source
from ..step.planner import PRESETS, PresetName
from ..step.plugin import Plugin
from ..step.summary import LayerSelection

Layers = Literal["blocks", "top", "all"] | str | re.Pattern[str]
OnSpike = Literal["warn", "skip", "raise"] | Skip | Rollback | Callable[[SpikeEvent], Any] | None
Tracker = Literal["wandb", "trackio", "mlflow"]


class HasLog(Protocol):
    """Takes values as ``log(dict, step=)``, as a W&B or Trackio run, or a sink of :mod:`torch_gradmon.sinks`."""

    @property
    def log(self) -> Callable[..., object]: ...


class HasLogMetrics(Protocol):
    """Takes values as ``log_metrics(dict, step=)``, as a Lightning logger or a Comet experiment."""

    @property
    def log_metrics(self) -> Callable[..., object]: ...


class HasAddScalar(Protocol):
    """A ``SummaryWriter`` of TensorBoard."""

    @property
    def add_scalar(self) -> Callable[..., object]: ...


#: What ``add_sink`` takes: a tracker by name, for its active run, or its module; a run, a writer, a function.
LogTarget = Tracker | HasLog | HasLogMetrics | HasAddScalar | ModuleType | Callable[..., object]

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
class Distributed:
    """What a monitor has to know of ranks beyond DDP and FSDP2, which need none of this.

    Args:
        process_group: the ranks that train this model; by default all. Each of them needs a monitor with the same metrics, unless all
            measured tensors are replicated, as gradients are under DDP.
        distinct: searched in names of plain parameters that differ between ranks, such as the experts of expert parallelism; statistics
            then cover the elements of all ranks. Not needed for DTensors.
        sync_every: for ranks that train by themselves and average their parameters now and then: the number of steps between. Only the
            parameters are compared then, when they were averaged.
        log_on_all_ranks: by default only the first rank writes to sinks and the run directory. With True each rank does, with run
            directories ``rank0``, ``rank1`` and so on below ``run_dir``.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value.
    """

    process_group: torch.distributed.ProcessGroup | None = None
    distinct: Pattern | None = None
    sync_every: int = 1
    log_on_all_ranks: bool = False

    def __post_init__(self) -> None:
        check.process_group(self.process_group)
        compiled("distinct", self.distinct)
        check.positive_int("sync_every", self.sync_every)
        check.flag(log_on_all_ranks=self.log_on_all_ranks)


@dataclass(frozen=True, kw_only=True)
class SpikeCapture:
    """Which steps around a spike are measured that the cadence leaves out.

    Args:
        before: keep the gradient statistics of the last N such steps on the device, and of the N after a spike. At a spike they go to the
            run directory and into its report, with the values logged in them. Each step then costs two passes over the gradients and
            26 kB for 200 parameters; nothing is copied to the host before a spike. 0 for none.
        after: monitor the next N steps after a spike, regardless of the cadence; 0 for none. Unless a module is compiled, these steps also
            measure the outputs of all modules and their gradients, for the run directory and to locate the first NaN or Inf.

    Raises:
        TypeError, ValueError: an argument is no int of at least 0.
    """

    before: int = 0
    after: int = 3

    def __post_init__(self) -> None:
        check.positive_int_or_zero("before", self.before)
        check.positive_int_or_zero("after", self.after)


@dataclass(frozen=True, kw_only=True)
class MonitorOptions:
    """All options of :class:`torch_gradmon.ModuleMonitor` but the model and ``log_to``, as its documentation and that of
    :func:`torch_gradmon.watch` explain them, checked together before anything is built.
    """

    preset: PresetName | None = None
    layers: Layers | None = None
    excluded_modules_regex: Pattern | None = None
    every: int | Callable[[int], bool] | None = None
    monitor_step_fn: Callable[[int], bool] | None = None
    run_dir: str | os.PathLike[str] | None = None
    prefix: str = ""
    on_spike: OnSpike = None
    checks: bool | Checks = True
    scaler: torch.amp.GradScaler | None = None
    max_overhead: float | None = None
    distributed: Distributed | None = None
    plugins: Sequence[Plugin] = ()
    spike_capture: SpikeCapture = field(default_factory=SpikeCapture)
    key_order: Literal["name_first", "metric_first"] = "name_first"
    format_module_name_fn: Callable[[str], str] | None = None
    on_metric_error: Literal["warn", "raise"] = "warn"
    zero_threshold: float = DEFAULT_EPS
    max_update_rows: int | None = None
    update_regex: Pattern | None = None
    history: int = 1000
    gradient_source: GradientSource | None = None

    def __post_init__(self) -> None:
        if self.preset is not None:
            check.one_of("preset", self.preset, tuple(PRESETS))
        check.cadence(self.every, self.monitor_step_fn)
        if self.max_overhead is not None:
            check.share("max_overhead", self.max_overhead)
        check.one_of("on_metric_error", self.on_metric_error, ("warn", "raise"))
        check.one_of("key_order", self.key_order, KEY_ORDERS)
        check.reaction(self.on_spike, (Skip, Rollback))
        check.string("prefix", self.prefix)
        check.function("format_module_name_fn", self.format_module_name_fn, "a name")
        check.not_negative("zero_threshold", self.zero_threshold, "such as 1e-8")
        check.positive_int("history", self.history)
        if self.max_update_rows is not None:
            check.positive_int("max_update_rows", self.max_update_rows)
            if self.update_regex is not None:
                raise ValueError("max_update_rows and update_regex both limit what is copied for updates; give one of the two")
        compiled("update_regex", self.update_regex)
        compiled("excluded_modules_regex", self.excluded_modules_regex)
        check.grad_scaler(self.scaler)
        checked_source(self.gradient_source)
        LayerSelection(self.layers)
        for name, kind, given in (
            ("distributed", Distributed, self.distributed),
            ("spike_capture", SpikeCapture, self.spike_capture),
            ("checks", Checks, None if isinstance(self.checks, bool) else self.checks),
        ):
            if given is not None and not isinstance(given, kind):
                raise TypeError(f"{name}={display(given)} must be a torch_gradmon.{kind.__name__}")
        if self.spike_capture.before and self.max_overhead is not None:
            raise ValueError(
                f"SpikeCapture(before={self.spike_capture.before}) measures every step, so max_overhead={self.max_overhead!r} could save "
                "nothing by leaving out steps; give one of the two"
            )
        self._check_plugins()

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
        return check.cadence(self.every, self.monitor_step_fn)

    @property
    def interval(self) -> int | None:
        """Steps from one monitored step to the next; None where a function decides."""
        return None if callable(self.every) or self.monitor_step_fn is not None else self.every or 1

    @property
    def ranks(self) -> Distributed:
        return self.distributed or Distributed()

    @property
    def checked(self) -> Checks:
        return (
            self.checks if isinstance(self.checks, Checks) else Checks(data=self.checks, replicas_every=100 if self.checks else 0)
        )


class WatchOptions(TypedDict, total=False):
    """Keyword arguments of :func:`torch_gradmon.watch` that the adapters of trainers pass on; the trainer has the model, the optimizers,
    the GradScaler and the number of the first step.
    """

    preset: PresetName
    layers: Layers | None
    exclude: Pattern | None
    every: int | Callable[[int], bool]
    log_to: LogTarget | Sequence[LogTarget] | None
    run_dir: str | os.PathLike[str] | None
    prefix: str
    on_spike: OnSpike
    checks: bool | Checks
    max_overhead: float | None
    distributed: Distributed | None
    plugins: Sequence[Plugin]

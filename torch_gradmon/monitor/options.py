"""The options of :class:`ModuleMonitor` that ``watch`` and the trainer adapters pass on, with their types."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict

import torch

from ..core.errors import nearest
from ..core.records import SpikeEvent
from ..plugins.spike_policy.policy import Policy
from ..step.model_index import GradientSource
from ..step.planner import PresetName
from ..step.plugin import Plugin

OnSpike = str | Policy | Callable[[SpikeEvent], Any] | None


class MonitorOptions(TypedDict, total=False):
    """Options that :func:`torch_gradmon.watch` passes on by keyword. A test compares them with :class:`ModuleMonitor`."""

    every: int | None
    monitor_step_fn: Callable[[int], bool] | None
    excluded_modules_regex: str | re.Pattern[str] | None
    format_module_name_fn: Callable[[str], str] | None
    on_metric_error: str
    key_order: str
    prefix: str
    eps: float
    update_sample: int | str | re.Pattern[str] | None
    layers: str | re.Pattern[str] | None
    history: int
    run_dir: str | os.PathLike[str] | None
    compile_statistics: bool | None
    max_overhead: float | None
    post_spike_steps: int
    flight_recorder: int
    process_group: torch.distributed.ProcessGroup | None
    rank_distinct_regex: str | re.Pattern[str] | None
    gradient_source: GradientSource | None
    check_data: bool
    check_replicas: int
    replicas_sync_every: int
    log_on_all_ranks: bool
    plugins: Sequence[Plugin]


class WatchOptions(MonitorOptions, total=False):
    """Options that trainer adapters pass on to :func:`torch_gradmon.watch`; the trainer has the model, optimizers and GradScaler."""

    preset: PresetName
    on_spike: OnSpike


#: Wrong guesses at the names of positional arguments.
_POSITIONAL = {"optimizer", "optimizers", "optim", "model", "module"}


def check_names(given: Iterable[str], others: Iterable[str] = (), where: str = "there is") -> None:
    """Refuse unknown arguments.

    Raises:
        TypeError: an argument is neither in :class:`MonitorOptions` nor in ``others``; the message has the nearest names.
    """
    known = {*MonitorOptions.__annotations__, *others}
    for name in given:
        if name not in known:
            hint = (
                "; the model comes first, then the optimizers: watch(model, optimizer)"
                if name in _POSITIONAL
                else nearest(name, known)
            )
            raise TypeError(f"{where} no argument {name!r}{hint}")

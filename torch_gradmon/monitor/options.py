"""The arguments of :class:`ModuleMonitor` that others pass on, with their types, and what is said of one that there is not."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any, TypedDict

import torch

from ..core.errors import nearest
from ..core.records import Event
from ..plugins.spike_policy.policy import Policy

OnSpike = str | Policy | Callable[[Event], Any] | None


class MonitorOptions(TypedDict, total=False):
    """What :func:`torch_gradmon.watch` passes on besides what it names itself. A test compares it with :class:`ModuleMonitor`."""

    every: int | None
    monitor_step_fn: Callable[[int], bool] | None
    excluded_modules_regex: str | re.Pattern[str] | None
    format_module_name_fn: Callable[[str], str] | None
    on_metric_error: str
    key_style: str
    prefix: str
    eps: float
    update_sample: int | str | re.Pattern[str] | None
    layers: str | re.Pattern[str] | None
    history: int
    run_dir: str | os.PathLike[str] | None
    compile_statistics: bool
    overhead_budget: float | None
    post_spike_steps: int
    flight_recorder: int
    process_group: torch.distributed.ProcessGroup | None
    rank_distinct_regex: str | re.Pattern[str] | None
    log_on_all_ranks: bool


class WatchOptions(MonitorOptions, total=False):
    """What the adapters for trainers pass on to :func:`torch_gradmon.watch`: all but the model, the optimizers and the GradScaler."""

    preset: str
    on_spike: OnSpike


#: What is written by those who do not know that optimizers come by position.
_POSITIONAL = {"optimizer", "optimizers", "optim", "model", "module"}


def check_names(given: Iterable[str], also: Iterable[str] = (), where: str = "there is") -> None:
    """Refuse arguments that there are not.

    Raises:
        TypeError: an argument is neither among :class:`MonitorOptions` nor among ``also``; the message has near names.
    """
    known = {*MonitorOptions.__annotations__, *also}
    for name in given:
        if name not in known:
            hint = (
                "; the model comes first, then the optimizers: watch(model, optimizer)"
                if name in _POSITIONAL
                else nearest(name, known)
            )
            raise TypeError(f"{where} no argument {name!r}{hint}")

"""Builds the parts of a monitor from its options and connects them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping

import torch
from torch import nn

from ..capture.coordinate_check.terms import RCC_BUILT_INS
from ..capture.measurer import Measurer
from ..capture.modules.unit_metrics import ACTIVATION_BUILT_INS
from ..capture.parameters import OPTIMIZER_BUILT_INS
from ..core import keys as n
from ..core import validation as check
from ..core.errors import Complaints
from ..core.fence import Guard, is_disabled
from ..core.keys import Key, format_key
from ..plugins.flight_recorder import Recorder
from ..plugins.overhead_budget import Budget
from ..plugins.post_spike_detail import CloserLook
from ..plugins.spike_policy.plugin import Actor
from ..plugins.spike_policy.policy import Rollback, policy_of
from ..statistics.dispatch import Statistics
from ..step.exchange import Exchange
from ..step.layer_values import Layers
from ..step.planner import Planner
from ..step.ranks import Ranks
from ..step.registry import VIEW_BUILT_INS, Registry
from .config import MonitorConfig, compiled
from .pipeline.ledger import Ledger, Options
from .publisher import Outbox
from .session import Session, at_exit


def build(config: MonitorConfig, model: nn.Module | None = None) -> Session:
    """The session that runs a monitor with these options.

    The model is checked and indexed before the run directory is created, so a model that is refused leaves no files.

    Raises:
        TypeError, ValueError: the model cannot be monitored.
    """
    inert, ranks = is_disabled(), Ranks(config.process_group)
    complaints = Complaints(raising=config.on_metric_error == "raise")
    planner = _planner(config, model)
    outbox = _outbox(config, complaints, ranks, inert)
    guard = Guard(complaints, inert)
    ledger = _ledger(config, guard, outbox)
    statistics = Statistics(complaints, float(config.eps), config.compile_statistics and not inert)
    budget = _budget(config, complaints)
    session = Session(
        budget or config.is_step_monitored,
        guard,
        planner,
        Measurer(statistics, complaints, ranks),
        ledger,
        config.sampled_updates,
        budget,
        CloserLook(planner, config.post_spike_steps),
        Recorder(config.flight_recorder, planner.registry, ledger.summary),
        None if inert else _actor(config, ledger, ranks, complaints),
    )
    session.scaler = config.scaler
    # the last rows are sent when the interpreter ends, and what sends them has to be alive until then
    weakref.finalize(session, at_exit, weakref.ref(session), outbox.lasting)
    return session


def _planner(config: MonitorConfig, model: nn.Module | None) -> Planner:
    outputs = {**VIEW_BUILT_INS[n.ACTIVATION], **ACTIVATION_BUILT_INS}
    registry = Registry({**VIEW_BUILT_INS, **RCC_BUILT_INS, n.ACTIVATION: outputs, n.OPTIMIZER: OPTIMIZER_BUILT_INS})
    excluded = compiled("excluded_modules_regex", config.excluded_modules_regex)
    distinct = compiled("rank_distinct_regex", config.rank_distinct_regex)
    planner = Planner(registry, excluded, config.format_module_name_fn, distinct)
    if model is not None:
        check.module(model)
        planner.watch(model)
    return planner


def _outbox(config: MonitorConfig, complaints: Complaints, ranks: Ranks, inert: bool) -> Outbox:
    logs_everywhere, run_dir = config.log_on_all_ranks, config.run_dir
    if run_dir is not None and logs_everywhere and ranks.count > 1:
        run_dir = os.path.join(run_dir, f"rank{ranks.rank}")
    meta = {"torch": torch.__version__, "eps": config.eps, "every": config.interval}
    return Outbox(complaints, None if inert else run_dir, meta, lambda: not (logs_everywhere or ranks.is_first))


def _ledger(config: MonitorConfig, guard: Guard, outbox: Outbox) -> Ledger:
    policy = policy_of(config.on_spike)
    # schedulers hold the optimizer, which holds the model, and the ledger lives longer than these
    on_spike = policy.without_others() if isinstance(policy, Rollback) else config.on_spike
    options = Options(_key_formatter(config.key_style, config.prefix), config.history, on_spike)
    return Ledger(options, guard, outbox, Layers(config.layers))


def _budget(config: MonitorConfig, complaints: Complaints) -> Budget | None:
    share = config.overhead_budget
    return None if share is None else Budget(share, config.is_step_monitored, complaints)


def _actor(config: MonitorConfig, ledger: Ledger, ranks: Ranks, complaints: Complaints) -> Actor | None:
    policy = policy_of(config.on_spike)
    if policy is None:
        return None
    # the decision needs these two, whether they are shown or have a detector or not
    ledger.summary.signals |= {"grad_norm", "grad_nonfinite"}
    return Actor(policy, ledger.judges, Exchange(ranks, complaints), complaints)


def _key_formatter(style: str, prefix: str) -> Callable[[Mapping[Key, float]], dict[str, float]]:
    known: dict[Key, str] = {}

    def formatted(values: Mapping[Key, float]) -> dict[str, float]:
        try:
            return {known[key]: value for key, value in values.items()}
        except KeyError:  # in the first steps only
            known.update((key, format_key(key, style, prefix)) for key in values.keys() - known.keys())
            return {known[key]: value for key, value in values.items()}

    return formatted

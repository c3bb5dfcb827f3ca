"""Builds the parts of a monitor from its options and connects them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from ..capture.coordinate_check.terms import RCC_BUILT_INS
from ..capture.measurer import Measurer
from ..capture.modules.unit_metrics import ACTIVATION_BUILT_INS
from ..capture.parameters import OPTIMIZER_BUILT_INS
from ..core import keys as n
from ..core import validation as check
from ..core.errors import WarningLog
from ..core.fence import Fence, is_disabled
from ..core.keys import Key, format_key
from ..plugins.clipping.named import AdaptiveClips
from ..plugins.flight_recorder import FlightRecorder
from ..plugins.live_detail.plugin import LiveDetail, PresetOverlay
from ..plugins.loop_audit.plugin import LoopAudit
from ..plugins.overhead_budget import OverheadBudget
from ..plugins.post_spike_detail import PostSpikeDetail
from ..plugins.spike_policy.plugin import SpikePolicy
from ..plugins.spike_policy.policy import Rollback, policy_of
from ..statistics.dispatch import Statistics
from ..step.built_ins import VIEW_BUILT_INS
from ..step.exchange import RankExchange
from ..step.exchange_policy import ExchangePolicy
from ..step.layer_values import LayerSelection
from ..step.planner import Planner
from ..step.plugin import Plugin
from ..step.ranks import Ranks
from ..step.registry import Registry
from .cadence import Cadence
from .captures import Captures
from .config import MonitorConfig, compiled
from .hook_schedule import HookSchedule
from .late_values import LateValues
from .pending_queue import Flights
from .pipeline.ledger import Ledger, Options
from .plugin_context import MonitorContext
from .plugin_set import PluginSet
from .publisher import Outbox
from .runtime import Runtime, at_exit
from .step_lifecycle import StepLifecycle
from .step_planning import StepPlanning
from .step_state import StepState
from .value_log import ValueLog


def build(config: MonitorConfig, model: nn.Module | None = None) -> Runtime:
    """The runtime of a monitor with these options.

    The model is checked and indexed before the run directory is created, so a model that is refused leaves no files.

    Raises:
        TypeError, ValueError: the model cannot be monitored.
    """
    inert, ranks = is_disabled(), Ranks(config.process_group)
    complaints = WarningLog(raising=config.on_metric_error == "raise")
    planner = _planner(config, model)
    outbox = _outbox(config, complaints, ranks, inert)
    fence = Fence(complaints, inert)
    ledger = _ledger(config, fence, outbox)
    statistics = Statistics(complaints, float(config.eps), config.compile_statistics and not inert)
    captures = Captures(Measurer(statistics, complaints, ranks), fence, config.sampled_updates)
    exchange = ExchangePolicy(RankExchange(ranks, complaints), planner, ledger.summary, ledger.judges)
    plugins = PluginSet(_plugins(config, planner, ledger, exchange, complaints, inert), complaints)
    ledger.on_alert, ledger.on_record = partial(plugins.call, "on_alert"), partial(plugins.call, "on_record")
    runtime = Runtime(_lifecycle(config, planner, captures, exchange, ledger, plugins, fence))
    for plugin in plugins:
        plugin.attach(MonitorContext(runtime.lifecycle, plugin))
    runtime.scaler = config.scaler
    # the last rows are sent when the interpreter ends, and what sends them has to be alive until then
    weakref.finalize(runtime, at_exit, weakref.ref(runtime), outbox.lasting)
    return runtime


def _lifecycle(
    config: MonitorConfig,
    planner: Planner,
    captures: Captures,
    exchange: ExchangePolicy,
    ledger: Ledger,
    plugins: PluginSet,
    fence: Fence,
) -> StepLifecycle:
    state = StepState()
    queue = Flights(ledger, planner.registry, fence, plugins)
    values = ValueLog(state, fence, LateValues(state, ledger, queue, plugins), exchange, captures.modules)
    hooks, cadence = HookSchedule(planner, captures.modules), Cadence(config.is_step_monitored, plugins)
    planning = StepPlanning(state, planner, captures, exchange, ledger, hooks, cadence, fence)
    return StepLifecycle(planning, queue, values)


def _plugins(
    config: MonitorConfig, planner: Planner, ledger: Ledger, exchange: ExchangePolicy, complaints: WarningLog, inert: bool
) -> list[Plugin]:
    """The plugins in the order in which they are called. The budget thins what the script asks for, and the others may ask for more;
    a recorder keeps a step before the detectors learn of it.
    """
    recorder = FlightRecorder(config.flight_recorder, planner.registry, ledger.summary)
    ledger.judges.fetch_recorded = recorder.fetch_recorded
    post_spike = PostSpikeDetail(planner, config.post_spike_steps)
    overlay = PresetOverlay(planner, ledger.summary, lambda: post_spike.may_add_hooks)
    detail = LiveDetail(overlay, ledger.outbox, exchange, complaints)
    budget = [] if config.overhead_budget is None else [OverheadBudget(config.overhead_budget)]
    policy = policy_of(config.on_spike)
    acting = []
    if policy is not None and not inert:
        acting = [SpikePolicy(policy, ledger.judges, RankExchange(exchange.exchange.ranks, complaints), complaints)]
        # the decision needs these two, whether they are shown or have a detector or not
        ledger.summary.signals |= {"grad_norm", "grad_nonfinite"}
    audit = LoopAudit(planner, complaints, ledger.outbox.note)
    clips = AdaptiveClips(may_skip=bool(acting))
    return [*budget, recorder, *acting, detail, post_spike, clips, audit, *config.plugins]


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


def _outbox(config: MonitorConfig, complaints: WarningLog, ranks: Ranks, inert: bool) -> Outbox:
    logs_everywhere, run_dir = config.log_on_all_ranks, config.run_dir
    if run_dir is not None and logs_everywhere and ranks.count > 1:
        run_dir = os.path.join(run_dir, f"rank{ranks.rank}")
    meta = {"torch": torch.__version__, "eps": config.eps, "every": config.interval}
    return Outbox(complaints, None if inert else run_dir, meta, lambda: not (logs_everywhere or ranks.is_first))


def _ledger(config: MonitorConfig, guard: Fence, outbox: Outbox) -> Ledger:
    policy = policy_of(config.on_spike)
    # schedulers hold the optimizer, which holds the model, and the ledger lives longer than these
    on_spike = policy.without_others() if isinstance(policy, Rollback) else config.on_spike
    options = Options(_key_formatter(config.key_style, config.prefix), config.history, on_spike)
    return Ledger(options, guard, outbox, LayerSelection(config.layers))


def _key_formatter(style: str, prefix: str) -> Callable[[Mapping[Key, float]], dict[str, float]]:
    known: dict[Key, str] = {}

    def formatted(values: Mapping[Key, float]) -> dict[str, float]:
        try:
            return {known[key]: value for key, value in values.items()}
        except KeyError:  # in the first steps only
            known.update((key, format_key(key, style, prefix)) for key in values.keys() - known.keys())
            return {known[key]: value for key, value in values.items()}

    return formatted

"""Builds the parts of a monitor from its options and connects them."""

from __future__ import annotations

import multiprocessing.util
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..capture.coordinate_check.terms import RCC_BUILT_INS
from ..capture.measurer import Measurer
from ..capture.metric_functions import OPTIMIZER_BUILT_INS, UPDATE_BUILT_INS
from ..capture.modules.unit_metrics import ACTIVATION_BUILT_INS, INPUT_BUILT_INS
from ..core import keys as n
from ..core import validation as check
from ..core.errors import WarningLog, display
from ..core.fence import Fence, is_disabled
from ..core.records import KeyFormatter, SpikeEvent
from ..plugins.clipping.named import AdaptiveClips
from ..plugins.data_check.plugin import DataCheck
from ..plugins.flight_recorder import FlightRecorder
from ..plugins.live_detail.plugin import LiveDetail, PresetOverlay
from ..plugins.loop_audit.plugin import LoopAudit
from ..plugins.post_spike_detail import PostSpikeDetail
from ..plugins.setup_check.plugin import SetupCheck
from ..plugins.spike_policy.policy import Policy, Rollback, policy_of
from ..spikes.detector_set import DetectorSet
from ..statistics.dispatch import Statistics
from ..step.exchange import ExchangePolicy, RankExchange
from ..step.plan import VIEW_BUILT_INS, Registry
from ..step.planner import Planner
from ..step.plugin import Plugin
from ..step.ranks import Ranks
from ..step.summary import LayerSelection
from .config import MonitorConfig, compiled
from .machine.step_machine import StepState
from .pipeline.record_pipeline import (
    PendingQueue,
    Publisher,
    RecordFactory,
    RecordHistory,
    RecordPipeline,
    RunDirectory,
    SpikeDetection,
    SpikeNotification,
)
from .plugin_context import MonitorContext
from .plugin_set import PluginSet
from .runtime import Runtime, at_exit
from .steps.cadence import Cadence
from .steps.captures import Captures
from .steps.hook_schedule import HookSchedule
from .steps.late_values import LateValues
from .steps.step_lifecycle import StepLifecycle
from .steps.step_planning import StepPlanning
from .steps.value_log import ValueLog


def build(config: MonitorConfig, model: nn.Module | None = None) -> Runtime:
    """The runtime of a monitor with these options.

    The model is checked and indexed before the run directory is created, so a model that is refused leaves no files.

    Raises:
        TypeError, ValueError: the model cannot be monitored, or a plugin belongs to the monitor of another one.
    """
    inert, ranks = is_disabled(), Ranks(config.process_group)
    run_dir = None if inert else _run_dir(config, ranks)
    complaints = WarningLog(config.on_metric_error == "raise", "" if run_dir is None else str(run_dir))
    is_muted = partial(ranks.is_muted, config.log_on_all_ranks)
    planner = _planner(config, model)
    _check_free(config.plugins, model)
    meta = {"torch": torch.__version__, "eps": config.eps, "every": config.interval}
    directory = RunDirectory(run_dir, meta, complaints, is_muted, tells=config.on_spike is not None)
    fence = Fence(complaints, inert)
    factory = RecordFactory(planner.registry, LayerSelection(config.layers), directory)
    detection = SpikeDetection(factory.summary, complaints)
    statistics = Statistics(complaints, float(config.eps), False if inert else config.compile_statistics)
    captures = Captures(Measurer(statistics, complaints, ranks), fence, config.sampled_updates)
    between = RankExchange(ranks, complaints)
    exchange = ExchangePolicy(between, planner, factory.summary, detection.detector_set, config.interval)
    history = RecordHistory(config.history, detection.detector_set.history)
    built_in = _plugins(config, planner, factory, detection.detector_set, directory, exchange, fence)
    recorder = next(plugin for plugin in built_in if isinstance(plugin, FlightRecorder))
    compared = _replica_check(config, planner, ranks, complaints, history, recorder)
    plugins = PluginSet([*built_in, *compared, *config.plugins], complaints)
    pipeline = RecordPipeline(
        detection,
        history,
        directory,
        Publisher(KeyFormatter(config.key_style, config.prefix), complaints, is_muted),
        SpikeNotification(_on_spike(config), detection.detector_set, plugins, complaints, is_muted),
        partial(plugins.call, "on_record"),
    )
    state, queue = StepState(), PendingQueue(factory, pipeline, exchange.exchange, fence, plugins)
    values = ValueLog(state, fence, LateValues(state, pipeline, queue, plugins), exchange, captures.modules)
    pipeline.publisher.leave_out(values.of_trainer)
    hooks, cadence = HookSchedule(planner, captures.modules), Cadence(config.is_step_monitored, plugins, config.interval)
    planning = StepPlanning(state, planner, captures, exchange, factory, hooks, cadence, fence)
    runtime = Runtime(StepLifecycle(planning, queue, values))
    for plugin in plugins:
        plugin.attach(MonitorContext(runtime.lifecycle, plugin))
    runtime.connection.use_scaler(config.scaler)
    # the last rows are sent when the interpreter ends, and what sends them has to be alive until then
    end = weakref.finalize(runtime, at_exit, weakref.ref(runtime), directory.keep_alive, pipeline.publisher.keep_alive)
    if multiprocessing.parent_process() is not None:  # a child that was forked ends without atexit
        multiprocessing.util.Finalize(None, end, exitpriority=0)
    return runtime


def _check_free(plugins: Sequence[Plugin], model: nn.Module | None) -> None:
    for plugin in plugins:
        context: Any = getattr(plugin, "context", None)
        other = None if context is None else context.module
        if other is not None and other is not model and context.is_attached:  # a second watch() of a model replaces the first
            raise ValueError(
                f"plugins has {display(plugin)}, which the monitor of another {type(other).__name__} uses; "
                "give each monitor a plugin of its own, or detach() that monitor first"
            )


def _plugins(
    config: MonitorConfig,
    planner: Planner,
    factory: RecordFactory,
    detectors: DetectorSet,
    directory: RunDirectory,
    exchange: ExchangePolicy,
    fence: Fence,
) -> list[Plugin]:
    """The plugins in the order in which they are called. The budget thins what the script asks for, and the others may ask for more;
    a recorder keeps a step before the detectors learn of it.
    """
    summary, complaints = factory.summary, fence.complaints
    recorder = FlightRecorder(config.flight_recorder, planner.registry, summary)
    detectors.explanations.fetch_from(recorder.fetch_recorded)
    post_spike = PostSpikeDetail(planner, config.post_spike_steps)
    overlay = PresetOverlay(planner, summary, lambda: post_spike.may_add_hooks)
    detail = LiveDetail(overlay, directory, exchange, complaints)
    budget: list[Plugin] = []
    if config.overhead_budget is not None:
        from ..plugins.overhead_budget import OverheadBudget

        budget = [OverheadBudget(config.overhead_budget)]
    policy = policy_of(config.on_spike)
    acting: list[Plugin] = []
    if policy is not None and not fence.inert:
        from ..plugins.spike_policy.plugin import SpikePolicy

        decisions = RankExchange(exchange.exchange.ranks, complaints)
        acting = [SpikePolicy(policy, detectors, decisions, complaints, exchange.parts_of_tensors)]
        # the decision needs these two, whether they are shown or have a detector or not
        summary.choice.require("grad_norm", "grad_nonfinite")
    audit = LoopAudit(planner, complaints, directory.annotate)
    setup = SetupCheck(planner, complaints, directory.annotate)
    data = [DataCheck(config.interval or 1, setup.expectations, complaints, directory.annotate)] if config.check_data else []
    clips = AdaptiveClips(may_skip=bool(acting))
    return [
        *budget,
        recorder,
        *acting,
        detail,
        post_spike,
        clips,
        audit,
        setup,
        *data,
    ]


def _replica_check(
    config: MonitorConfig,
    planner: Planner,
    ranks: Ranks,
    complaints: WarningLog,
    history: RecordHistory,
    recorder: FlightRecorder,
) -> list[Plugin]:
    """The plugin, if there is anything to compare."""
    if not config.check_replicas or ranks.count == 1 or is_disabled():
        return []
    from ..plugins.replica_check.plugin import ReplicaCheck  # not needed by a single process

    distinct = compiled("rank_distinct_regex", config.rank_distinct_regex)
    every, sync_every = config.check_replicas, config.replicas_sync_every
    return [ReplicaCheck(every, sync_every, distinct, ranks, planner, complaints, history.sample.records, recorder.look)]


def _planner(config: MonitorConfig, model: nn.Module | None) -> Planner:
    outputs = {**VIEW_BUILT_INS[n.ACTIVATION], **ACTIVATION_BUILT_INS}
    updates = {**VIEW_BUILT_INS[n.UPDATE], **UPDATE_BUILT_INS}
    inputs = {**VIEW_BUILT_INS[n.INPUT], **INPUT_BUILT_INS}
    own = {n.ACTIVATION: outputs, n.INPUT: inputs, n.UPDATE: updates, n.OPTIMIZER: OPTIMIZER_BUILT_INS}
    registry = Registry({**VIEW_BUILT_INS, **RCC_BUILT_INS, **own})
    excluded = compiled("excluded_modules_regex", config.excluded_modules_regex)
    distinct = compiled("rank_distinct_regex", config.rank_distinct_regex)
    planner = Planner(registry, excluded, config.format_module_name_fn, distinct, config.gradient_source)
    if model is not None:
        check.module(model)
        planner.watch(model)
    return planner


def _run_dir(config: MonitorConfig, ranks: Ranks) -> str | os.PathLike[str] | None:
    if config.run_dir is not None and config.log_on_all_ranks and ranks.count > 1:
        return os.path.join(config.run_dir, f"rank{ranks.rank}")
    return config.run_dir


def _on_spike(config: MonitorConfig) -> str | Policy | Callable[[SpikeEvent], Any] | None:
    policy = policy_of(config.on_spike)
    # schedulers hold the optimizer, which holds the model, and the pipeline lives longer than these
    return policy.without_others() if isinstance(policy, Rollback) else config.on_spike

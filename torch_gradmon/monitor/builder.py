"""Builds the parts of a monitor from its options and connects them."""

from __future__ import annotations

import multiprocessing.util
import os
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..capture.measurer import OPTIMIZER_BUILT_INS, UPDATE_BUILT_INS, Measurer
from ..core import keys as n
from ..core import validation as check
from ..core.errors import WarningLog, display
from ..core.fence import Fence, is_disabled
from ..core.records import KeyFormatter
from ..core.torch_modes import is_muted
from ..plugins.data_check import DataCheck
from ..plugins.live_detail import LiveDetail, PostSpikeDetail
from ..plugins.loop_audit import LoopAudit
from ..plugins.reactions import Rollback, policy_of
from ..plugins.setup_check import SetupCheck, compiled
from ..spikes.detector_set import DetectorSet
from ..statistics.dispatch import Statistics, kernel_choice
from ..step.plan import VIEW_BUILT_INS, BuiltIn, Registry
from ..step.planner import OF_MODULES, ExchangePolicy, Planner
from ..step.plugin import Plugin, PluginContext
from ..step.ranks import Ranks
from ..step.record_builder import RecordFactory
from ..step.summary import LayerSelection, Summary, SummaryChoice
from .machine import StepState
from .options import MonitorOptions
from .plugin_set import BuiltInPlugins, PluginSet
from .records import Publisher, RecordHistory, RecordPipeline, RunDirectory
from .runtime import Runtime, at_exit
from .steps import Cadence, Captures, StepLifecycle
from .values import ValueLog


def build(options: MonitorOptions, model: nn.Module | None = None) -> Runtime:
    """The runtime of a monitor with these options.

    The model is checked and indexed before the run directory is created, so a model that is refused leaves no files.
    """
    inert, ranks = is_disabled(), Ranks(options.ranks.process_group)
    run_dir = None if inert else run_dir_of(options.run_dir, options.ranks.log_on_all_ranks, ranks)
    complaints = WarningLog(options.on_metric_error == "raise", "" if run_dir is None else str(run_dir))
    muted = partial(is_muted, ranks.group, options.ranks.log_on_all_ranks)
    planner = _planner(options, model)
    _check_free(options.plugins, model)
    meta = {"torch": torch.__version__, "eps": options.zero_threshold, "every": options.interval}
    directory = RunDirectory(run_dir, meta, complaints, muted, tells=options.on_spike is not None)
    fence = Fence(complaints, inert)
    layers = LayerSelection(options.layers)
    summary = Summary(SummaryChoice(of_layers=layers.needs))
    factory = RecordFactory(planner.registry, layers, summary, directory.annotate)
    detectors = DetectorSet(summary, complaints)
    statistics = Statistics(complaints, float(options.zero_threshold), False if inert else kernel_choice())
    sampled = options.max_update_rows or compiled("update_regex", options.update_regex)  # one of the two at most
    captures = Captures(Measurer(statistics, complaints, ranks), fence, sampled)
    exchange = ExchangePolicy(ranks, complaints, planner, summary, detectors, options.interval)
    history = RecordHistory(options.history, detectors.history)
    built_in = _plugins(options, planner, factory, detectors, directory, exchange, fence)
    plugins = PluginSet(built_in, options.plugins, complaints)
    publisher = Publisher(KeyFormatter(options.key_order, options.prefix), complaints, muted)
    state = StepState()
    policy, on_spike = policy_of(options.on_spike), options.on_spike
    if isinstance(policy, Rollback):
        on_spike = policy.without_others()  # schedulers hold the optimizer, which holds the model, and the pipeline lives longer
    pipeline = RecordPipeline(state, factory, detectors, history, directory, publisher, plugins, on_spike, exchange, fence, muted)
    values = ValueLog(state, fence, pipeline, exchange)
    publisher.of_trainer = values.of_trainer
    cadence = Cadence(options.is_step_monitored, plugins, options.interval)
    runtime = Runtime(StepLifecycle(state, planner, captures, exchange, cadence, pipeline, values, fence))
    for plugin in plugins:
        plugin.context = PluginContext(runtime.lifecycle, plugin)
    runtime.run_began()
    runtime.named_scaler, runtime.compared = options.scaler, (options.checked.replicas_every, options.ranks)
    # the last rows are sent when the interpreter ends, and what sends them has to be alive until then
    end = weakref.finalize(runtime, at_exit, weakref.ref(runtime), directory.keep_alive, pipeline.publisher.keep_alive)
    if multiprocessing.parent_process() is not None:  # a child that was forked ends without atexit
        multiprocessing.util.Finalize(None, end, exitpriority=0)
    return runtime


def _check_free(plugins: Sequence[Plugin], model: nn.Module | None) -> None:
    for plugin in plugins:
        context: Any = getattr(plugin, "context", None)
        other = None if context is None else context.module
        if other is not None and other is not model and context.optimizers:  # a second watch() of a model replaces the first
            raise ValueError(
                f"plugins has {display(plugin)}, which the monitor of another {type(other).__name__} uses; "
                "give each monitor a plugin of its own, or detach() that monitor first"
            )


def _plugins(
    options: MonitorOptions,
    planner: Planner,
    factory: RecordFactory,
    detectors: DetectorSet,
    directory: RunDirectory,
    exchange: ExchangePolicy,
    fence: Fence,
) -> BuiltInPlugins:
    summary, complaints = factory.summary, fence.complaints
    post_spike = PostSpikeDetail(planner, options.spike_capture.after)
    budget = recorder = acting = data = None
    if options.max_overhead is not None:
        from ..plugins.overhead_budget import OverheadBudget

        budget = OverheadBudget(options.max_overhead, fence.spent)
    detail = LiveDetail(planner, summary, post_spike, budget, exchange, directory.reopen)
    policy = policy_of(options.on_spike)
    if policy is not None and not fence.inert:
        from ..plugins.spike_policy import SpikePolicy
        from ..step.exchange import RankExchange

        decisions = RankExchange(exchange.ranks, complaints)
        acting = SpikePolicy(policy, planner, detectors, decisions, complaints, exchange.parts_of_tensors)
        # the decision needs these two, whether they are shown or have a detector or not
        summary.choice.require("grad_norm", "grad_nonfinite_count")
    # plugins of the script may ask for gradients in each step
    if options.spike_capture.before or acting is not None or options.plugins:
        from ..plugins.flight_recorder import FlightRecorder

        recorder = FlightRecorder(options.spike_capture.before, planner.registry, summary)
        detectors.fetch_recorded = recorder.fetch_recorded
    audit = LoopAudit(planner)
    setup = SetupCheck(planner, options.checked)
    if options.checked.data:
        data = DataCheck(options.interval or 1, options.checked.batch_varies)
    return BuiltInPlugins(budget, recorder, acting, detail, post_spike, audit, setup, data, replicas=None)


def _built_ins(source: str) -> dict[str, BuiltIn]:
    """The built-in metrics of a source, by name."""
    more = {n.UPDATE: UPDATE_BUILT_INS, n.OPTIMIZER: OPTIMIZER_BUILT_INS}
    if source in OF_MODULES:
        from ..capture.module_values import MODULE_BUILT_INS as more  # most programs ask for nothing of modules
    return {**VIEW_BUILT_INS.get(source, {}), **more.get(source, {})}


def _planner(options: MonitorOptions, model: nn.Module | None) -> Planner:
    registry = Registry(_built_ins)
    excluded = compiled("excluded_modules_regex", options.excluded_modules_regex)
    distinct = compiled("distinct", options.ranks.distinct)
    planner = Planner(registry, excluded, options.format_module_name_fn, distinct, options.gradient_source, options.checked.fit)
    if model is not None:
        check.module(model)
        planner.watch(model)
    return planner


def run_dir_of(path: str | os.PathLike[str] | None, on_all_ranks: bool, ranks: Ranks) -> str | os.PathLike[str] | None:
    if path is not None and on_all_ranks and ranks.count > 1:
        return os.path.join(path, f"rank{ranks.rank}")
    return path

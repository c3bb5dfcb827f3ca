"""One monitor at work: the step machine, what carries out its actions, and the life cycle of hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..capture.gradients import reciprocal, scale_of
from ..capture.hooks import Hook, WrappedMethod
from ..core import keys as n
from ..core import validation as check
from ..core.errors import display, nearest, warn_user
from ..core.fence import Fence, fenced
from ..core.keys import GRADIENT, GRADIENT_BEFORE_CLIP, Pattern
from ..core.loop_mistakes import LoopFinding
from ..core.records import Metric, StepRecord
from ..core.torch_modes import outside_dispatch_modes
from ..plugins.spike_policy.policy import StepCounts
from ..spikes.detector import SpikeDetector
from ..step.active_step import Mode
from ..step.buffer import StepBuffer
from ..step.model_index import GradientSource
from ..step.planner import PRESETS, Planner, PresetName
from ..step.plugin import Plugin
from .loop_hooks import LoopHooks
from .machine import StepCycle, StepMachine, StepState
from .optimizer_hooks import IdleStretch, LoopDriver
from .plugin_set import BuiltInPlugins
from .records import RecordFactory, RecordPipeline
from .steps import UNFINISHED, Captures, Decisions, Ownership, StepLifecycle, StepMeasurement, link, linkable
from .values import OverflowLog

# --- An unmodified training loop: reports the events of its hooks to the step machine ---


_GONE = "the attached optimizers are gone, and no step can end any more; call detach(), then attach() the new ones"
_UNUSED = "its optimizer did not step in this step; its gradient counts in the step that uses it"


_Method = weakref.WeakMethod[Callable[[], Any]]


def _between(before: _Method, after: _Method) -> Callable[..., Any]:
    """A function around a method that calls one method before it and another one after it, unless gradients are off."""

    def call(reference: _Method) -> None:
        if torch.is_grad_enabled() and (method := reference()) is not None:
            method()

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call(before)
        result = original(*args, **kwargs)
        call(after)
        return result

    return around


def _without(reference: weakref.ref[StepLifecycle]) -> Callable[..., Any]:
    """A function around a method, in which nothing is measured."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        lifecycle = reference()
        if lifecycle is None:
            return original(*args, **kwargs)
        with lifecycle.paused():
            return original(*args, **kwargs)

    return around


class FollowedLoop(LoopDriver):
    """Follows one loop by hooks: torch's events in, the step machine's events out.

    Args:
        owner: kept alive by the optimizers' hooks, together with this.
        cycle: opens and closes steps.
        lifecycle: has the open step.
        overflows: takes what a fused optimizer found.
        module: the watched model.
        optimizers: in the order in which they step.
        scaler: their GradScaler, if one is known.
        wrappers: around the optimizers, each with the one inside.

    Attributes:
        is_orphaned: all optimizers were collected.
        scaler: a GradScaler that was noticed while the loop ran.
    """

    def __init__(
        self,
        owner: object,
        cycle: StepCycle,
        lifecycle: StepLifecycle,
        overflows: OverflowLog,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        wrappers: Sequence[tuple[Any, Optimizer]] = (),
    ) -> None:
        self.owner, self.fence, self._lifecycle, self._overflows = owner, lifecycle.fence, lifecycle, overflows
        order: list[Hashable] = [id(optimizer) for optimizer in optimizers]
        self.ownership = Ownership(optimizers)
        stretch = IdleStretch(cycle.state, lifecycle, lifecycle.values.late.tags, lifecycle.plugins, self.fence)
        self.hooks = LoopHooks(self, self.fence, module, optimizers, scaler, wrappers, cycle.state.in_backward, stretch)
        self.measurement = StepMeasurement(lifecycle, self.ownership, self.hooks, order)
        self.decisions = Decisions(self.ownership, order, self.hooks.optimizers.holds, lifecycle.planning.planner)
        self.machine = StepMachine(cycle, self.measurement, order)
        self.is_orphaned, self.scaler, self._is_due = False, scaler, True
        self._plugins, self._audit = lifecycle.plugins, lifecycle.plugins.built_in.audit
        self.hooks.optimizers.allow_skips(lifecycle.plugins.has("before_optimizer_step"))
        self._wrapped = self._around(lifecycle.planning.planner.source)

    def _around(self, source: GradientSource) -> list[WrappedMethod]:
        """Follow the method that shows when gradients are final, and measure nothing in those that do not train."""
        if (boundary := source.boundary) is None:
            return []
        step = _between(weakref.WeakMethod(self.passes_began), weakref.WeakMethod(self.passes_ended))
        trials = [name for name in source.trials if hasattr(boundary, name)]
        without = _without(weakref.ref(self._lifecycle))
        return [WrappedMethod(boundary, "step", step), *(WrappedMethod(boundary, name, without) for name in trials)]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that still exist, in the order in which they step."""
        return self.ownership.alive(self.machine.order)

    # --- hooks on parameters -------------------------------------------------------------------------------------------------

    def leave_unused(self, buffer: StepBuffer) -> None:
        index, order, awaited = self._lifecycle.planning.planner.inventory, self.machine.order, self.hooks.backward.awaited
        if awaited and not (self._lifecycle.state.leads or buffer.names_of(GRADIENT_BEFORE_CLIP) <= buffer.used):
            buffer.refuse_all(GRADIENT_BEFORE_CLIP, UNFINISHED)
        if len(order) == 1 or index is None or not self._lifecycle.state.leads:
            return
        owned = (self.ownership.positions(each) for each in order)
        # an optimizer uses all or none; one that shares parameters may have the first ones in common
        if resting := [own for own in owned if own and not buffer.used.issuperset((index.names[own[0]], index.names[own[-1]]))]:
            buffer.noted["rests"] = float(len(resting))
            names = {index.names[position] for own in resting for position in own}
            if left := buffer.names_of(GRADIENT_BEFORE_CLIP) & names - buffer.used:
                buffer.clear(GRADIENT_BEFORE_CLIP, left)
                buffer.absent.update(((source, name), _UNUSED) for source in (GRADIENT_BEFORE_CLIP, GRADIENT) for name in left)

    def groups_changed(self) -> bool:
        """Whether an optimizer got or lost parameters since hooks were registered."""
        return self.ownership.has_changed(self.machine.order)

    def install(self, planner: Planner) -> None:
        """Register the hooks on parameters that a monitored step needs."""
        assert planner.inventory is not None
        self.ownership.update(planner, self.machine.order)
        self._lifecycle.captures.parameters.shared = self.ownership.shared
        places = planner.inventory.references
        local = [
            (places[position], Hook(self.gradient_came, position), Hook(self.gradient_accumulated, position))
            for position in planner.local_positions()
        ]
        self.hooks.backward.install(planner.source.hook_places(places), local)

    def uninstall(self) -> None:
        """Take them away."""
        self.hooks.backward.uninstall()

    def by_scale(self, positions: Sequence[int]) -> list[tuple[list[int], Tensor | None]]:
        """These positions by what their gradients have to be multiplied by at this moment."""
        return self.ownership.by_scale(positions, self.machine.order, self.hooks.scaler)

    def to_step(self, positions: Sequence[int]) -> list[int]:
        """Those of ``positions`` whose optimizers have not stepped in this step."""
        return self.ownership.to_step(positions, self.machine.state.progress.done)

    @fenced
    def gradient_came(self, position: int, gradient: Tensor | None) -> None:
        """A backward pass brought a gradient for the parameter at ``position``."""
        if self.machine.gradient_arrived():
            self._lifecycle.captures.gradients.measure_local(position, gradient, self.measurement.inverse_scale())

    @fenced
    def gradient_accumulated(self, position: int, parameter: Tensor) -> None:
        """That gradient was accumulated."""
        self._lifecycle.captures.gradients.commit_local(position)

    # --- events --------------------------------------------------------------------------------------------------------------

    def may_train_in_eval(self) -> bool:
        return self.machine.may_train_in_eval()

    def moves_buffers(self, module: nn.Module) -> None:
        policy = self._plugins.built_in.policy
        if policy is not None and self.machine.moves_buffers():
            self._plugins.call_one(policy, policy.before_forward, module)

    def forward_began(self, in_eval: bool, in_closure: bool, counts: bool) -> None:
        if self.fence.is_captured:
            self.fence.left_graph()
        self.hooks.stretch.forward_followed()
        if counts:
            self._lifecycle.plugins.call("on_forward")
        self.machine.forward_began(in_eval, in_closure)
        if self.ownership.is_orphaned:
            self._optimizers_lost()

    def _optimizers_lost(self) -> None:
        self.is_orphaned = True
        self.fence.complaints.add("optimizers", _GONE)
        self._plugins.call_one(self._audit, self._audit.on_optimizers_lost)

    def part_called(self, module: nn.Module) -> None:
        """A part of the model is called, by something else than the root."""
        state = self.machine.state
        in_eval = state.patterns.trains_in_eval and not module.training  # in a step that a call in training mode has opened
        if not state.is_open or state.progress.is_tentative or in_eval:
            self.hooks.model.part_called(module)

    def root_began(self) -> None:
        self._lifecycle.captures.modules.training_began()

    def gradient_complete(self, position: int) -> None:
        if self.machine.gradient_arrived():
            state = self.machine.state
            self.measurement.measure_one_before_clip(position, state.progress.done, state.in_backward.known)

    def backward_ended(self, is_nested: bool) -> None:
        self._lifecycle.plugins.call("on_backward_ended")
        if self.ownership.is_orphaned and not self.machine.state.is_paused:
            self._optimizers_lost()
        self.machine.backward_ended(is_nested, self.hooks.scaler.in_step)

    @fenced
    def passes_began(self) -> None:
        """All passes of a step are about to come, on all ranks: what they have to agree on, they do before they wait for each other."""
        self.machine.passes_began()

    @fenced
    def passes_ended(self) -> None:
        """All passes of the step are over, and gradients are final."""
        self.machine.passes_ended()

    def remove_hooks(self) -> None:
        """Take all hooks away."""
        self.hooks.remove()
        for wrapped in self._wrapped:
            wrapped.remove()

    def wrapper_began(self, optimizer: Optimizer) -> None:
        source = self._lifecycle.planning.planner.source
        self._is_due = source.is_due()
        if not self._is_due:
            return
        self.hooks.scaler.wrapper_began(optimizer)
        self.machine.wrapper_began(id(optimizer))

    def wrapper_ended(self, optimizer: Optimizer) -> None:
        source = self._lifecycle.planning.planner.source
        if self._is_due and source.has_overflowed():
            if not source.searches_scale() and (active := self._lifecycle.active) is not None:
                active.annotations["skipped"] = (
                    "the engine leaves out steps whose gradients are not finite"  # so that it is judged
                )
            self.step_overflowed(optimizer)
        else:
            self.machine.wrapper_ended(id(optimizer))

    def step_began(self, optimizer: Optimizer, has_closure: bool, within: bool) -> bool:
        if self.fence.is_captured:
            self.fence.left_graph()
        self.hooks.stretch.catch_up()
        if within:
            self.hooks.backward.optimizer_steps(optimizer)
        self.hooks.scaler.step_began(optimizer, takes_values=not self.machine.state.is_open or self._lifecycle.has_values)
        self._lifecycle.plugins.call("on_optimizer_step", optimizer, has_closure)
        return self.machine.step_began(id(optimizer), has_closure, within)

    def closure_ended(self, optimizer: Optimizer) -> bool:
        if (active := self._lifecycle.active) is not None and active.buffer is not None:
            active.buffer.are_rows_over = True
        return self.machine.closure_ended(id(optimizer))

    def closure_raised(self, optimizer: Optimizer, error: str) -> None:
        self.machine.closure_raised(id(optimizer), error)

    def step_ended(self, optimizer: Optimizer, found_inf: Tensor | None, within: bool) -> None:
        self.hooks.stretch.step_followed()
        self._lifecycle.plugins.call("on_optimizer_stepped", optimizer)
        if found_inf is not None and not within:
            self._overflows.note(found_inf)
        self.machine.step_ended(id(optimizer), within, self.hooks.scaler.in_step)

    def step_overflowed(self, optimizer: Optimizer) -> None:
        self._plugins.call_one(self._audit, self._audit.on_optimizer_overflowed, optimizer)
        self.machine.step_overflowed(id(optimizer), self.hooks.scaler.in_step)

    def loss_scaled(self) -> None:
        self._plugins.call_one(self._audit, self._audit.on_loss_scaled)

    def unscaling(self, optimizer: Optimizer) -> None:
        self._plugins.call_one(self._audit, self._audit.on_unscaling, optimizer)

    def unscaled(self, optimizer: Optimizer) -> None:
        self._plugins.call_one(self._audit, self._audit.on_unscaled, optimizer)

    def scaler_updated(self) -> None:
        self._plugins.call_one(self._audit, self._audit.on_scaler_updated)
        self.machine.scaler_updated()

    def scale_mistaken(self, reason: str, scaler: torch.amp.GradScaler | None) -> None:
        if self.scaler is None:
            self.scaler = scaler
        self.measurement.forget_scaled(reason)

    def holds_scaler(self) -> tuple[bool, bool]:
        is_held, policy = self._lifecycle.is_skipped, self._plugins.built_in.policy
        return is_held, is_held and policy is not None and policy.overrules_scaler


# --- loop connection ---


class LoopConnection:
    """Connects the steps of a monitor with a loop.

    Args:
        lifecycle: carries out the steps.
        cycle: opens and closes them.

    Attributes:
        overflows: takes what a fused optimizer found.
        loop: the followed loop; None where steps begin and end by hand.
    """

    def __init__(self, lifecycle: StepLifecycle, cycle: StepCycle) -> None:
        self._lifecycle, self._cycle = lifecycle, cycle
        self.overflows = OverflowLog(lifecycle.values)
        self.loop: FollowedLoop | None = None
        self._scaler: torch.amp.GradScaler | None = None
        self._scale_by_hand()

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The GradScaler, if one is known."""
        return self._scaler if self.loop is None else self.loop.scaler

    def use_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        """The scaler that the script has named."""
        self._scaler = scaler

    def follow(
        self,
        owner: object,
        module: nn.Module,
        optimizers: list[Optimizer],
        scaler: torch.amp.GradScaler | None,
        wrappers: Sequence[tuple[Any, Optimizer]],
    ) -> None:
        """Follow the loop by hooks from now on.

        Args:
            owner: kept alive by the optimizers.
            module: the watched model.
            optimizers: in the order in which they step.
            scaler: their GradScaler, if one is known.
            wrappers: around the optimizers, each with the one inside.
        """
        lifecycle = self._lifecycle
        self._scaler = scaler
        lifecycle.values.follow(True)
        lifecycle.state.follow()
        with outside_dispatch_modes():
            loop = FollowedLoop(owner, self._cycle, lifecycle, self.overflows, module, optimizers, scaler, wrappers)
            self.loop = loop
            lifecycle.hooks.follow(loop)
            lifecycle.plugins.restart()
            lifecycle.plugins.call("on_attach", module, optimizers)
            lifecycle.hooks.mark_stale()
            lifecycle.captures.modules.connect(
                loop.measurement.inverse_scale, loop.hooks.model.root_called, loop.part_called, loop.hooks.backward.awaited
            )
            # also where the first step is not monitored: a model that will be compiled takes only the hooks that it has then
            lifecycle.hooks.install()
            lifecycle.fence.cost()

    def continue_at(self, step: int) -> None:
        """The next step has this number."""
        self._lifecycle.state.clock.continue_at(step)
        self._lifecycle.hooks.wake()

    def disconnect(self) -> None:
        """Take every hook away."""
        lifecycle = self._lifecycle
        lifecycle.values.follow(False)
        lifecycle.hooks.uninstall()
        lifecycle.captures.modules.remove()
        lifecycle.captures.modules.reference.forget()
        if self.loop is not None:
            self._scaler = self.loop.scaler
            self.loop.remove_hooks()
            lifecycle.plugins.call("on_detach")
            self.loop = None
            lifecycle.hooks.follow(None)
            lifecycle.state.unfollow()
            self._scale_by_hand()

    def _scale_by_hand(self) -> None:
        """Without a followed loop, what is known of gradients inside of the model is the scaler that was named."""
        connection = weakref.ref(self)

        def inverse_scale() -> Tensor | None:
            scaler = None if (alive := connection()) is None else alive.scaler
            return None if (scale := scale_of(scaler)) is None else reciprocal(scale)

        self._lifecycle.captures.modules.connect(inverse_scale)


# --- One monitor at work: the step machine, what carries out its actions, and the life cycle of hooks ---


MetricFunction = Callable[..., Any] | None
Aggregation = Literal["mean", "sum", "min", "max"]
AggregationFunction = Aggregation | Callable[..., Any] | None

#: Suffixes that the tensors of an attention module add to its name.
_SUFFIXES = {n.ACTIVATION: ("", *(f"{head}.{of}" for head in ("", ".head_0") for of in ("query", "key", "value", "activation")))}
NO_MODULE = "there is no module to watch; pass it to ModuleMonitor(model) or call set_module(model) first"
_GONE = "the attached optimizers are gone; call monitor.detach(), then monitor.attach() with the new ones"
_UNATTACHED = (
    "the parameters have changed since the attached optimizer stepped last: another optimizer steps them, or the loop itself; call "
    "monitor.detach(), then monitor.attach() with the optimizer whose step() the loop calls"
)
_CAPTURED = "the loop was captured into a graph, whose replays call no hooks; call optimizer.step() outside of the graph"
#: Parts that are absent from states of monitors without a spike policy, and of earlier versions.
_OPTIONAL_PARTS = {"attempted", "acting", "clipping", "plugins"}


class Runtime:
    """The state of one monitor. :class:`torch_gradmon.ModuleMonitor` is its facade.

    Args:
        lifecycle: opens and closes steps.

    Attributes:
        cycle: the step machine's part that knows the numbers of steps.
        connection: with the training loop.
        owner: the facade, which lives as long as the loop that it watches.
    """

    def __init__(self, lifecycle: StepLifecycle) -> None:
        self.lifecycle = lifecycle
        self.cycle = StepCycle(lifecycle, lifecycle.state)
        self.connection = LoopConnection(lifecycle, self.cycle)
        self.owner: object = None
        self.mark: object = None  # by which watch() finds the monitor of a model
        self.join_ranks: Callable[[], object] = lambda: None  # when the loop begins, which is when a process may know other ranks

    # --- parts ---------------------------------------------------------------------------------------------------------------

    @property
    def fence(self) -> Fence:
        """The fence."""
        return self.lifecycle.fence

    @property
    def planner(self) -> Planner:
        """Knows the model and the requested metrics."""
        return self.lifecycle.planning.planner

    @property
    def captures(self) -> Captures:
        """The sources of values."""
        return self.lifecycle.captures

    @property
    def pipeline(self) -> RecordPipeline:
        """The records and their consumers."""
        return self.lifecycle.queue.pipeline

    @property
    def factory(self) -> RecordFactory:
        """Makes the records."""
        return self.lifecycle.queue.factory

    @property
    def state(self) -> StepState:
        """What the step machine knows."""
        return self.lifecycle.state

    @property
    def loop(self) -> FollowedLoop | None:
        """The followed loop; None where steps begin and end by hand."""
        return self.connection.loop

    @property
    def built_in(self) -> BuiltInPlugins:
        """The plugins that the monitor brings."""
        return self.lifecycle.plugins.built_in

    @property
    def plugins(self) -> Sequence[Plugin]:
        """All plugins, in the order in which they are called."""
        return tuple(self.lifecycle.plugins)

    # --- by hand -------------------------------------------------------------------------------------------------------------

    @fenced
    def begin_step(self, step: int) -> bool:
        """From now on steps begin and end by hand. Returns whether this one is monitored."""
        if self.state.clock.step is None:
            self.join_ranks()
        self.lifecycle.values.follow(True)
        self.lifecycle.hooks.wake()
        if self.loop is None and self.lifecycle.plugins.has("before_optimizer_step"):
            message = (
                "on_spike cannot act on a step, since the optimizers are not known: call attach() in addition to begin_step()"
            )
            self.fence.complaints.add("acting", message)
        self.cycle.begin_by_hand(step)
        active = self.lifecycle.active
        return active is not None and active.mode is Mode.MONITORED

    @fenced
    def end_step(self) -> None:
        """End the step and send it out."""
        self.lifecycle.hooks.wake()
        self.cycle.end()
        self._publish()

    @fenced
    def _end_last(self) -> None:
        self.cycle.finish()
        self._publish()

    def _publish(self) -> None:
        self.lifecycle.flush_pending()
        self.pipeline.finish()

    @fenced
    def log_sample_losses(self, ids: Any, losses: Tensor) -> None:
        """The losses of the rows of the open step, if it is measured."""
        active = self.lifecycle.active
        if self.state.is_open and active is not None and active.is_monitored and active.buffer is not None:
            active.buffer.log_sample_losses(ids, losses)
        elif not self.state.is_open and active is not None:
            self.fence.complaints.add(
                "rows", "log_sample_losses was called between two steps, and the rows are lost: call it before optimizer.step()"
            )

    @fenced
    def backfill(self) -> None:
        """Take the records of unmonitored steps that plugins still have. Waits for the device."""
        self.pipeline.backfill(self.built_in.recorder.rest())

    # --- metrics and the model -----------------------------------------------------------------------------------------------

    def add_metrics(
        self,
        sources: Sequence[str],
        name: str,
        function: MetricFunction,
        regex: Pattern,
        aggregation: AggregationFunction,
        every: int,
        **flags: bool,
    ) -> None:
        """Add one metric for each of ``sources``, all or none."""
        for flag, value in flags.items():
            check.flag(**{flag: value})
        check.positive_int("every", every)
        planner = self.planner
        made = [planner.registry.make(source, name, function, regex, aggregation, every=every, **flags) for source in sources]
        planner.registry.add(made, planner.matchable())
        planner.changed()
        self.replan()
        self.warn_of_idle(made[:1])

    def warn_of_idle(self, metrics: Iterable[Metric]) -> None:
        """Warn about each metric whose pattern matches nothing in the model, at the line that called the monitor."""
        planner = self.planner
        names = planner.matchable()
        # modules with MonitorMixin log activations under names of their own, which only the first forward shows
        if planner.module is not None and linkable(planner.module):
            metrics = [metric for metric in metrics if metric.source not in n.MODULE_SOURCES]
        for metric in metrics if names is not None else ():
            known = names[metric.source]  # type: ignore[index]
            if not any(metric.matches(name + suffix) for name in known for suffix in _SUFFIXES.get(metric.source, ("",))):
                pattern = metric.pattern.pattern
                warn_user(
                    f"the pattern {pattern!r} of the {metric.source} metric {metric.name!r} matches nothing "
                    f"in the model{nearest(pattern, known)}"
                )

    def link(self) -> None:
        """Link the modules that ask for their monitor."""
        assert self.planner.module is not None
        for module in linkable(self.planner.module):
            link(module, self.owner)

    # --- what is known by now ------------------------------------------------------------------------------------------------

    def would_monitor(self, step: int) -> bool:
        """Whether ``step`` is monitored by the cadence, or as one of the steps after a spike or under a live change."""
        clock, cadence, active = (
            self.state.clock,
            self.lifecycle.planning.cadence,
            self.lifecycle.active,
        )
        if clock.step is not None and step <= clock.step:
            is_open = self.state.is_open and step == clock.step and active is not None and active.is_monitored
            is_known = self.lifecycle.queue.newest(step) is not None or step in self.pipeline.history
            return is_open or is_known or cadence.foretells(step, None)
        ahead = step - clock.next_step if clock.step is None else (step - clock.step - 1) // clock.stride
        return cadence.foretells(step, ahead)

    def findings(self) -> list[LoopFinding]:
        """What the plugins have found so far."""
        of = self.built_in
        found = [fact for check in (of.audit, of.replicas, of.setup, of.data) if check is not None for fact in check.facts()]
        return [*found, *map(LoopFinding.of_dict, self.pipeline.directory.facts.get("foresight", ()))]

    @property
    def is_listening(self) -> bool:
        """Whether a value from inside of a forward counts."""
        return self.lifecycle.values.is_listening(self._may_be_forward)

    def _may_be_forward(self) -> bool:
        """Whether, though no step is open, this may be the forward of the next one: no hook saw the last one's, or this is the first,
        or only its backward pass shows it.
        """
        state = self.state
        may_be = state.patterns.hides_forward or state.patterns.is_undecided or state.clock.ended is None
        leads = self.loop is not None and not state.is_manual and torch.is_grad_enabled()
        return may_be and leads and self.lifecycle.planning.would_measure(state.clock.next_step)

    @property
    def stale_reason(self) -> str:
        """Why values of the last step would be stale; empty where they are not."""
        if self.fence.is_captured:
            return _CAPTURED
        if self.loop is None or self.state.is_manual:
            return ""
        if self.loop.is_orphaned:
            return _GONE
        in_step = self.state.is_open and not self.state.progress.has_stepped
        with outside_dispatch_modes():
            is_stale = self.lifecycle.plugins.call_one(self.built_in.audit, self.built_in.audit.is_stale, in_step)
        return _UNATTACHED if is_stale else ""

    def use_preset(self, name: PresetName) -> None:
        preset, make = PRESETS[name], self.planner.registry.make
        hidden = [make(source, metric, every=every, shown=False) for source, metric, every in preset.layer_metrics]
        self.planner.registry.replace_hidden(hidden)
        self.factory.summary.choice.use(preset.keys)
        self.pipeline.detection.add(SpikeDetector(), of_preset=True)
        self.pipeline.directory.annotate(preset=name)
        self.planner.changed()

    def counts(self) -> StepCounts:
        """Of the steps so far, as far as their values have come."""
        summary, policy, attempts = self.factory.summary, self.built_in.policy, self.state.clock.attempts
        skipped, rollbacks = (0, 0) if policy is None else (policy.skipped, policy.rollbacks)
        applied, overflowed = attempts - summary.not_applied, summary.not_applied - skipped - summary.interrupted
        return StepCounts(attempts, applied, skipped, overflowed, summary.nonfinite, rollbacks, summary.interrupted)

    def settle_now(self) -> StepRecord | None:
        """The record of the last step, None where it was not monitored. Waits for the device."""
        self._flush_fenced()  # does nothing inside a fenced call, such as on_spike
        return None if self.stale_reason else self.pipeline.last

    @fenced
    def judge_now(self) -> None:
        """Make the record of the last step, and judge already now what was logged since."""
        self.cycle.release()
        self.lifecycle.flush_pending()
        self.pipeline.detect_late()

    @fenced
    def _flush_fenced(self) -> None:
        self.cycle.release()
        self.lifecycle.flush_pending()

    # --- state ---------------------------------------------------------------------------------------------------------------

    @property
    def _parts(self) -> dict[str, Plugin]:
        """Of the state: those of plugins that the monitor brings. Those of the user's are in the part ``plugins`` by name."""
        parts = {"acting": self.built_in.policy, "clipping": self.built_in.clips}
        return {part: plugin for part, plugin in parts.items() if plugin is not None}

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers and lists. An open step that an optimizer has left by an error counts as ended."""
        state = self._state()
        if self.state.is_interrupted:
            for name in ("not_applied", "interrupted"):
                state["summary"][name] += 1
            state["attempted"] += not self.state.progress.is_attempted
        return state

    def _state(self) -> dict[str, Any]:
        self.settle_now()
        self.lifecycle.hooks.wake()  # so that plugins have seen all steps
        records = {"summary": self.factory.summary.state_dict(), "detectors": self.pipeline.detection.state_dict()}
        steps = {"next_step": self.state.next_attempt, "attempted": self.state.clock.attempts}
        parts = {part: plugin.state_dict() for part, plugin in self._parts.items()}
        states = {plugin.name: plugin.state_dict() for plugin in self.lifecycle.plugins.own}
        own = {name: state for name, state in states.items() if state is not None}
        return {**steps, **records, **parts, **({"plugins": own} if own else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, or leave everything as it was and raise."""
        self._check_state(state)
        before, part = self._state(), ""
        try:
            for part in before:
                if part in state or part not in _OPTIONAL_PARTS:
                    self._load_part(part, state[part])
        except Exception as error:  # a checkpoint may be of somebody else
            for each, value in before.items():
                self._load_part(each, value)
            raise ValueError(
                f"state[{part!r}] is not what ModuleMonitor.state_dict() gives, got {display(state.get(part))}; nothing was loaded"
            ) from error

    def _check_state(self, state: object) -> None:
        if not isinstance(state, Mapping):
            raise TypeError(f"expected the dict of ModuleMonitor.state_dict(), got {display(state)}")
        absent = {"next_step", "summary", "detectors"} - state.keys()
        if absent:
            raise ValueError(f"this is no state of a ModuleMonitor: it lacks {', '.join(sorted(absent))}; it has {sorted(state)}")
        mine = self.pipeline.detection.detector_set.detectors
        if not isinstance(state["detectors"], Mapping) or set(state["detectors"]) != set(mine):
            raise ValueError(
                f"state['detectors'] has {display(state['detectors'])} and this monitor detectors of {sorted(mine)}; "
                "add detectors of the same signals before loading"
            )

    def _load_part(self, part: str, value: Any) -> None:
        if part == "next_step":
            self.connection.continue_at(int(value))
        elif part == "attempted":
            self.state.clock.count_from(int(value))
        elif part in self._parts:
            self._parts[part].load_state_dict(value)
        elif part == "plugins":
            for plugin in self.plugins:
                if plugin.name in value:
                    plugin.load_state_dict(value[plugin.name])
        elif part == "summary":
            self.factory.summary.load_state_dict(value)
        else:
            self.pipeline.detection.load_state_dict(value)

    # --- life cycle ----------------------------------------------------------------------------------------------------------

    def set_reference(self, module: nn.Module | None, follows: bool) -> None:
        """Compare with ``module`` from now on; ``follows`` keeps it in the mode of the watched model."""
        reference = self.captures.modules.reference
        if module is None:
            reference.remove()
        else:
            reference.set(module, self.planner.rename, follows)
        self.captures.parameters.reference = {} if module is None else reference.parameters
        self.planner.changed()
        self.replan()

    def replan(self) -> None:
        """What is measured changed: register the hooks for it."""
        self.lifecycle.planning.replan(self.lifecycle.active, drop_hooks=False)

    def attach(
        self,
        optimizers: Sequence[Any],
        scaler: torch.amp.GradScaler | None,
        start_step: int | None,
        before: Callable[[nn.Module], object] = lambda module: None,
    ) -> None:
        """Follow the loop by hooks. ``before`` is called after all checks, and before the first hook is installed."""
        module, planner = self.planner.module, self.planner
        if module is None:
            raise ValueError(NO_MODULE)
        if self.loop is not None:
            raise ValueError("already attached; name all optimizers in one attach() call, or call detach() first")
        check.grad_scaler(scaler)
        if start_step is not None:
            check.step_number("start_step", start_step)
        bare = check.optimizers(module, optimizers, planner.source)
        source = planner.source
        if (source.outer is not None or source.is_pipeline) and self.built_in.policy is not None:
            raise ValueError(
                "on_spike= of this monitor skips or undoes steps. An engine that steps by itself does not allow that, and the stages of "
                'a pipeline would have to do it together; use on_spike="warn" or "raise"'
            )
        # the user's function may raise, so it runs before anything is installed
        self.lifecycle.planning.cadence.asked(self.state.clock.next_step if start_step is None else start_step)
        if self.fence.inert:
            return
        before(module)
        self.join_ranks()
        if start_step is not None:
            self.connection.continue_at(start_step)
        self.link()
        known = (scaler, self.connection.scaler, check.scaler_around(optimizers))
        chosen = next((each for each in known if each is not None), None)
        around = check.wrappers(optimizers)
        if (outer := planner.source.outer) is not None:
            around += [(outer, optimizer) for optimizer in bare]
        self.connection.follow(self, module, bare, chosen, around)

    def leave(self) -> None:
        """End the step in flight, or drop it if it is unfinished, and take what is recorded."""
        try:
            self.lifecycle.hooks.wake()
            with self.lifecycle.planning.exchange.without_others():
                self._end_last()
                self.backfill()
        finally:
            self.lifecycle.plugins.call("on_leave", self.state.clock.ended)

    def detach(self) -> None:
        """End the step, send what waits, and take every hook away."""
        with outside_dispatch_modes():
            try:
                self.leave()
            finally:
                self.connection.disconnect()
                self.lifecycle.planning.exchange.exchange.end()
                self.close()

    def close(self) -> None:
        """Let go of the model and close everything that is open; what comes later opens it again."""
        self.lifecycle.plugins.call("close")
        self.pipeline.close(self.captures.modules.ending())


def at_exit(runtime: Callable[[], Runtime | None], *_keep_alive: object) -> None:
    """Publish the last step when the interpreter ends. Of a runtime that is collected the publisher itself sends what is known of it."""
    if (alive := runtime()) is None:
        return
    try:
        alive.leave()
    finally:  # also where a spike in the last step is raised
        alive.close()

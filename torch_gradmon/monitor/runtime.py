"""One monitor at work: the loop that it follows by hooks, what is measured there, and the life cycle of the monitor."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..capture.gradients import inverse, reciprocal, scale_of
from ..capture.hooks import Handles, LoopLinks, WrappedMethod
from ..core import keys as n
from ..core import validation as check
from ..core.errors import display, nearest, warn_user
from ..core.fence import fenced
from ..core.keys import GRADIENT, GRADIENT_BEFORE_CLIP, Pattern
from ..core.records import Metric, StepRecord
from ..core.torch_modes import outside_dispatch_modes
from ..plugins.reactions import StepCounts
from ..plugins.setup_check import compiled
from ..spikes.detector import SpikeDetector
from ..statistics.request import accumulator_dtype
from ..step.active_step import Mode
from ..step.buffer import StepBuffer
from ..step.model_index import PLAIN_GRADIENTS
from ..step.planner import PRESETS, PresetName
from ..step.plugin import OptimizerContext, PluginContext
from .loop_hooks import BackwardHooks, ModelHooks, OptimizerHooks, Ownership, ScalerHooks, is_container, weakly
from .machine import StepCycle, StepMachine
from .options import Distributed
from .plugin_set import BuiltInPlugins
from .program import StepProgram
from .steps import StepLifecycle, link, linkable

if TYPE_CHECKING:
    from ..capture.reference import ReferencePass
    from ..core.loop_mistakes import LoopFinding

# --- An unmodified training loop: the events of its hooks go to the step machine, and what that asks for is measured ---


UNFINISHED = "the last backward pass was interrupted, as by an exception, so gradients before clipping were not seen"
_IN_BACKWARD = (
    "an optimizer stepped within the backward pass before this was known of the loop; they are measured from the next step on"
)
_LOST = "the attached optimizers are gone, and no step can end any more; call monitor.detach(), then monitor.attach() with the new ones"
_UNUSED = "its optimizer did not step in this step; its gradient counts in the step that uses it"
#: Warnings of the order of optimizers, in the places of which their own names come.
_ORDER = {
    "last": "{} was named earlier, and steps last; name optimizers in the order in which they step. From here on it counts so",
    "resting": "{}, whose step ends a monitored one, rests while others step; until it steps, {} ends them",
    "late": "{} had gradients and did not step for {steps} steps of another one, which were taken for one step and have one record; if "
    "it begins late, clear its gradients by zero_grad() before its first backward pass",
    "joined": "optimizers take turns of several steps each: before the last optimizer stepped first, {steps} steps of others were taken "
    "for one step with it, and their record is that of the last of them; from here on each step has one",
}


def _has_stepped(optimizer: Optimizer) -> bool:
    """Whether an optimizer has the state of earlier steps: Adagrad creates its state in advance, and plain SGD has none."""
    state = next(iter(optimizer.state.values()), None)
    if not state:
        return False
    steps = state.get("step", 1)
    return not isinstance(steps, Tensor) or steps.device.type != "cpu" or bool(steps)  # never waits for a device


class FollowedLoop:
    """Follows one loop by hooks, which call it inside of the fence: torch's events in, the step machine's events out, and what the machine
    asks for is measured in the open step; without one that takes values, nothing.

    The optimizers' hooks keep it alive, and with it the ``owner``. ``wrappers`` are around the optimizers, each with the one inside.

    Attributes:
        is_orphaned: all optimizers were collected.
    """

    def __init__(
        self,
        owner: object,
        lifecycle: StepLifecycle,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        wrappers: Sequence[tuple[Any, Optimizer]] = (),
    ) -> None:
        self.owner, self.lifecycle = owner, lifecycle
        self.state, self.fence, self._plugins = lifecycle.state, lifecycle.fence, lifecycle.plugins
        self._captures, self._planner, self._complaints = lifecycle.captures, lifecycle.planner, self.fence.complaints
        self._audit = self._plugins.built_in.audit
        self.is_orphaned, self._is_due = False, True
        self._accumulated: dict[Hashable, tuple[weakref.ref[Tensor], int]] = {}  # a gradient of an optimizer, and its version
        self.handles, self.removals = Handles(), contextlib.ExitStack()  # of hooks; what removes all of them, the last first
        self.removals.callback(self.handles.remove)
        self.program = StepProgram(self, optimizers[0])
        self.ownership = Ownership(optimizers, self.program)
        self.optimizer_hooks = OptimizerHooks(self, wrappers, module if is_container(module) else None)
        self.scaler_hooks = ScalerHooks(self, scaler)
        self.backward_hooks = BackwardHooks(self)
        self.removals.callback(self.backward_hooks.uninstall)
        self.model_hooks = ModelHooks(self, module)
        self.machine = StepMachine(lifecycle, self.state, self, self.ownership.order)
        self.release_gradients = self._captures.gradients.release  # the machine asks the source itself
        # follow the method that shows when gradients are final, and measure nothing in those that do not train
        boundary = self._planner.source.boundary
        around = {"step": self._around_passes, **dict.fromkeys(self._planner.source.trials, self._unseen)}
        for name, each in around.items():
            if hasattr(boundary, name):
                self.removals.callback(WrappedMethod(boundary, name, weakly(each)).remove)

    def _around_passes(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method in which all passes of a step run, unless gradients are off. What ranks have to agree on, they do before it, in
        which they wait for each other.
        """
        if torch.is_grad_enabled():
            self.fence.run(self.machine.passes_began)
        result = original(*args, **kwargs)
        if torch.is_grad_enabled():
            self.fence.run(self.machine.passes_ended)
        return result

    def _unseen(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.lifecycle.paused():
            return original(*args, **kwargs)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        return self.scaler_hooks.scales.scaler

    # --- hooks on parameters -------------------------------------------------------------------------------------------------

    def install(self) -> None:
        self._captures.parameters.shared = self.ownership.update(self._planner)
        self.backward_hooks.install()

    @fenced
    def gradient_came(self, position: int, gradient: Tensor | None) -> None:
        if self.machine.gradient_arrived():
            self._captures.gradients.measure_local(position, gradient, self.inverse_scale())

    @fenced
    def gradient_accumulated(self, position: int, parameter: Tensor) -> None:
        self._captures.gradients.commit_local(position)

    # --- what others ask -------------------------------------------------------------------------------------------------------

    def inverse_scale(self) -> Tensor | None:
        """The factor that unscales gradients inside the model at this moment."""
        # of an optimizer that has not stepped, since others under the same scaler may be unscaled already
        scales = map(self.scaler_hooks.inverse_scale, self.ownership.alive())
        return next((scale for scale in scales if scale is not None), None)

    def by_scale(self, positions: Sequence[int]) -> list[tuple[list[int], Tensor | None]]:
        """These positions by what their gradients have to be multiplied by at this moment."""
        wanted = set(positions)
        found = [
            (sorted(wanted.intersection(own)), self.scaler_hooks.inverse_scale(each)) for _, each, own in self.ownership.shares()
        ]
        return [(own, scale) for own, scale in found if own]

    def to_step(self, positions: Sequence[int]) -> list[int]:
        """Those of ``positions`` whose optimizers have not stepped in this step: later gradients of the others are not for it."""
        stepped = {position for name in self.state.progress.done for position in self.ownership.owned.get(name, ())}
        return [position for position in positions if position not in stepped]

    def leave_unused(self, buffer: StepBuffer) -> None:
        """The step ends. Gradients of optimizers that did not step in it are of the steps that use them, if any do."""
        index, order = self._planner.inventory, self.ownership.order
        if self.backward_hooks.awaited and not (self.state.leads or buffer.names_of(GRADIENT_BEFORE_CLIP) <= buffer.used):
            buffer.refuse_all(GRADIENT_BEFORE_CLIP, UNFINISHED)
        if len(order) == 1 or index is None or not self.state.leads:
            return
        owned = (self.ownership.owned.get(each) for each in order)
        # an optimizer uses all or none; one that shares parameters may have the first ones in common
        if resting := [own for own in owned if own and not buffer.used.issuperset((index.names[own[0]], index.names[own[-1]]))]:
            buffer.noted["rests"] = float(len(resting))
            names = {index.names[position] for own in resting for position in own}
            if left := buffer.names_of(GRADIENT_BEFORE_CLIP) & names - buffer.used:
                buffer.clear(GRADIENT_BEFORE_CLIP, left)
                buffer.absent.update(((source, name), _UNUSED) for source in (GRADIENT_BEFORE_CLIP, GRADIENT) for name in left)

    def context_of(self, optimizer: Hashable, is_overflowed: bool) -> OptimizerContext:
        """Of the optimizer that is about to step, or overflowed."""
        ownership, index, progress = self.ownership, self._planner.inventory, self.state.progress
        # of a fused optimizer, whose step reads it
        has_scaler = isinstance(getattr(ownership[optimizer], "found_inf", None), Tensor)
        alive = {name: each for name in ownership.order if (each := ownership[name]) is not None}
        stepped = [ownership.kind(name) for name in alive if name in progress.done and name != optimizer]
        left = {name: self.optimizer_hooks.holds.leftovers(each) for name, each in alive.items()}
        own = left.pop(optimizer, [])
        # of parameters whose gradients another one has from a skipped step, or will not use, since it overflowed
        ignored = frozenset[str]()
        if index is not None:
            positions = {p for parameters in left.values() if parameters for p in index.positions(parameters)}
            positions.update(*(ownership.owned.get(each, ()) for each in progress.overflowed))
            ignored = frozenset(index.names[p] for p in positions)
        return OptimizerContext(has_scaler, is_overflowed, " and ".join(stepped), ignored, bool(own))

    # --- events --------------------------------------------------------------------------------------------------------------

    def forward_began(self, in_eval: bool, in_closure: bool, counts: bool) -> None:
        """The model is called in training, perhaps in evaluation mode. ``counts``: no other hook reports this call."""
        self.fence.is_captured = False
        if counts:
            self._plugins.call_one(self._audit, self._audit.on_forward)
        self.machine.forward_began(in_eval, in_closure)
        if not self.ownership.alive():
            self._optimizers_lost()

    def _optimizers_lost(self) -> None:
        self.is_orphaned = True
        self._complaints.add("optimizers", _LOST)
        self._plugins.tell("audit", "on_optimizers_lost")

    def part_called(self, module: nn.Module) -> None:
        """A part of the model is called, by something else than the root."""
        state = self.state
        in_eval = state.patterns.trains_in_eval and not module.training  # in a step that a call in training mode has opened
        if not state.is_open or state.progress.is_tentative or in_eval:
            self.fence.run(self.model_hooks.forward_began, module, True)

    def gradient_complete(self, position: int) -> None:
        """The gradient of this parameter is complete, and its optimizer may step before the backward pass is over.

        If that optimizer has stepped after an earlier pass, this pass is another optimizer's turn, and its end measures the rest.
        """
        if self.machine.gradient_arrived():
            within = any(position in self.ownership.owned.get(name, ()) for name in self.state.in_backward.known)
            self._captures.gradients.before_clip([position] if within else self.to_step([position]), None)

    def pass_ended(self) -> None:
        if self._captures.modules is not None:
            self._captures.modules.backward_ended()

    def backward_ended(self, is_nested: bool) -> None:
        """A backward pass is over, and its gradients are accumulated and reduced."""
        self._plugins.call_one(self._audit, self._audit.on_backward_ended)
        if not (self.state.is_paused or self.ownership.alive()):
            self._optimizers_lost()
        self.machine.backward_ended(is_nested, self.scaler_hooks.in_step)

    def wrapper_began(self, optimizer: Optimizer) -> None:
        self._is_due = self._planner.source.is_due()
        if self._is_due:
            self.scaler_hooks.called.add(id(optimizer))
            self.machine.wrapper_began(id(optimizer))

    def wrapper_ended(self, optimizer: Optimizer) -> None:
        source = self._planner.source
        if self._is_due and source.has_overflowed():
            if not source.searches_scale() and (active := self.lifecycle.active) is not None:
                # so that it is judged
                active.annotations["skipped"] = "the engine leaves out steps whose gradients are not finite"
            self.step_overflowed(optimizer)
        else:
            self.machine.wrapper_ended(id(optimizer))

    def step_began(self, optimizer: Optimizer, has_closure: bool, within: bool) -> bool:
        """The optimizer is about to step, or to call its closure; whether it must change nothing. ``within`` a backward pass."""
        self.fence.is_captured = False
        if within:
            self.backward_hooks.optimizer_steps(optimizer)
        self.scaler_hooks.step_began(optimizer, takes_values=not self.state.is_open or self.lifecycle.has_values)
        self._plugins.call("on_optimizer_step", optimizer, has_closure)
        return self.machine.step_began(id(optimizer), has_closure, within)

    def closure_ended(self, optimizer: Optimizer) -> bool:
        """The closure has computed the gradients that the optimizer will use; whether it must change nothing."""
        if (active := self.lifecycle.active) is not None and active.buffer is not None:
            active.buffer.are_rows_over = True
        return self.machine.closure_ended(id(optimizer))

    def step_ended(self, optimizer: Optimizer, found_inf: Tensor | None, within: bool) -> None:
        """The optimizer has stepped, unless ``found_inf`` (of a fused optimizer under a GradScaler) is not zero."""
        self._plugins.call_one(self._audit, self._audit.on_optimizer_stepped, optimizer)
        self._plugins.tell("replicas", "on_optimizer_stepped", optimizer)
        if found_inf is not None and not within:
            self.lifecycle.values.note_overflow(found_inf)
        try:
            self.machine.step_ended(id(optimizer), within, self.scaler_hooks.in_step)
        finally:  # where a spike raises
            self.program.step_followed()

    def step_overflowed(self, optimizer: Optimizer) -> None:
        self._plugins.tell("audit", "on_optimizer_overflowed", optimizer)
        self.machine.step_overflowed(id(optimizer), self.scaler_hooks.in_step)

    def scaler_updated(self) -> None:
        self._plugins.tell("audit", "on_scaler_updated")
        self.machine.scaler_updated()

    # --- what the step machine asks for: gradients -------------------------------------------------------------------------------

    @property
    def waits_for_step(self) -> bool:
        """Whether gradients are final only when an optimizer steps, not when a backward pass ends."""
        return self._planner.source.is_final_at_step

    def measure_before_clip(self) -> None:
        """Measure gradients before clipping. Those of optimizers that have stepped count only if these step again in this step; those of
        optimizers that step within the backward pass were measured when they came.
        """
        scaled: list[int] = []
        plain: list[int] = []
        inverse_scale: Tensor | None = None
        gradients, source, state = self._captures.gradients, self._planner.source, self.state
        own = None if source is PLAIN_GRADIENTS else source.scale()
        if own is None and source.stays_scaled:
            own = scale_of(self.scaler)
        for name, optimizer, positions in self.ownership.shares():
            scale = self.scaler_hooks.inverse_scale(optimizer) if own is None else inverse(own)
            inverse_scale = inverse_scale if scale is None else scale
            if name is not None and name in state.in_backward.known:
                continue
            if name is not None and name in state.progress.done:
                # of use only if this optimizer steps again in this step; another one's backward may pass through here too
                gradients.before_clip(positions, scale, held_for=name)
            else:
                (plain if scale is None else scaled).extend(positions)
        if inverse_scale is not None:
            self.lifecycle.note({"amp_scale": inverse_scale.to(accumulator_dtype(inverse_scale.device)).reciprocal()})
        for positions, scale in ((plain, None), (scaled, inverse_scale)):
            if positions:
                gradients.before_clip(sorted(positions), scale)

    def measure_after_clip(self, optimizer: Hashable, *, with_unowned: bool, is_overflowed: bool = False) -> None:
        """Measure the gradients that the optimizer uses, and with the last one those that none uses."""
        positions = self.ownership.owned.get(optimizer, [])
        if self.backward_hooks.awaited and torch._C._current_graph_task_id() == -1:
            # it was interrupted, and neither another one came after it nor a clip by the monitor, which measures
            active, left = self.lifecycle.active, self._captures.gradients.not_clipped(positions)
            is_left = left == positions or self._captures.gradients.with_gradient(left)
            if is_left and active is not None and active.buffer is not None:
                active.buffer.refuse_all(GRADIENT_BEFORE_CLIP, UNFINISHED)
        scale = None if is_overflowed else self.scaler_hooks.inverse_scale(self.ownership[optimizer])
        self._captures.gradients.after_clip(positions, scale)
        if with_unowned and self.ownership.unowned:
            self.measure_unowned()

    def measure_unowned(self) -> None:
        """Measure the gradients that no optimizer uses, and none unscales."""
        self._captures.gradients.after_clip(self.ownership.unowned, self.scaler_hooks.inverse_scale(None))

    def shares_parameters(self, optimizer: Hashable, other: Hashable) -> bool:
        return not {*map(id, self.ownership.parameters(optimizer))}.isdisjoint(map(id, self.ownership.parameters(other)))

    def accumulates(self, optimizer: Hashable) -> bool:
        """Whether backward passes add to gradients of the optimizer that nothing has cleared since the last call; at first, whether it
        has gradients.
        """
        gradient, before = self._first_gradient(optimizer), self._accumulated.pop(optimizer, None)
        if gradient is None:
            return False
        version = 0 if gradient.is_inference() else gradient._version
        self._accumulated[optimizer] = weakref.ref(gradient), version
        return before is None or (before[0]() is gradient and before[1] != version)

    def was_cleared(self, optimizer: Hashable) -> bool:
        """Whether the gradients of the optimizer are none of those that the last call of :meth:`accumulates` has seen."""
        before = self._accumulated.get(optimizer)
        return before is not None and before[0]() is not self._first_gradient(optimizer)

    def _first_gradient(self, optimizer: Hashable) -> Tensor | None:
        return next((p.grad for p in self.ownership.parameters(optimizer) if p.grad is not None), None)

    def has_gradients(self, optimizer: Hashable) -> bool:
        return self._first_gradient(optimizer) is not None

    def gets_own_gradients(self) -> bool:
        """Whether the optimizers got gradients from different backward passes since they last stepped."""
        return bool(self._plugins.call_one(self._audit, self._audit.sees_alternation))

    # --- parameters and facts ----------------------------------------------------------------------------------------------------

    def measure_parameters(self) -> None:
        self._captures.parameters.measure(self.ownership.all_positions)

    def hold_parameters(self, optimizer: Hashable, *, with_unowned: bool, as_measured: bool) -> None:
        """Copy the parameters that the optimizer is about to change; ``as_measured``: :meth:`measure_parameters` was just called."""
        self._captures.parameters.before_step(self.ownership.of(optimizer, with_unowned), as_measured)

    def let_go(self, optimizer: Hashable, *, with_unowned: bool) -> None:
        self._captures.parameters.forget(self.ownership.of(optimizer, with_unowned))

    def measure_update(self, optimizer: Hashable) -> None:
        if (found := self.ownership[optimizer]) is not None:
            self._captures.parameters.after_step(self.ownership.owned.get(optimizer, []), found)

    def annotate(self, optimizer: Hashable, *, turns: int, is_first: bool) -> None:
        """Note facts about the optimizer that is about to step: learning rates, whether it resumes, and, if optimizers take turns, the
        most ``turns`` of one before.
        """
        found = self.ownership.references[optimizer]()
        if found is None:
            return
        facts = {"by_turns": float(turns)} if turns else {}
        if is_first and _has_stepped(found):
            facts["goes_on"] = 1.0
        self.lifecycle.note(facts, found, self.ownership.order.index(optimizer))

    # --- reasons and warnings ----------------------------------------------------------------------------------------------------

    def explain_missing(self, reason: str) -> None:
        if (active := self.lifecycle.active) is not None and active.buffer is not None:
            active.buffer.absent[GRADIENT_BEFORE_CLIP, ""] = reason

    def explain_in_backward(self, optimizer: Hashable) -> None:
        """The same, for an optimizer whose step within the backward pass was not expected."""
        if not self._captures.gradients.are_measured(self.ownership.owned.get(optimizer, [])):
            self.explain_missing(_IN_BACKWARD)

    def revive_hooks(self, optimizer: Hashable) -> None:
        """No backward pass was seen in this step: register hooks again if parameters were replaced."""
        found = self.ownership[optimizer]
        if found is not None and self.backward_hooks.revive(found):
            reason = "the hooks on parameters had died, as in a conversion of DTensors by .to(); they are registered again"
            self.explain_missing(reason)
            self._tell_missing("hooks", reason)

    def forget_scaled(self, reason: str) -> None:
        """The gradients measured so far in this step were divided by a wrong scale, or by none: drop them."""
        self._captures.gradients.drop_scaled(reason)
        if self._captures.modules is not None:
            self._captures.modules.drop_scaled(reason)
        self._tell_missing("scaler", reason)

    def _tell_missing(self, key: str, reason: str) -> None:
        self._complaints.add(key, f"{reason}; gradients before clipping are missing in step {self.state.step}")

    def writes_early(self, optimizer: Hashable) -> bool:
        """Whether the optimizer wrote to its parameters before its closure had computed gradients."""
        hooks, found = self.optimizer_hooks, self.ownership[optimizer]
        if not hooks.may_skip or found is None or not hooks.holds.was_changed(found):
            return False
        message = "writes to the parameters before its closure is called, so that its steps cannot be skipped"
        self._complaints.add("skip:closure", f"{type(found).__name__} {message}; attach the optimizer that it wraps instead")
        return True

    def warn_order(self, what: str, steps: int, *optimizers: Hashable) -> None:
        """Optimizers step in another order than they were named, see :data:`_ORDER`."""
        self._complaints.add("order", _ORDER[what].format(*map(self.ownership.place, optimizers), steps=steps))

    def warn_in_backward(self) -> None:
        """Nothing can be done about spikes of an optimizer that steps within the backward pass."""
        if self.optimizer_hooks.may_skip:
            message = "optimizers step within the backward pass, before all gradients are there: nothing is done about spikes"
            self._complaints.add("acting", message)


# --- One monitor at work: the step machine, what carries out its actions, and the life cycle of hooks ---


MetricFunction = Callable[..., Any] | None
Aggregation = Literal["mean", "sum", "min", "max"]
AggregationFunction = Aggregation | Callable[..., Any] | None

#: Suffixes that the tensors of an attention module add to its name.
_SUFFIXES = {n.ACTIVATION: ("", *(f"{head}.{of}" for head in ("", ".head_0") for of in ("query", "key", "value", "activation")))}
NO_MODULE = "there is no module to watch; pass it to ModuleMonitor(model) or call set_module(model) first"
_UNATTACHED = (
    "the parameters have changed since the attached optimizer stepped last: another optimizer steps them, or the loop itself; call "
    "monitor.detach(), then monitor.attach() with the optimizer whose step() the loop calls"
)
_CAPTURED = "the loop was captured into a graph, whose replays call no hooks; call optimizer.step() outside of the graph"
#: Parts that are absent from states of monitors without a spike policy, and of earlier versions.
_OPTIONAL_PARTS = {"attempted", "acting", "clipping", "plugins"}


class Runtime:
    """The state of one monitor. :class:`torch_gradmon.ModuleMonitor` is its facade.

    Attributes:
        lifecycle: opens and closes steps.
        cycle: decides when; the part of the step machine that is there without a loop.
        named_scaler: the GradScaler that the script has named, or that was found around its optimizers.
        compared: in how many steps the parameters of ranks are compared once, 0 for never, and what is known of ranks.
        owner: the facade, which lives as long as the loop that it watches.
    """

    def __init__(self, lifecycle: StepLifecycle) -> None:
        self.lifecycle, self.state, self.fence, self.captures = lifecycle, lifecycle.state, lifecycle.fence, lifecycle.captures
        self.planner, self.pipeline, self.factory = lifecycle.planner, lifecycle.pipeline, lifecycle.pipeline.factory
        self.cycle = StepCycle(lifecycle, self.state)
        self.named_scaler: torch.amp.GradScaler | None = None
        self.compared = 0, Distributed()
        self.owner: object = None
        self.mark: object = None  # by which watch() finds the monitor of a model
        self._scale_by_hand()

    @property
    def loop(self) -> FollowedLoop | None:
        """The followed loop; None where steps begin and end by hand."""
        return self.lifecycle.loop  # type: ignore[no-any-return]

    @property
    def built_in(self) -> BuiltInPlugins:
        return self.lifecycle.plugins.built_in

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        return self.named_scaler if self.loop is None else self.loop.scaler

    def join_ranks(self) -> None:
        """Compare ranks from now on if there are several, which a process may only know when its loop begins."""
        (every, of), ranks = self.compared, self.captures.measurer.ranks
        if not every or self.built_in.replicas is not None or ranks.count < 2:
            return
        from ..plugins.replica_check import ReplicaCheck  # not needed by a single process

        distinct, records, recorder = compiled("distinct", of.distinct), self.pipeline.history.sampled, self.built_in.recorder
        look = list if recorder is None else recorder.look
        plugin = ReplicaCheck(every, of.sync_every, distinct, ranks, self.planner, records, look)
        self.lifecycle.plugins.use(self.built_in._replace(replicas=plugin))
        plugin.context = PluginContext(self.lifecycle, plugin)

    # --- by hand -------------------------------------------------------------------------------------------------------------

    @fenced
    def begin_step(self, step: int) -> bool:
        """From now on steps begin and end by hand. Returns whether this one is monitored."""
        if self.state.step is None:
            self.join_ranks()
        self.lifecycle.values.is_detached = False
        self.lifecycle.wake()
        if self.loop is None and self.lifecycle.plugins.listening["before_optimizer_step"]:
            message = (
                "on_spike cannot act on a step, since the optimizers are not known: call attach() in addition to begin_step()"
            )
            self.fence.complaints.add("acting", message)
        self.cycle.begin_by_hand(step)
        active = self.lifecycle.active
        return active is not None and active.mode is Mode.MONITORED

    @fenced
    def end_step(self, is_last: bool = False) -> None:
        """End the step and publish it; where it ``is_last`` and unfinished, it is dropped."""
        self.lifecycle.wake()
        (self.cycle.finish if is_last else self.cycle.end)()
        self.lifecycle.flush_pending()
        self.pipeline.finish()
        self.pipeline.publisher.publish()

    @fenced
    def log_sample_losses(self, ids: Any, losses: Tensor) -> None:
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
        if (recorder := self.built_in.recorder) is not None:
            self.pipeline.backfill(recorder.rest())

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
        for flag, value in flags.items():
            check.flag(**{flag: value})
        check.positive_int("every", every)
        planner = self.planner
        made = [planner.registry.make(source, name, function, regex, aggregation, every=every, **flags) for source in sources]
        planner.registry.add(made, planner.matchable())
        planner.changed()
        self.lifecycle.replan()
        self.warn_of_idle(made[:1])

    def warn_of_idle(self, metrics: Iterable[Metric]) -> None:
        """Warn about each metric whose pattern matches nothing in the model, at the line that called the monitor."""
        planner = self.planner
        names = planner.matchable()
        # modules with MonitorMixin log activations under names of their own, which only the first forward shows
        if (module := planner.module()) is not None and linkable(module):
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
        watched = self.planner.module()
        assert watched is not None
        for module in linkable(watched):
            link(module, self.owner)

    def use_preset(self, name: PresetName) -> None:
        preset, make = PRESETS[name], self.planner.registry.make
        hidden = [make(source, metric, every=every, shown=False) for source, metric, every in preset.layer_metrics]
        self.planner.registry.replace_hidden(hidden)
        self.factory.summary.choice.use(preset.keys)
        self.pipeline.detectors.add(SpikeDetector(), of_preset=True)
        self.pipeline.directory.annotate(preset=name)
        self.planner.changed()

    @property
    def reference(self) -> ReferencePass | None:
        return None if self.captures.modules is None else self.captures.modules.reference

    def set_reference(self, module: nn.Module | None, follows: bool) -> None:
        """Compare with ``module`` from now on; ``follows`` keeps it in the mode of the watched model."""
        if module is not None:
            self.captures.needed_modules().needed_reference().set(module, self.planner.rename, follows)
        elif self.reference is not None:
            self.reference.remove()
        reference = self.reference
        self.captures.parameters.reference = {} if reference is None else reference.parameters
        self.planner.changed()
        self.lifecycle.replan()

    # --- what is known by now ------------------------------------------------------------------------------------------------

    def would_monitor(self, step: int) -> bool:
        """Whether ``step`` is monitored by the cadence, or as one of the steps after a spike or under a live change."""
        state, cadence, active = self.state, self.lifecycle.cadence, self.lifecycle.active
        if state.step is not None and step <= state.step:
            is_open = state.is_open and step == state.step and active is not None and active.is_monitored
            is_known = step in self.pipeline.history or any(pending.step == step for pending in self.pipeline.waiting)
            return is_open or is_known or cadence.foretells(step, None)
        ahead = step - state.next_step if state.step is None else (step - state.step - 1) // state.stride
        return cadence.foretells(step, ahead)

    def findings(self) -> list[LoopFinding]:
        from ..core.loop_mistakes import LoopFinding

        of = self.built_in
        found = [fact for check in (of.audit, of.replicas, of.setup, of.data) if check is not None for fact in check.facts()]
        return [*found, *map(LoopFinding.of_dict, self.pipeline.directory.facts.get("foresight", ()))]

    @property
    def is_listening(self) -> bool:
        """Whether a value from inside of a forward counts: in a step that is measured, and where this may be the forward of the next one,
        since no hook saw the last one's, or it is the first, or only its backward pass shows it.
        """
        state, values, passes = self.state, self.lifecycle.values, self.captures.passes
        if passes.paused or not passes.in_training:
            return False
        if state.is_open:
            return values.buffer is not None and values.is_recording
        may_be = state.patterns.hides_forward or state.patterns.is_undecided or state.ended is None
        leads = self.loop is not None and not state.is_manual and torch.is_grad_enabled()
        return may_be and leads and self.lifecycle.would_measure(state.next_step)

    @property
    def stale_reason(self) -> str:
        """Why values of the last step would be stale; empty where they are not."""
        if self.fence.is_captured:
            return _CAPTURED
        if self.loop is None or self.state.is_manual:
            return ""
        if self.loop.is_orphaned:
            return _LOST
        in_step = self.state.is_open and not self.state.progress.has_stepped
        with outside_dispatch_modes():
            is_stale = self.lifecycle.plugins.call_one(self.built_in.audit, self.built_in.audit.is_stale, in_step)
        return _UNATTACHED if is_stale else ""

    def counts(self) -> StepCounts:
        """Of the steps so far, as far as their values have come."""
        summary, policy, attempts = self.factory.summary, self.built_in.policy, self.state.attempts
        skipped, rollbacks = (0, 0) if policy is None else (policy.skipped, policy.rollbacks)
        applied, overflowed = attempts - summary.not_applied, summary.not_applied - skipped - summary.interrupted
        return StepCounts(attempts, applied, skipped, overflowed, summary.nonfinite, rollbacks, summary.interrupted)

    def settle_now(self, judges: bool = False) -> StepRecord | None:
        """The record of the last step, None where it was not monitored; ``judges`` what was logged since by now. Waits for the device."""
        self._settle(judges)  # does nothing inside a fenced call, such as on_spike
        return None if self.stale_reason else self.pipeline.last

    @fenced
    def _settle(self, judges: bool) -> None:
        self.cycle.release()
        self.lifecycle.flush_pending()
        if judges:
            self.pipeline.detect_late()

    # --- state ---------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers and lists. An open step that an optimizer has left by an error counts as ended."""
        state = self._state()
        if self.state.is_open and self.state.is_driven and self.state.progress.begun:
            for name in ("not_applied", "interrupted"):
                state["summary"][name] += 1
            state["attempted"] += not self.state.progress.is_attempted
        return state

    def _state(self) -> dict[str, Any]:
        self.settle_now()
        self.lifecycle.wake()  # so that plugins have seen all steps
        records = {"summary": self.factory.summary.state_dict(), "detectors": self.pipeline.detectors.state_dict()}
        steps = {"next_step": self.state.next_attempt, "attempted": self.state.attempts}
        policy, clips = self.built_in.policy, self.lifecycle.plugins.clips
        parts = {} if policy is None else {"acting": policy.state_dict()}
        parts["clipping"] = {} if clips is None else clips.state_dict()
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
        mine = self.pipeline.detectors.detectors
        if not isinstance(state["detectors"], Mapping) or set(state["detectors"]) != set(mine):
            raise ValueError(
                f"state['detectors'] has {display(state['detectors'])} and this monitor detectors of {sorted(mine)}; "
                "add detectors of the same signals before loading"
            )

    def _load_part(self, part: str, value: Any) -> None:
        if part == "next_step":
            self._continue_at(int(value))
        elif part == "attempted":
            self.state.attempts = int(value)
        elif part == "plugins":
            for plugin in self.lifecycle.plugins:
                if plugin.name in value:
                    plugin.load_state_dict(value[plugin.name])
        elif part == "clipping":
            if value != {} or self.lifecycle.plugins.clips is not None:
                self.lifecycle.plugins.needed_clips().load_state_dict(value)
        else:
            acting: Any = self.built_in.policy
            {"summary": self.factory.summary, "detectors": self.pipeline.detectors, "acting": acting}[part].load_state_dict(value)

    def _continue_at(self, step: int) -> None:
        self.state.next_step = step
        self.lifecycle.wake()

    # --- life cycle ----------------------------------------------------------------------------------------------------------

    def run_began(self) -> None:
        """A run directory is there, if any: it gets more statistics, and other processes may ask for details."""
        if (path := self.pipeline.directory.path) is not None:
            self.factory.summary.choice.store_all_columns()
            self.built_in.detail.listen(path)

    def attach(
        self,
        optimizers: Sequence[Any],
        scaler: torch.amp.GradScaler | None,
        start_step: int | None,
        before: Callable[[nn.Module], object] = lambda module: None,
    ) -> None:
        """Follow the loop by hooks. ``before`` is called after all checks, and before the first hook is installed."""
        module, planner = self.planner.module(), self.planner
        if module is None:
            raise ValueError(NO_MODULE)
        if self.loop is not None:
            raise ValueError("already attached; name all optimizers in one attach() call, or call detach() first")
        check.grad_scaler(scaler)
        if start_step is not None:
            check.step_number("start_step", start_step)
        source = planner.source
        bare = check.optimizers(module, optimizers, source)
        if (source.outer is not None or source.is_pipeline) and self.built_in.policy is not None:
            raise ValueError(
                "on_spike= of this monitor skips or undoes steps. An engine that steps by itself does not allow that, and the stages of "
                'a pipeline would have to do it together; use on_spike="warn" or "raise"'
            )
        # the user's function may raise, so it runs before anything is installed
        self.lifecycle.cadence.asked(self.state.next_step if start_step is None else start_step)
        if self.fence.inert:
            return
        before(module)
        self.join_ranks()
        if start_step is not None:
            self._continue_at(start_step)
        self.link()
        known = (scaler, self.named_scaler, check.scaler_around(optimizers))
        self.named_scaler = next((each for each in known if each is not None), None)
        around = check.wrappers(optimizers)
        if (outer := planner.source.outer) is not None:
            around += [(outer, optimizer) for optimizer in bare]
        self._follow(module, bare, around)

    def _follow(self, module: nn.Module, optimizers: list[Optimizer], wrappers: Sequence[tuple[Any, Optimizer]]) -> None:
        lifecycle = self.lifecycle
        lifecycle.values.is_detached = False
        self.state.follow()
        with outside_dispatch_modes():
            loop = FollowedLoop(self, lifecycle, module, optimizers, self.named_scaler, wrappers)
            lifecycle.loop = loop
            lifecycle.plugins.restart()
            lifecycle.plugins.call("on_attach", module, optimizers)
            lifecycle.installed_for = None
            awaited, root_called = loop.backward_hooks.awaited, loop.model_hooks.root_called
            self.captures.passes.links = LoopLinks(loop.inverse_scale, awaited, root_called, loop.part_called)
            # also where the first step is not monitored: a model that will be compiled takes only the hooks that it has then
            lifecycle.install()
            self.fence.cost()

    def _unfollow(self) -> None:
        lifecycle = self.lifecycle
        lifecycle.values.is_detached = True
        lifecycle.uninstall()
        if self.captures.modules is not None:
            self.captures.modules.remove()
        if self.reference is not None:
            self.reference.forget()
        if self.loop is not None:
            self.named_scaler = self.loop.scaler
            self.loop.removals.close()
        try:
            lifecycle.plugins.call("on_detach")
        finally:
            if self.loop is not None:
                lifecycle.loop = None
                self.state.is_driven = False
                self._scale_by_hand()

    def _scale_by_hand(self) -> None:
        """Without a followed loop, what is known of gradients inside of the model is the scaler that was named."""
        runtime = weakref.ref(self)

        def inverse_scale() -> Tensor | None:
            scaler = None if (alive := runtime()) is None else alive.scaler
            return None if (scale := scale_of(scaler)) is None else reciprocal(scale)

        self.captures.passes.links = LoopLinks(inverse_scale, set())

    def leave(self) -> None:
        """End the step in flight, or drop it if it is unfinished, and take what is recorded."""
        self.lifecycle.wake()
        with self.lifecycle.exchange.without_others():
            self.end_step(True)
            self.backfill()

    def detach(self) -> None:
        with outside_dispatch_modes(), contextlib.ExitStack() as then:  # from below, also where a spike or a warning is raised
            then.callback(self.close)
            then.callback(self.lifecycle.exchange.end)
            then.callback(self._unfollow)
            self.leave()

    def close(self) -> None:
        """Close everything that is open; what comes later opens it again."""
        self.pipeline.close(self.captures.passes.ending())


def at_exit(runtime: Callable[[], Runtime | None], *_keep_alive: object) -> None:
    """Publish the last step when the interpreter ends. Of a runtime that is collected the publisher itself sends what is known of it."""
    if (alive := runtime()) is None:
        return
    with contextlib.ExitStack() as then:  # from below, also where a spike in the last step is raised
        then.callback(alive.close)
        then.callback(alive.lifecycle.plugins.call, "end_run")
        alive.leave()

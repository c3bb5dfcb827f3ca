"""What carries out the actions of the step machine: steps that open, measure and close."""

from __future__ import annotations

import re
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..capture.gradients import GradientCapture, inverse
from ..capture.measurer import Measurer
from ..capture.module_source import ModuleSource
from ..capture.parameters import ParameterCapture
from ..core.fence import Fence
from ..core.keys import GRADIENT_BEFORE_CLIP
from ..core.torch_modes import Unsaved, outside_dispatch_modes, rng_states, unsaved_of
from ..statistics.request import accumulator_dtype
from ..step.active_step import IDLE, ActiveStep, Mode, RecordedStep
from ..step.buffer import StepBuffer
from ..step.exchange import ExchangePolicy
from ..step.model_index import PLAIN_GRADIENTS, ModelIndex
from ..step.planner import OF_MODULES, Planner
from ..step.plugin import OptimizerContext
from ..step.record_builder import PendingStep
from .loop_hooks import LoopHooks
from .machine import StepState
from .optimizer_hooks import GradientHolds, ScalerHooks
from .plugin_set import PluginSet
from .records import PendingQueue, RecordFactory
from .values import ValueLog

# --- Which steps are monitored: those that the script asks for, as the plugins change it ---


class Cadence:
    """Decides for each step whether it is monitored.

    Args:
        asked: whether the script requests a step, by its number. Two calls need not return the same answer.
        plugins: each may change the decision.
        every: the script requests each step that this divides, and no others; None if it decides otherwise.
    """

    def __init__(self, asked: Callable[[int], bool], plugins: PluginSet, every: int | None) -> None:
        self.asked, self.plugins, self.every = asked, plugins, every
        self._asked: tuple[int, bool] | None = None
        self._answer: tuple[int, bool] | None = None

    def wants(self, step: int) -> bool:
        """Whether the next step is monitored, if it is ``step``. The script is asked once for each, and so are the plugins unless
        :meth:`plugins_changed`.
        """
        if self._answer is None or self._answer[0] != step:
            if self._asked is None or self._asked[0] != step:
                self._asked = step, bool(self.asked(step))
            self._answer = step, self.plugins.wants(step, self._asked[1])
        return self._answer[1]

    def idle_ahead(self, step: int) -> int:
        """How many steps from ``step`` on are certainly idle and seen by no plugin, without the last one before a monitored one."""
        if self.every is None:
            return 0
        ahead = -step % self.every - 1
        return self.plugins.may_miss(ahead) if ahead > 0 else 0

    def plugins_changed(self) -> None:
        """Ask the plugins again."""
        self._answer = None

    def ask_again(self) -> None:
        """Forget the decision about the next step."""
        self._asked = self._answer = None

    def foretells(self, step: int, ahead: int | None) -> bool:
        """Whether ``step`` would be monitored, by what is known now.

        Args:
            step: its number.
            ahead: how many steps lie between it and the next one; None for a step that is over.
        """
        return self.plugins.foretells(step, bool(self.asked(step)), ahead)


# --- The sources of values: gradients, parameters, and what modules take and return ---


class Captures:
    """All sources of one monitor, begun and ended together.

    Attributes:
        gradients: of micro-batches, before clipping, and as the optimizer uses them.
        parameters: and what the optimizer changes of them.
        modules: outputs, inputs, their gradients, attention, the reference module.
        had_root_inputs: a hook was on what the model takes before the open step began.
    """

    def __init__(self, measurer: Measurer, fence: Fence, update_sample: int | re.Pattern[str] | None) -> None:
        self.measurer = measurer
        self.gradients = GradientCapture(measurer)
        self.parameters = ParameterCapture(measurer, update_sample)
        self.modules = ModuleSource(measurer, fence)
        self.had_root_inputs = False

    def seal(self) -> None:
        """A step is about to open; what it needs may be registered with it."""
        self.had_root_inputs = self.modules.hooks.on_root_inputs

    def begin(self, step: ActiveStep, planner: Planner, by_hand: bool) -> None:
        """Begin a step that takes values."""
        assert step.buffer is not None
        assert planner.inventory is not None
        if planner.inventory.homes:
            self.measurer.ranks.count_at(planner.inventory.homes)
        step.buffer.used.update(planner.inventory.foreign)  # their ranks use them
        by_batch = planner.measures_each_batch and step.mode is Mode.MONITORED
        self.gradients.begin(step.buffer, step.plans, planner.inventory, by_batch)
        self.parameters.begin(step.buffer, step.plans, planner.inventory)
        self.modules.begin(step.buffer, step.due, planner.inventory, by_hand)

    def end(self) -> None:
        """End the step, and let go of everything that it held."""
        for source in (self.gradients, self.parameters, self.modules):
            source.end()


# --- Which optimizer has which parameters, and by what their gradients are scaled ---


class Ownership:
    """The optimizers of one loop, by the names that the step machine has for them, and the positions of their parameters.

    Args:
        optimizers: those attached.

    Attributes:
        unowned: positions of parameters that no optimizer has.
        shared: positions of parameters that several optimizers have.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._references = {id(optimizer): weakref.ref(optimizer) for optimizer in optimizers}
        self._first = weakref.ref(optimizers[0])
        self._owned: dict[Hashable, list[int]] = {}
        self.unowned: list[int] = []
        self.shared: set[int] = set()
        self._group_sizes: list[int] = []
        self._source = PLAIN_GRADIENTS

    def __getitem__(self, name: Hashable) -> Optimizer | None:
        """The optimizer, while it exists; None for the name None, under which unowned parameters stand."""
        reference = self._references.get(name)  # type: ignore[call-overload]
        return None if reference is None else reference()

    def alive(self, order: Iterable[Hashable]) -> list[Optimizer]:
        """The optimizers that still exist, in this order."""
        return [optimizer for name in order if (optimizer := self[name]) is not None]

    @property
    def is_orphaned(self) -> bool:
        """Whether no optimizer exists any more."""
        return self._first() is None and all(reference() is None for reference in self._references.values())

    def positions(self, name: Hashable) -> list[int]:
        """Positions of the optimizer's parameters."""
        return self._owned.get(name, [])

    def all_positions(self) -> list[int]:
        """Positions of all parameters."""
        return sorted({*self.unowned}.union(*self._owned.values()))

    def update(self, planner: Planner, order: Iterable[Hashable]) -> None:
        """Take the groups of the optimizers as they are now."""
        optimizers, self._source = self.alive(order), planner.source
        self._group_sizes = self._sizes(optimizers)
        owned, self.unowned = planner.positions(optimizers)
        self._owned = dict(owned.items())
        owners = Counter(position for positions in self._owned.values() for position in positions)
        self.shared = {position for position, count in owners.items() if count > 1}

    def has_changed(self, order: Iterable[Hashable]) -> bool:
        """Whether an optimizer got or lost parameters since the last :meth:`update`."""
        return self._group_sizes != self._sizes(self.alive(order))

    def _sizes(self, optimizers: Iterable[Optimizer]) -> list[int]:
        if self._source is not PLAIN_GRADIENTS:
            return [len(self._source.tensors_of(optimizer)) for optimizer in optimizers]
        return [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]

    def shares(self, order: Iterable[Hashable]) -> Iterator[tuple[Hashable | None, list[int]]]:
        """The positions of each optimizer that exists; under None those that no optimizer has."""
        for name in order:
            if self[name] is not None:
                yield name, self.positions(name)
        yield None, self.unowned

    def to_step(self, positions: Iterable[int], done: Iterable[Hashable]) -> list[int]:
        """Those of ``positions`` whose optimizers are not ``done``: later gradients of the others are not for this step."""
        stepped = {position for name in done for position in self.positions(name)}
        return [position for position in positions if position not in stepped]

    def by_scale(
        self, positions: Iterable[int], order: Iterable[Hashable], scaler: ScalerHooks
    ) -> list[tuple[list[int], Tensor | None]]:
        """These positions by what their gradients have to be multiplied by at this moment."""
        wanted = set(positions)
        found = [(sorted(wanted.intersection(own)), scaler.inverse_scale(self[name])) for name, own in self.shares(order)]
        return [(own, scale) for own, scale in found if own]


# --- decisions ---


class Decisions:
    """Describes optimizers to plugins that decide about their steps.

    Args:
        ownership: which optimizer has which parameters.
        order: the optimizers in the order in which they step; shared with the step machine, which changes it.
        holds: has the gradients of skipped steps.
        planner: knows the model.
    """

    def __init__(self, ownership: Ownership, order: list[Hashable], holds: GradientHolds, planner: Planner) -> None:
        self._ownership, self._order, self._holds, self._planner = ownership, order, holds, planner

    def context_of(
        self, optimizer: Hashable, done: Set[Hashable], overflowed: Set[Hashable], is_overflowed: bool
    ) -> OptimizerContext:
        """What plugins may know of an optimizer that is about to step."""
        holds, found = self._holds, self._ownership[optimizer]
        alive = [name for name in self._order if self._ownership[name] is not None]
        stepped = [type(self._ownership[name]).__name__ for name in alive if name in done and name != optimizer]
        left = {name: holds.leftovers(other) for name in alive if (other := self._ownership[name]) is not None}
        own = left.pop(optimizer, [])
        has_scaler = isinstance(getattr(found, "found_inf", None), Tensor)  # of a fused optimizer, whose step reads it
        return OptimizerContext(has_scaler, is_overflowed, " and ".join(stepped), self._ignored(left, overflowed), bool(own))

    def _ignored(self, left: Mapping[Hashable, Sequence[Tensor]], overflowed: Set[Hashable]) -> frozenset[str]:
        """Names of the parameters whose gradients another optimizer has from a skipped step, or will not use, since it overflowed."""
        index = self._planner.inventory
        if index is None:
            return frozenset()
        positions = {p for parameters in left.values() if parameters for p in index.positions(parameters)}
        positions |= {p for name in overflowed for p in self._ownership.positions(name)}
        return frozenset(index.names[p] for p in positions)

    def accept_leftovers(self) -> None:
        """Gradients that are left of skipped steps may be used after all."""
        self._holds.accept()


# --- Links from modules to their monitor ---


class Linkable:
    """Marks modules that get a link to their monitor; see :class:`torch_gradmon.MonitorMixin`."""


def linkable(model: nn.Module) -> list[nn.Module]:
    """The parts of ``model``, itself included, that get a link."""
    return [module for module in model.modules() if isinstance(module, Linkable)]


def link(module: nn.Module, monitor: object) -> None:
    """Link a module with its monitor, which it does not keep alive. Copies and saved files of the module have no link."""
    hooks: Any = module._forward_hooks
    (unsaved_of(hooks) or Unsaved(hooks)).monitor = weakref.ref(monitor)


def linked(module: object) -> Any:
    """The monitor that ``module`` is linked with, or None."""
    unsaved = unsaved_of(getattr(module, "__dict__", {}).get("_forward_hooks"))
    return None if unsaved is None or unsaved.monitor is None else unsaved.monitor()


def unlink(module: nn.Module) -> None:
    """Remove the link of a module, if it has one."""
    if (unsaved := unsaved_of(vars(module).get("_forward_hooks"))) is not None:
        unsaved.monitor = None
        unsaved.leave_if_empty()


# --- hook schedule ---


class DrivingLoop(Protocol):
    """A loop whose hooks drive the steps."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers that still exist, in the order in which they step."""

    def groups_changed(self) -> bool:
        """Whether an optimizer got or lost parameters since hooks were registered."""

    def leave_unused(self, buffer: StepBuffer) -> None:
        """The step ends. Gradients of optimizers that did not step in it are of the steps that use them, if any do."""

    def install(self, planner: Planner) -> None:
        """Register the hooks on parameters that a monitored step needs."""

    def uninstall(self) -> None:
        """Take them away."""

    @property
    def hooks(self) -> LoopHooks:
        """Its hooks."""

    @property
    def decisions(self) -> Decisions:
        """Describes optimizers to plugins."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The GradScaler, if one is known by now."""


class HookSchedule:
    """Registers and removes hooks on modules and parameters.

    Args:
        planner: knows the model and the requested metrics.
        modules: owns the hooks on modules.

    Attributes:
        loop: owns the hooks on parameters; None where the script begins and ends steps itself.
        is_bare: only hooks that a step without measurements needs are registered.
    """

    def __init__(self, planner: Planner, modules: ModuleSource) -> None:
        self._planner, self._modules = planner, modules
        self.loop: DrivingLoop | None = None
        self._installed_for: tuple[int, bool] | None = None  # a version of the plan, and whether on modules too
        self.is_bare = False

    def follow(self, loop: DrivingLoop | None) -> None:
        """The hooks on parameters are this loop's from now on."""
        self.loop = loop

    def wake(self) -> None:
        """What is measured may have changed, or which steps are monitored: follow the loop again."""
        if self.loop is not None:
            self.loop.hooks.stretch.wake()

    def rest(self, steps: int) -> None:
        """The next ``steps`` steps are idle: only count them, if no hook is registered but those that every step needs."""
        if self.loop is not None and self.is_bare and not self._modules.hooks.on_root and self.loop.hooks.are_plain:
            self.loop.hooks.stretch.begin(steps)

    @property
    def is_partial(self) -> bool:
        """Whether hooks that a monitored step needs may be missing."""
        return self._installed_for is None or not self._installed_for[1]

    def install(self, on_modules: bool = True) -> None:
        """Register the hooks that monitored steps need, where they are missing; ``on_modules`` too, or on parameters only."""
        wanted = self._planner.version, on_modules
        if self._installed_for == wanted or self._planner.module is None or self._planner.inventory is None:
            return
        before, self._installed_for, self.is_bare = self._installed_for, wanted, False
        if on_modules:
            self.on_modules()
        elif self._modules.has_removable_hooks:
            self._modules.uninstall(self._planner.module_metrics())
        if self.loop is not None and (before is None or before[0] != wanted[0]):
            self.loop.install(self._planner)

    def on_modules(self) -> None:
        """Register those on modules by the plan as it is now."""
        module, inventory = self._planner.module, self._planner.inventory
        if module is not None and inventory is not None:
            metrics, self.is_bare = self._planner.module_metrics(), False
            self._modules.install(module, inventory, metrics, self._planner.version, bool(linkable(module)))

    def uninstall(self) -> None:
        """Take away what a step without measurements can do without."""
        self._installed_for = None
        if self._modules.has_removable_hooks:
            self._modules.uninstall(self._planner.module_metrics())
        if self.loop is not None:
            self.loop.uninstall()
        self.is_bare = not self._modules.hooks.measures

    def mark_stale(self) -> None:
        """What is registered may not be what is needed any more."""
        self._installed_for = None

    def check_groups(self) -> None:
        """Register hooks again where an optimizer got or lost parameters."""
        if self.loop is not None and self.loop.groups_changed():
            self.mark_stale()

    def groups(self) -> list[tuple[str, frozenset[str]]]:
        """Names of the parameters of each of the optimizers' groups."""
        index = self._planner.inventory
        if self.loop is None or index is None:
            return []
        groups = [group for optimizer in self.loop.optimizers for group in index.source.groups_of(optimizer)]
        members = index.groups or [frozenset(index.names[p] for p in index.positions(group)) for group in groups]
        return [(f"group_{number}", names) for number, names in enumerate(members)]


# --- What is measured in a step, and which hooks that takes ---


MODEL_GONE = (
    "the watched model is gone: keep a reference to it, or, if only its parts are called, watch an nn.ModuleDict of them, which the "
    "optimizers keep"
)


class StepPlanning:
    """Prepares steps that take values, and the hooks for them.

    Args:
        state: of the step machine.
        planner: knows the model and the requested metrics.
        captures: measure tensors.
        exchange: merges values over ranks.
        factory: makes records, and knows what they need.
        hooks: which hooks are registered.
        cadence: which steps are monitored.
        fence: where failures are reported.
    """

    def __init__(
        self,
        state: StepState,
        planner: Planner,
        captures: Captures,
        exchange: ExchangePolicy,
        factory: RecordFactory,
        hooks: HookSchedule,
        cadence: Cadence,
        fence: Fence,
    ) -> None:
        self.state, self.planner, self.captures, self.exchange = state, planner, captures, exchange
        self.factory, self.hooks, self.cadence, self.fence = factory, hooks, cadence, fence

    def would_measure(self, step: int) -> bool:
        """Whether ``step`` is monitored if it comes next."""
        return not self.fence.inert and self.planner.module is not None and self.cadence.wants(step)

    def mode_of(self, step: int) -> Mode:
        """What is measured in ``step``, which is about to begin."""
        if self.fence.inert or self.planner.module is None:
            if self.planner.has_lost_model:
                self.fence.complaints.add("model", f"{MODEL_GONE}; nothing is measured any more")
            return IDLE
        if self.cadence.wants(step):
            return Mode.MONITORED
        return Mode.RECORDED if self.cadence.plugins.requires_gradients else IDLE

    def prepare(self, active: ActiveStep) -> None:
        """The step takes values: plan it, and begin it in all sources."""
        planner = self.planner
        planner.refresh()
        self.hooks.check_groups()
        assert planner.inventory is not None
        if planner.inventory.spread and self.exchange.exchange.ranks.count > 1:
            self.factory.summary.choice.store_all_columns()  # on each rank, with or without a run directory
        if planner.inventory.spread:  # before anything is added up over ranks
            self.exchange.ranks_take_part(active.number)
        is_monitored = active.mode is Mode.MONITORED
        active.plans = planner.plans(active.number, self.factory.summary, gradients_only=not is_monitored)
        active.buffer = StepBuffer(active.number, self.fence.complaints)
        if is_monitored:
            active.buffer.rng = self.random_states()
            active.due = tuple(metric for metric in planner.module_metrics() if metric.due(active.number))
        self.captures.begin(active, planner, by_hand=self.state.is_manual)
        self.hooks.install(on_modules=is_monitored)

    def random_states(self) -> dict[str, Tensor]:
        """The states of the random generators, where they are stored."""
        return rng_states() if self.factory.is_stored else {}

    def prepare_next(self, may_rest: bool) -> None:
        """A step has closed: register the hooks that the next one needs before anything is seen of it. ``may_rest``: no value is on its
        way, and no plugin watches.
        """
        if self.state.is_manual:
            return
        step = self.state.clock.next_step
        if self.hooks.loop is not None and self.hooks.is_partial and self.would_measure(step):
            self.hooks.install()  # the first thing seen of the next step may be its backward pass
        if self.captures.modules.hooks.graphs.traced:  # or its forward, in a compiled graph
            self.captures.modules.set_recording(self.would_measure(step))
        elif (
            may_rest
            and self.state.is_plain
            and step - 1 == self.state.clock.step
            and (steps := self.cadence.idle_ahead(step)) > 0
        ):
            self.hooks.rest(steps)

    def replan(self, active: ActiveStep | None, drop_hooks: bool) -> None:
        """What is measured changed: register the hooks for it now, or leave that to the next step where there is time."""
        self.hooks.wake()
        if drop_hooks:
            self.hooks.uninstall()
            if self.captures.modules.hooks.has_hooks:  # where they may not all go
                self.hooks.on_modules()
        elif self.hooks.loop is not None:
            if active is not None and active.is_monitored:
                self.hooks.on_modules()  # what is due in the open step stays, but the next one needs its hooks in time
            elif not self.state.is_open and self.would_measure(self.state.clock.next_step):
                with outside_dispatch_modes():
                    self.hooks.install()


# --- step closing ---


#: The warning comes if the share is larger.
LARGE = 1 / 3
#: Seconds of the monitor's own time after which the share is computed: a loop that ends sooner lost less than that.
PATIENCE = 5.0
#: Monitored steps that are left out: they load code, plan, and are checked closely.
WARM_UP = 50
_SPARSER = 10


class CostNotice:
    """Warns once, and asks no more after that.

    Args:
        fence: has the monitor's own time.
        every: each step that this divides is monitored; None where the script decides otherwise.
    """

    def __init__(self, fence: Fence, every: int | None) -> None:
        self._fence, self._every = fence, every
        self._monitored = 0
        self._began = self._spent = 0.0
        self.is_due = True

    def step_closed(self) -> None:
        """A monitored step has ended."""
        self._monitored += 1
        if self._monitored <= WARM_UP:
            self._began, self._spent = perf_counter(), self._fence.spent()
        elif (own := self._fence.spent() - self._spent) > PATIENCE:
            self._judge(own, perf_counter() - self._began, self._monitored - WARM_UP)

    def _judge(self, own: float, elapsed: float, steps: int) -> None:
        self.is_due = False
        if own <= LARGE * elapsed:
            return
        fewer = own / _SPARSER
        then = fewer / (elapsed - own + fewer)
        what = "monitoring one in ten of these steps" if self._every is None else f"every={_SPARSER * self._every}"
        self._fence.complaints.add(
            "cost",
            f"the monitor takes {own / elapsed:.0%} of the time of this loop, {1000 * own / steps:.2g} ms for each monitored step; "
            f"{what} brings that to about {then:.0%}",
        )


class StepClosing:
    """Closes steps.

    Args:
        planning: has what was planned, and what measures.
        queue: the steps whose values are on their way, and the records.
        values: what the loop logs.
    """

    def __init__(self, planning: StepPlanning, queue: PendingQueue, values: ValueLog) -> None:
        self._planning, self._queue, self._values = planning, queue, values
        self._plugins = planning.cadence.plugins
        self._cost = CostNotice(planning.fence, planning.cadence.every)

    def close(self, active: ActiveStep, is_watched: bool, tags: dict[str, Any] | None = None) -> None:
        """Nothing more is measured in this step.

        Args:
            active: the step.
            is_watched: plugins are called, though nothing was measured.
            tags: facts of a step that was set aside, while measurements go on in the open one.
        """
        if active.is_monitored:
            self._close_monitored(active, tags)
        else:
            self._close_unmonitored(active, is_watched, tags)

    def _take(self, active: ActiveStep, tags: dict[str, Any] | None) -> tuple[StepBuffer, ModelIndex, dict[str, Any]]:
        """End the measurements of this step; return its values, the model index and the facts that the loop knows of it."""
        buffer, active.buffer = active.buffer, None
        self._values.step_closed()
        inventory = self._planning.planner.inventory
        assert buffer is not None
        assert inventory is not None
        try:
            if tags is None:
                self._planning.captures.end()
        finally:  # collective: the other ranks wait, whatever failed here
            self._planning.exchange.run(buffer, active.plans, may_extend=active.mode is Mode.MONITORED)
        return buffer, inventory, self._values.late.tags.take() if tags is None else tags

    def _close_unmonitored(self, active: ActiveStep, is_watched: bool, tags: dict[str, Any] | None) -> None:
        if active.buffer is not None:
            buffer, inventory, found = self._take(active, tags)
            recorded = RecordedStep(active, buffer, inventory, found, self._queue.oldest)
            self._plugins.call("on_unmonitored_step", recorded)
        else:
            if tags is None:
                self._values.late.tags.clear()
            if is_watched:
                self._plugins.call("on_unmonitored_step", RecordedStep(active), is_idle=active.mode is IDLE)
        if active.is_overflowed:
            self._queue.count_refusal(active.is_interrupted)
        if self._queue.pipeline.detection.count_unmonitored(active.is_overflowed and not active.is_interrupted):
            self._plugins.call("on_alert", active.number)

    def _close_monitored(self, active: ActiveStep, tags: dict[str, Any] | None) -> None:
        if self._cost.is_due:
            self._cost.step_closed()
        buffer, inventory, found = self._take(active, tags)
        evaluate = self._planning.captures.modules.values.evaluator() if active.due else None
        readback = buffer.start_readback()
        self._plugins.call("annotate", active)
        self._queue.start(
            PendingStep(
                readback,
                active,
                inventory,
                evaluate,
                self._planning.hooks.groups() if self._queue.factory.layers.choice == "blocks" else [],
                found,
                self._planning.fence.cost(),
                self._planning.exchange.exchange.ranks.count,
                attached=self._planning.hooks.loop is not None,
            )
        )


# --- Opens and closes steps: what is measured in them, what ranks exchange, and where the record goes ---


_IN_EVAL = "the model was called in evaluation mode, as it was not before; from the next step on that counts as training"


class StepLifecycle:
    """Carries out the step machine's decisions about the boundaries of steps.

    Args:
        planning: decides what a step measures and which hooks that needs.
        queue: the steps whose values are not fetched yet, and the records.
        values: the values that the loop logs.

    Attributes:
        active: the open step, or the last one; None before the first.
    """

    def __init__(self, planning: StepPlanning, queue: PendingQueue, values: ValueLog) -> None:
        self.planning, self.queue, self.values = planning, queue, values
        self.state, self.hooks, self.fence = planning.state, planning.hooks, planning.fence
        self.captures, self.plugins = planning.captures, planning.cadence.plugins
        self._closing = StepClosing(planning, queue, values)
        self.active: ActiveStep | None = None
        self._aside: deque[tuple[ActiveStep, dict[str, Any]]] = deque()  # parts of the open step, with their facts
        self._last_part: ActiveStep | None = None  # of the step whose other parts are closing

    @property
    def has_values(self) -> bool:
        """Whether a step is open that takes values."""
        return self.active is not None and self.active.buffer is not None

    @property
    def is_skipped(self) -> bool:
        """Whether the open step, or the last one, is skipped."""
        return self.active is not None and self.active.is_skipped

    @property
    def was_monitored(self) -> bool:
        """Whether the last step has values, complete or on their way."""
        return self.queue.pipeline.last is not None or self.queue.newest(self.state.clock.ended) is not None

    # --- facts of the open step ----------------------------------------------------------------------------------------------

    def note(self, name: str, value: Any) -> None:
        """Add a fact, a number or a 0-d tensor, to the context of the open step's record."""
        if self.active is not None and (buffer := self.active.buffer) is not None:
            if isinstance(value, Tensor) and value.numel() == 1:
                buffer.noted[name] = value.detach().clone()
            elif isinstance(value, (int, float)):
                buffer.noted[name] = value

    def explain(self, source: str, reason: str) -> None:
        """Record why ``source`` has no values in the open step."""
        if self.active is not None and self.active.buffer is not None:
            self.active.buffer.absent[source, ""] = reason

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Measure nothing inside the block."""
        before = self.captures.modules.passes.paused
        self._pause(True)
        try:
            yield
        finally:
            self._pause(before)

    def _pause(self, is_paused: bool) -> None:
        self.captures.modules.pause(is_paused)
        self.state.pause(is_paused)
        self.hooks.wake()
        self.plugins.call("on_pause", is_paused)

    # --- opening -------------------------------------------------------------------------------------------------------------

    def seal(self, step: int) -> None:
        """``step`` is about to open: nothing more can be added to the last one."""
        self.captures.seal()
        is_idle = self.active is not None and self.active.mode is IDLE
        detail = self.plugins.built_in.detail
        if detail.watches_idle_steps:
            self.plugins.call_one(detail, detail.before_step, step)
        self.queue.seal(self.state.clock.ended, step)
        if not is_idle or self.plugins.watch_idle_steps:  # a spike in the last record makes a plugin do so
            self.plugins.call("on_sealed", step, is_idle=is_idle)

    def flush_pending(self) -> None:
        """Complete the record of the last step. Waits for its values."""
        self.queue.enter_all(self.state.clock.ended, open_to_late_values=not self.state.is_open)

    def rewind(self, step: int, last: int | None) -> None:
        """The run goes back from ``last`` to ``step``; or begins, in a run directory that may have later steps."""
        if last is not None:
            message = f"step {step} comes after step {last}; a new segment begins in the run directory"
            self.fence.complaints.add("back", message)
            self.queue.enter_all(None, open_to_late_values=False)
            self.plugins.call("on_rewind", step)
            self.queue.pipeline.rewind(step)
        self.queue.pipeline.directory.rewind(step)

    def open(self, step: int, *, is_tentative: bool, hides_forward: bool) -> None:
        """Begin ``step``."""
        self.hooks.wake()
        active = self.active = ActiveStep(step, self.state.clock.stride)
        modules = self.captures.modules
        active.mode = self.planning.mode_of(step)
        is_idle = active.mode is IDLE
        self.values.late.tags.begin(is_kept=not is_idle)
        if not is_idle or self.plugins.watch_idle_steps:
            self.plugins.call("on_step_open", active, is_idle=is_idle)
        if is_idle:
            if modules.passes.is_open or modules.passes.missed:
                modules.set_recording(False)
            if not self.hooks.is_bare:
                self.hooks.uninstall()
        else:
            self.planning.prepare(active)
            if not (self.captures.had_root_inputs or hides_forward or self.state.is_manual) and modules.hooks.on_root_inputs:
                modules.root_inputs_missed()
        modules.passes.begin_step(in_eval=is_tentative)
        self.values.step_opened(active.buffer, active.is_monitored, hides_forward, is_tentative)

    def pass_idle(self, step: int) -> None:
        """The steps up to ``step`` were idle, or are, and were only counted."""
        self.active = ActiveStep(step)

    def confirm(self) -> None:
        """The open step trains, although a call in evaluation mode opened it."""
        self.captures.modules.passes.is_tentative = False
        self.values.take_early()

    def count_eval(self) -> None:
        """From now on calls in evaluation mode count as training in the open step."""
        self.captures.modules.passes.counts_eval = True

    def release(self) -> None:
        """What was logged since an undecided call belongs to the last step."""
        self.values.release()

    # --- the end of an attempt -----------------------------------------------------------------------------------------------

    def decide(self, optimizer: Hashable, done: Set[Hashable], overflowed: Set[Hashable], is_overflowed: bool) -> bool:
        """Whether the optimizer that is about to step must change nothing.

        Raises:
            SpikeError: a plugin stops the run.
        """
        active, loop = self.active, self.hooks.loop
        is_measured = active is not None and active.buffer is not None and not self.captures.modules.passes.paused
        if active is None or loop is None or not is_measured or not self.plugins.has("before_optimizer_step"):
            return False
        context = loop.decisions.context_of(optimizer, done, overflowed, is_overflowed)
        try:
            self.plugins.call("before_optimizer_step", active, context)
        finally:
            if active.is_skipped:
                clips = self.plugins.built_in.clips
                self.plugins.call_one(clips, clips.on_skip, active)
        if context.is_stale and not active.is_skipped:
            loop.decisions.accept_leftovers()
        return active.is_skipped

    def attempt_ended(self, is_overflowed: bool) -> None:
        """All optimizers of the open step have been called."""
        if self.active is not None and self.plugins.has("after_attempt"):
            self.plugins.call("after_attempt", self.active, not (is_overflowed or self.active.is_skipped))

    # --- closing -------------------------------------------------------------------------------------------------------------

    def drop(self, *, was_tentative: bool) -> None:
        """Forget the open step: its number is that of the next attempt."""
        if self.active is not None:
            self.active.buffer = None
        self.values.step_closed()
        self.plugins.call("on_drop")
        if not was_tentative:
            self.values.late.tags.clear()
        self.captures.end()

    def close(self, *, is_overflowed: bool, tags: dict[str, Any] | None = None) -> None:
        """End the open step. On a CPU its record is made at once, elsewhere when its values have come. ``tags``: facts of a part that is
        a step of its own, while measurements go on.
        """
        active = self.active
        if active is None:
            return
        active.is_overflowed, interrupted = is_overflowed, self.state.progress.interrupted
        if is_overflowed and interrupted and not active.is_skipped:
            active.annotations["interrupted"] = interrupted
        if self.state.progress.misses_eval and active.buffer is not None:
            active.buffer.absent = {**{(source, ""): _IN_EVAL for source in OF_MODULES}, **active.buffer.absent}
        if self.hooks.loop is not None and active.buffer is not None and (tags is not None or not self.state.progress.begun):
            self.hooks.loop.leave_unused(active.buffer)
        self.queue.pipeline.drop_last()
        is_idle = active.mode is IDLE
        is_watched = not is_idle or self.plugins.watch_idle_steps
        try:
            try:
                if is_watched:
                    self.plugins.call("on_step_closing", active, is_idle=is_idle)
            finally:  # where warnings are errors
                self._closing.close(active, is_watched, tags)
        finally:  # ranks change together, whatever failed on one of them
            if is_watched or self.plugins.watch_idle_steps:  # a series of refused steps makes a plugin do so
                self.plugins.call("on_step_closed", active, is_idle=is_idle)
        if tags is None:
            self.planning.prepare_next(may_rest=not (is_watched or self.queue.steps))

    # --- parts of a step that may be steps of their own ------------------------------------------------------------------------

    def set_aside(self) -> None:
        """An optimizer has stepped: what was measured so far, and what is logged until the next pass, is a part of the open step."""
        active, inventory = self.active, self.planning.planner.inventory
        if active is None:
            return
        self.captures.modules.set_aside()
        part = active.set_aside()
        if active.buffer is not None and inventory is not None:
            active.buffer.used.update(inventory.foreign)
            self.values.go_to(part.buffer)
        self._aside.append((part, self.values.late.tags.take()))

    def part_began(self) -> None:
        """A pass behind what was set aside begins another part."""
        active = self.active
        if active is not None and self._aside:
            self._aside[-1][1].update(self.values.late.tags.take_late())
            self.values.go_to(active.buffer)
            if active.buffer is not None and active.is_monitored:
                active.buffer.rng = self.planning.random_states()

    def rejoin(self, parts: int) -> None:
        """The last ``parts`` parts that were set aside belong to the same step as what came since."""
        if (active := self.active) is None:
            return
        for _ in range(parts):
            part, tags = self._aside.pop()
            active.rejoin(part)
            self.values.late.tags.rejoin(tags)
        self.values.go_to(active.buffer)

    def close_part(self, *, is_overflowed: bool) -> None:
        """The first part that was set aside is a step of its own."""
        self._last_part = self._last_part or self.active
        self.active, tags = self._aside.popleft()
        self._renumber(self.active)
        self.close(is_overflowed=is_overflowed, tags=tags)

    def parts_closed(self) -> None:
        """What came since the last part is the open step."""
        self.active, self._last_part = self._last_part, None
        active = self.active
        if active is None:
            return
        self._renumber(active)
        if active.mode is IDLE:
            self.captures.end()
        else:
            self.captures.gradients.forget_batches()
        self.values.step_opened(active.buffer, active.is_monitored, hides_forward=False, is_tentative=False)
        if active.mode is not IDLE or self.plugins.watch_idle_steps:
            self.plugins.call("on_step_open", active, is_idle=active.mode is IDLE)

    def _renumber(self, active: ActiveStep) -> None:
        step = self.state.clock.step
        if step is not None and step != active.number:
            active.renumber(step, self.planning.mode_of(step))


# --- Carries out the measurements that the step machine requests ---


UNFINISHED = "the last backward pass was interrupted, as by an exception, so gradients before clipping were not seen"
_IN_BACKWARD = (
    "an optimizer stepped within the backward pass before this was known of the loop; they are measured from the next step on"
)


def _has_stepped(optimizer: Optimizer) -> bool:
    """Whether an optimizer has the state of earlier steps: Adagrad creates its state in advance, and plain SGD has none."""
    state = next(iter(optimizer.state.values()), None)
    if not state:
        return False
    steps = state.get("step", 1)
    return not isinstance(steps, Tensor) or steps.device.type != "cpu" or bool(steps)  # never waits for a device


class StepMeasurement:
    """Measures in the open step, with the parameters and scales of a followed loop.

    Args:
        lifecycle: has the open step, and what measures tensors.
        ownership: maps optimizers to their parameters.
        hooks: the hooks on the loop, which know scales and removed gradients.
        order: the optimizers in the order in which they step; shared with the step machine, which changes it.
    """

    def __init__(self, lifecycle: StepLifecycle, ownership: Ownership, hooks: LoopHooks, order: list[Hashable]) -> None:
        self._lifecycle, self._captures = lifecycle, lifecycle.captures
        self._ownership, self._hooks, self._order = ownership, hooks, order
        self._complaints = lifecycle.fence.complaints
        self._accumulated: dict[Hashable, tuple[weakref.ref[Tensor], int]] = {}  # a gradient of an optimizer, and its version

    def _scale(self, optimizer: Hashable) -> Tensor | None:
        return self._hooks.scaler.inverse_scale(self._ownership[optimizer])

    def _positions(self, optimizer: Hashable, with_unowned: bool) -> list[int]:
        own = self._ownership.positions(optimizer)
        return sorted([*own, *self._ownership.unowned]) if with_unowned else own

    def inverse_scale(self) -> Tensor | None:
        """The factor that unscales gradients inside the model at this moment."""
        # of an optimizer that has not stepped, since others under the same scaler may be unscaled already
        scales = (self._hooks.scaler.inverse_scale(optimizer) for optimizer in self._ownership.alive(self._order))
        return next((scale for scale in scales if scale is not None), None)

    # --- gradients -----------------------------------------------------------------------------------------------------------

    def backward_ended(self) -> None:
        self._captures.modules.backward_ended()

    def measure_before_clip(self, done: Set[Hashable], in_backward: Set[Hashable]) -> None:
        scaled: list[int] = []
        plain: list[int] = []
        inverse_scale: Tensor | None = None
        gradients, source = self._captures.gradients, self._lifecycle.planning.planner.source
        own = None if source is PLAIN_GRADIENTS else source.scale()
        if own is None and source.stays_scaled:
            own = self._hooks.scaler.scale
        for name, positions in self._ownership.shares(self._order):
            scale = self._scale(name) if own is None else inverse(own)
            inverse_scale = inverse_scale if scale is None else scale
            if name is not None and name in in_backward:
                continue
            if name is not None and name in done:
                # of use only if this optimizer steps again in this step; another one's backward may pass through here too
                gradients.before_clip(positions, scale, held_for=name)
            else:
                (plain if scale is None else scaled).extend(positions)
        if inverse_scale is not None:
            self._lifecycle.note("amp_scale", inverse_scale.to(accumulator_dtype(inverse_scale.device)).reciprocal())
        for positions, scale in ((plain, None), (scaled, inverse_scale)):
            if positions:
                gradients.before_clip(sorted(positions), scale)

    @property
    def waits_for_step(self) -> bool:
        return self._lifecycle.planning.planner.source.is_final_at_step

    def measure_one_before_clip(self, position: int, done: Set[Hashable], in_backward: Set[Hashable]) -> None:
        """Measure one complete gradient whose optimizer may step before the backward pass ends.

        If that optimizer has stepped after an earlier pass, this pass is another optimizer's turn, and its end measures the rest.
        """
        within = any(position in self._ownership.positions(name) for name in in_backward)
        positions = [position] if within else self._ownership.to_step([position], done)
        self._captures.gradients.before_clip(positions, None)

    def release_gradients(self, optimizer: Hashable) -> None:
        self._captures.gradients.release(optimizer)

    def measure_after_clip(self, optimizer: Hashable, *, with_unowned: bool, is_overflowed: bool = False) -> None:
        if self._hooks.backward.awaited and torch._C._current_graph_task_id() == -1:
            self._refuse_before_clip(optimizer)
        scale = None if is_overflowed else self._scale(optimizer)
        self._captures.gradients.after_clip(self._ownership.positions(optimizer), scale)
        if with_unowned and self._ownership.unowned:
            self.measure_unowned()

    def _refuse_before_clip(self, optimizer: Hashable) -> None:
        """A backward pass was interrupted, and neither another one came after it nor a clip by the monitor, which measures."""
        active, gradients, positions = self._lifecycle.active, self._captures.gradients, self._ownership.positions(optimizer)
        left = gradients.not_clipped(positions)
        if active is not None and active.buffer is not None and (left == positions or gradients.with_gradient(left)):
            active.buffer.refuse_all(GRADIENT_BEFORE_CLIP, UNFINISHED)

    def measure_unowned(self) -> None:
        # no optimizer unscales these
        self._captures.gradients.after_clip(self._ownership.unowned, self._scale(None))

    def shares_parameters(self, optimizer: Hashable, other: Hashable) -> bool:
        groups = ([] if (found := self._ownership[name]) is None else found.param_groups for name in (optimizer, other))
        one, two = ({id(p) for group in each for p in group["params"]} for each in groups)
        return not one.isdisjoint(two)

    def accumulates(self, optimizer: Hashable) -> bool:
        gradient, before = self._first_gradient(optimizer), self._accumulated.pop(optimizer, None)
        if gradient is None:
            return False
        version = 0 if gradient.is_inference() else gradient._version
        self._accumulated[optimizer] = weakref.ref(gradient), version
        return before is None or (before[0]() is gradient and before[1] != version)

    def was_cleared(self, optimizer: Hashable) -> bool:
        before = self._accumulated.get(optimizer)
        return before is not None and before[0]() is not self._first_gradient(optimizer)

    def _first_gradient(self, optimizer: Hashable) -> Tensor | None:
        found = self._ownership[optimizer]
        groups = [] if found is None else found.param_groups
        return next((p.grad for group in groups for p in group["params"] if p.grad is not None), None)

    def has_gradients(self, optimizer: Hashable) -> bool:
        return self._first_gradient(optimizer) is not None

    # --- parameters ----------------------------------------------------------------------------------------------------------

    def measure_parameters(self) -> None:
        self._captures.parameters.measure(self._ownership.all_positions())

    def hold_parameters(self, optimizer: Hashable, *, with_unowned: bool, as_measured: bool) -> None:
        self._captures.parameters.before_step(self._positions(optimizer, with_unowned), as_measured)

    def let_go(self, optimizer: Hashable, *, with_unowned: bool) -> None:
        self._captures.parameters.forget(self._positions(optimizer, with_unowned))

    def measure_update(self, optimizer: Hashable) -> None:
        if (found := self._ownership[optimizer]) is not None:
            self._captures.parameters.after_step(self._ownership.positions(optimizer), found)

    # --- facts ---------------------------------------------------------------------------------------------------------------

    def annotate(self, optimizer: Hashable, *, turns: int, is_first: bool) -> None:
        found = self._ownership[optimizer]
        if found is None:
            return
        place, note = self._order.index(optimizer), self._lifecycle.note
        for number, group in enumerate(found.param_groups):
            note(f"lr/{place}/{number}", group.get("lr"))
        if turns:
            note("by_turns", float(turns))
        if is_first and _has_stepped(found):
            note("goes_on", 1.0)

    def explain_missing(self, reason: str) -> None:
        self._lifecycle.explain(GRADIENT_BEFORE_CLIP, reason)

    def explain_in_backward(self, optimizer: Hashable) -> None:
        if not self._captures.gradients.are_measured(self._ownership.positions(optimizer)):
            self._lifecycle.explain(GRADIENT_BEFORE_CLIP, _IN_BACKWARD)

    def revive_hooks(self, optimizer: Hashable) -> None:
        found = self._ownership[optimizer]
        if found is not None and self._hooks.backward.revive(found):
            reason = "the hooks on parameters had died, as in a conversion of DTensors by .to(); they are registered again"
            self._lifecycle.explain(GRADIENT_BEFORE_CLIP, reason)
            step = self._lifecycle.state.clock.step
            self._complaints.add("hooks", f"{reason}; gradients before clipping are missing in step {step}")

    def forget_scaled(self, reason: str) -> None:
        """The gradients measured so far in this step were divided by a wrong scale, or by none: drop them."""
        self._captures.gradients.drop_scaled(reason)
        self._captures.modules.drop_scaled(reason)
        step = self._lifecycle.state.clock.step
        self._complaints.add("scaler", f"{reason}; gradients before clipping are missing in step {step}")

    def gets_own_gradients(self) -> bool:
        plugins = self._lifecycle.plugins
        return bool(plugins.call_one(plugins.built_in.audit, plugins.built_in.audit.sees_alternation))

    def writes_early(self, optimizer: Hashable) -> bool:
        found = self._ownership[optimizer]
        if not self._hooks.optimizers.may_skip or found is None or not self._hooks.optimizers.holds.was_changed(found):
            return False
        kind = type(found).__name__
        message = f"{kind} writes to the parameters before its closure is called, so that its steps cannot be skipped"
        self._complaints.add("skip:closure", f"{message}; attach the optimizer that it wraps instead")
        return True

    def warn_order(self, optimizer: Hashable) -> None:
        kind = type(self._ownership[optimizer]).__name__
        self._complaints.add(
            "order",
            f"the {kind} named earlier steps last; name optimizers in the order in which they step. From here on it counts so",
        )

    def warn_resting(self, resting: Hashable, latest: Hashable) -> None:
        first, second = (
            f"optimizer {self._order.index(name) + 1} of {len(self._order)} ({type(self._ownership[name]).__name__})"
            for name in (resting, latest)
        )
        message = f"{first}, whose step ends a monitored one, rests while others step; until it steps, {second} ends them"
        self._complaints.add("order", message)

    def warn_late(self, last: Hashable, steps: int) -> None:
        self._complaints.add(
            "order",
            f"optimizer {self._order.index(last) + 1} of {len(self._order)} ({type(self._ownership[last]).__name__}) had gradients and did "
            f"not step for {steps} steps of another one, which were taken for one step and have one record; if it begins late, clear "
            "its gradients by zero_grad() before its first backward pass",
        )

    def warn_joined(self, steps: int) -> None:
        self._complaints.add(
            "order",
            f"optimizers take turns of several steps each: before the last optimizer stepped first, {steps + 1} steps of others were "
            "taken for one step with it, and their record is that of the last of them; from here on each step has one",
        )

    def warn_in_backward(self) -> None:
        if self._hooks.optimizers.may_skip:
            message = "optimizers step within the backward pass, before all gradients are there: nothing is done about spikes"
            self._complaints.add("acting", message)

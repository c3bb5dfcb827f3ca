"""What carries out the decisions of the step machine: steps that are planned, open and close."""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..capture.gradients import GradientCapture, ParameterCapture
from ..capture.hooks import PassTracker
from ..capture.measurer import Measurer
from ..core.fence import Fence
from ..core.torch_modes import Unsaved, has_group, outside_dispatch_modes, rng_states, unsaved_of
from ..step.active_step import IDLE, ActiveStep, Mode, RecordedStep
from ..step.buffer import PendingReadback, StepBuffer
from ..step.model_index import ModelIndex
from ..step.planner import OF_MODULES, ExchangePolicy, Planner
from ..step.record_builder import PendingStep
from .machine import StepState
from .plugin_set import PluginSet
from .records import RecordPipeline
from .values import ValueLog

if TYPE_CHECKING:
    from ..capture.module_source import ModuleSource
    from ..core.records import Metric

# --- Which steps are monitored: those that the script asks for, as the plugins change it ---


class Cadence:
    """Decides for each step whether it is monitored: ``asked`` is the script's function, two calls of which need not return the same
    answer, and with ``every`` it asks for each step that this divides, and no others.
    """

    def __init__(self, asked: Callable[[int], bool], plugins: PluginSet, every: int | None) -> None:
        self.asked, self.plugins, self.every = asked, plugins, every
        self._asked: tuple[int | None, bool] = None, False
        self._answer: tuple[int | None, bool] = None, False

    def wants(self, step: int) -> bool:
        """Whether the next step is monitored, if it is ``step``. The script is asked once for each, and so are the plugins, unless
        :meth:`ask_again` is called.
        """
        if self._answer[0] != step:
            if self._asked[0] != step:
                self._asked = step, step % self.every == 0 if self.every is not None else bool(self.asked(step))
            plugins, answer, file = self.plugins, self._asked[1], self.plugins.built_in.detail.file
            if plugins.listening["wants"] or (file is not None and monotonic() >= file.due):
                answer = plugins.wants(step, answer)
            self._answer = step, answer
        return self._answer[1]

    def idle_ahead(self, step: int) -> int:
        """How many steps from ``step`` on are certainly idle and seen by no plugin, without the last one before a monitored one."""
        if self.every is None:
            return 0
        ahead = -step % self.every - 1
        return self.plugins.may_miss(ahead) if ahead > 0 else 0

    def ask_again(self, script_too: bool) -> None:
        """Ask the plugins again about the next step, and ``script_too``."""
        self._answer = None, False
        if script_too:
            self._asked = None, False

    def foretells(self, step: int, ahead: int | None) -> bool:
        """Whether ``step`` would be monitored, by what is known now. ``ahead``: how many steps lie between it and the next one; None for
        a step that is over.
        """
        return self.plugins.wants(step, bool(self.asked(step)), ahead)


# --- The sources of values: gradients, parameters, and what modules take and return ---


class Captures:
    """All sources of one monitor: gradients, parameters with their updates, and, once they are asked for, what modules take and return."""

    def __init__(self, measurer: Measurer, fence: Fence, update_sample: int | re.Pattern[str] | None) -> None:
        self.measurer, self._fence = measurer, fence
        self.gradients = GradientCapture(measurer)
        self.parameters = ParameterCapture(measurer, update_sample)
        self.passes = PassTracker()
        self.modules: ModuleSource | None = None
        self._step: tuple[StepBuffer, tuple[Metric, ...], ModelIndex] | None = None  # the open one

    def needed_modules(self) -> ModuleSource:
        if self.modules is None:
            from ..capture.module_source import ModuleSource  # most programs ask for nothing of modules

            self.modules = ModuleSource(self.measurer, self._fence, self.passes)
            if self._step is not None:
                self.modules.begin(*self._step)
        return self.modules

    def begin(self, active: ActiveStep, index: ModelIndex, by_batch: bool, by_hand: bool) -> None:
        """``by_batch``: the gradients of each micro-batch too; ``by_hand``: the loop has begun the step explicitly."""
        assert active.buffer is not None
        self.gradients.begin(active.buffer, active.plans, index, by_batch)
        self.parameters.begin(active.buffer, active.plans, index)
        self.passes.by_hand = by_hand
        modules, self._step = self.modules, (active.buffer, active.due, index)
        if modules is not None:
            modules.begin(*self._step)
        elif active.due:
            self.needed_modules()
        else:
            self.passes.is_open = False

    def end(self) -> None:
        self.gradients.end()
        self.parameters.end()
        self._step = None
        if self.modules is not None:
            self.modules.end()

    def stop_recording(self) -> None:
        """Nothing is measured in this step."""
        if self.modules is not None:
            self.modules.set_recording(False)
        else:
            self.passes.is_open = False

    def pause(self, is_paused: bool) -> None:
        if self.modules is not None:
            self.modules.pause(is_paused)
        self.passes.is_paused = is_paused

    def training_began(self) -> None:
        """The root's training forward began; its own hook may have been installed too late to see it."""
        self.passes.training_began(end_is_seen=self.modules is not None and self.modules.hooks.on_root)


# --- Links from modules to their monitor ---


class Linkable:
    """Marks modules that get a link to their monitor; see :class:`torch_gradmon.MonitorMixin`."""


def linkable(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Linkable)]


def link(module: nn.Module, monitor: object) -> None:
    """Link a module with its monitor, which it does not keep alive. Copies and saved files of the module have no link."""
    hooks: Any = module._forward_hooks
    (unsaved_of(hooks) or Unsaved(hooks)).monitor = weakref.ref(monitor)


def linked(module: object) -> Any:
    unsaved = unsaved_of(getattr(module, "__dict__", {}).get("_forward_hooks"))
    return None if unsaved is None or unsaved.monitor is None else unsaved.monitor()


def unlink(module: nn.Module) -> None:
    if (unsaved := unsaved_of(vars(module).get("_forward_hooks"))) is not None:
        unsaved.monitor = None
        unsaved.leave_if_empty()


# --- Whether the monitor costs too much ---


#: The warning comes if the share is larger.
LARGE = 1 / 3
#: Seconds of the monitor's own time after which the share is computed: a loop that ends sooner lost less than that.
PATIENCE = 5.0
#: Monitored steps that are left out: they load code, plan, and are checked closely. After them, steps from one look to the next.
WARM_UP, BETWEEN = 50, 10
_SPARSER = 10


class CostNotice:
    """Warns once, and asks no more after that. ``fence`` has the monitor's own time.

    Attributes:
        monitored: steps that were monitored so far.
        due: at how many of them :meth:`look` is due; 0 if never again.
    """

    def __init__(self, fence: Fence, every: int | None) -> None:
        self._fence, self._every = fence, every
        self.monitored, self.due = 0, WARM_UP
        self._began = self._spent = 0.0

    def look(self) -> None:
        self.due += BETWEEN
        if self.monitored == WARM_UP:
            self._began, self._spent = perf_counter(), self._fence.spent()
            return
        own, elapsed, steps = self._fence.spent() - self._spent, perf_counter() - self._began, self.monitored - WARM_UP
        if own > PATIENCE:
            self.due = 0
        if own <= max(PATIENCE, LARGE * elapsed):
            return
        fewer = own / _SPARSER
        then = fewer / (elapsed - own + fewer)
        what = "monitoring one in ten of these steps" if self._every is None else f"every={_SPARSER * self._every}"
        self._fence.complaints.add(
            "cost",
            f"the monitor takes {own / elapsed:.0%} of the time of this loop, {1000 * own / steps:.2g} ms for each monitored step; "
            f"{what} brings that to about {then:.0%}",
        )


# --- Opens and closes steps: what is measured in them, what ranks exchange, and where the record goes ---


MODEL_GONE = (
    "the watched model is gone: keep a reference to it, or, if only its parts are called, watch an nn.ModuleDict of them, which the "
    "optimizers keep"
)
_IN_EVAL = "the model was called in evaluation mode, as it was not before; from the next step on that counts as training"


class StepLifecycle:
    """Carries out the step machine's decisions about the boundaries of steps: prepares those that take values, and registers and removes
    the hooks on modules and parameters for them.

    Attributes:
        active: the open step, or the last one.
        loop: a ``FollowedLoop`` of runtime.py, which owns the hooks on parameters; None where the script begins and ends steps itself.
        installed_for: a version of the plan, and whether hooks on modules are there too; None if they may not be what is needed.
        is_bare: only hooks that a step without measurements needs are registered.
    """

    def __init__(
        self,
        state: StepState,
        planner: Planner,
        captures: Captures,
        exchange: ExchangePolicy,
        cadence: Cadence,
        pipeline: RecordPipeline,
        values: ValueLog,
        fence: Fence,
    ) -> None:
        self.state, self.planner, self.captures, self.exchange = state, planner, captures, exchange
        self.cadence, self.plugins, self.pipeline, self.values, self.fence = cadence, cadence.plugins, pipeline, values, fence
        self.factory = pipeline.factory
        self.loop: Any = None
        self.installed_for: tuple[int, bool] | None = None
        self.is_bare = False
        self.active: ActiveStep | None = None
        self._cost = CostNotice(fence, cadence.every)
        self._had_root_inputs = False  # a hook was on what the model takes before the open step began
        self._aside: deque[tuple[ActiveStep, dict[str, Any]]] = deque()  # parts of the open step, with their facts
        self._last_part: ActiveStep | None = None  # of the step whose other parts are closing
        self._ranks = 1  # that took part in the last one

    @property
    def has_values(self) -> bool:
        return self.active is not None and self.active.buffer is not None

    @property
    def is_skipped(self) -> bool:
        return self.active is not None and self.active.is_skipped

    @property
    def was_monitored(self) -> bool:
        return self.pipeline.is_last_monitored

    # --- facts of the open step ----------------------------------------------------------------------------------------------

    def note(self, facts: Mapping[str, Any], optimizer: Optimizer | None = None, place: int = 0) -> None:
        """Add facts, numbers or 0-d tensors, to the context of the open step's record; and the learning rates of the ``optimizer`` at
        this ``place`` among all.
        """
        rates = {}
        for number, group in enumerate(() if optimizer is None else optimizer.param_groups):
            rates[f"lr/{place}/{number}"] = group.get("lr")
        if self.active is not None and (buffer := self.active.buffer) is not None:
            for name, value in {**rates, **facts}.items():
                if isinstance(value, (int, float)):
                    buffer.noted[name] = value
                elif isinstance(value, Tensor) and value.numel() == 1:
                    buffer.noted[name] = value.detach().clone()

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = self.captures.passes.paused
        self._pause(True)
        try:
            yield
        finally:
            self._pause(before)

    def _pause(self, is_paused: bool) -> None:
        self.captures.pause(is_paused)
        self.state.is_paused = is_paused
        self.wake()
        self.plugins.tell("audit", "on_pause", is_paused)

    # --- opening -------------------------------------------------------------------------------------------------------------

    def seal(self, step: int) -> None:
        """``step`` is about to open: nothing more can be added to the last one."""
        modules = self.captures.modules
        # what the step needs may be registered with it
        self._had_root_inputs = modules is not None and modules.hooks.on_root_inputs
        built_in, publisher = self.plugins.built_in, self.pipeline.publisher
        if built_in.detail.watches_idle_steps:
            self.plugins.tell("detail", "before_step", step)
        if self.pipeline.waiting:
            self.pipeline.seal(step)
        self.pipeline.finish()
        if publisher.sinks:
            publisher.publish()
        else:
            publisher.waiting = None
        if built_in.recorder is not None:
            built_in.recorder.seal()
        if built_in.post_spike.watches_idle_steps:  # a spike in the last record makes it do so
            self.plugins.tell("post_spike", "before_step")

    def flush_pending(self) -> None:
        """Complete the record of the last step. Waits for its values."""
        self.pipeline.enter(open_to_late_values=not self.state.is_open)

    def rewind(self, step: int, last: int | None) -> None:
        """The run goes back from ``last`` to ``step``; or begins, in a run directory that may have later steps."""
        if last is not None:
            message = f"step {step} comes after step {last}; a new segment begins in the run directory"
            self.fence.complaints.add("back", message)
            self.pipeline.enter(open_to_late_values=False)
            self.plugins.call("on_rewind", step)
            self.pipeline.rewind(step)
        self.pipeline.directory.rewind(step)

    def open(self, step: int, *, is_tentative: bool, hides_forward: bool) -> None:
        """Begin ``step``; ``is_tentative``: a call in evaluation mode opens it; ``hides_forward``: no hook saw its forward."""
        if self.loop is not None and self.loop.program.left:
            self.loop.program.wake()
        active = self.active = ActiveStep(step, self.state.stride)
        passes, active.mode = self.captures.passes, self.mode_of(step)
        is_idle = active.mode is IDLE
        self.values.begin_tags(is_kept=not is_idle)
        if self.plugins.listening["on_step_open"] and (not is_idle or self.plugins.watch_idle_steps):
            self.plugins.call("on_step_open", active, is_idle=is_idle)
        if is_idle:
            if passes.is_open or passes.missed:
                self.captures.stop_recording()
            if not self.is_bare:
                self.uninstall()
        else:
            self.prepare(active)
            modules, is_missed = self.captures.modules, not (self._had_root_inputs or hides_forward or self.state.is_manual)
            if is_missed and modules is not None and modules.hooks.on_root_inputs:
                modules.root_inputs_missed()
        passes.counts_eval = passes.is_tentative = is_tentative
        self.values.step_opened(active.buffer, active.mode is Mode.MONITORED, hides_forward, is_tentative)

    def confirm(self) -> None:
        """The open step trains, although a call in evaluation mode opened it."""
        self.captures.passes.is_tentative = False
        self.values.take_early()

    def count_eval(self) -> None:
        self.captures.passes.counts_eval = True

    def release(self) -> None:
        """What was logged since an undecided call belongs to the last step."""
        self.values.release()

    # --- the end of an attempt -----------------------------------------------------------------------------------------------

    def decide(self, optimizer: Hashable, is_overflowed: bool) -> bool:
        """Whether the optimizer that is about to step must change nothing.

        Raises:
            TrainingStopped: a plugin stops the run.
        """
        active, loop = self.active, self.loop
        if not self.plugins.listening["before_optimizer_step"] or active is None or loop is None:
            return False
        if active.buffer is None or self.captures.passes.paused:
            return False
        context = loop.context_of(optimizer, is_overflowed)
        try:
            self.plugins.call("before_optimizer_step", active, context)
        finally:
            if active.is_skipped and (clips := self.plugins.clips) is not None:
                self.plugins.call_one(clips, clips.on_skip, active)
        if context.is_stale and not active.is_skipped:
            loop.optimizer_hooks.holds.left = {}  # they may be used after all
        return active.is_skipped

    def attempt_ended(self, is_overflowed: bool) -> None:
        if self.active is not None:
            self.plugins.call("after_attempt", self.active, not (is_overflowed or self.active.is_skipped))

    # --- closing -------------------------------------------------------------------------------------------------------------

    def drop(self, *, was_tentative: bool) -> None:
        if self.active is not None:
            self.active.buffer = None
        self.values.buffer = None
        self.plugins.tell("policy", "step_dropped")
        if not was_tentative:
            self.values.tags = {}
        self.captures.end()

    def close(self, *, is_overflowed: bool, tags: dict[str, Any] | None = None) -> None:
        """End the open step. On a CPU its record is made at once, elsewhere when its values have come. ``tags``: facts of a part that is
        a step of its own, while measurements go on.
        """
        active, loop = self.active, self.loop
        if active is None:
            return
        active.is_overflowed, interrupted = is_overflowed, self.state.progress.interrupted
        if is_overflowed and interrupted and not active.is_skipped:
            active.annotations["interrupted"] = interrupted
        if self.state.progress.misses_eval and active.buffer is not None:
            active.buffer.absent = {**{(source, ""): _IN_EVAL for source in OF_MODULES}, **active.buffer.absent}
        is_over = active.buffer is not None and (tags is not None or not self.state.progress.begun)
        if loop is not None and is_over and (len(loop.ownership.order) > 1 or loop.backward_hooks.awaited):
            loop.leave_unused(active.buffer)
        self.pipeline.last = None
        is_watched = active.mode is not IDLE or self.plugins.watch_idle_steps
        try:
            try:
                if is_watched and self.plugins.listening["on_step_closing"]:
                    self.plugins.call("on_step_closing", active, is_idle=active.mode is IDLE)
            finally:  # where warnings are errors
                if active.mode is Mode.MONITORED and active.buffer is not None:
                    self.pipeline.waiting.append(pending := self._pending(active, tags))
                    if pending.readback.arrival.is_local:  # its values are on the host already
                        self.pipeline.enter()
                else:
                    self._close_unmonitored(active, tags)
        finally:  # ranks change together, whatever failed on one of them
            # a series of refused steps makes a plugin do so
            if self.plugins.listening["on_step_closed"] and (is_watched or self.plugins.watch_idle_steps):
                self.plugins.call("on_step_closed", active, is_idle=active.mode is IDLE)
        if tags is None:
            self.prepare_next(may_rest=not (is_watched or self.pipeline.waiting))

    def _take(self, active: ActiveStep, tags: dict[str, Any] | None) -> tuple[StepBuffer, ModelIndex, dict[str, Any]]:
        """End the measurements of this step; return its values, the model index and the facts that the loop knows of it."""
        buffer, active.buffer, inventory = active.buffer, None, self.planner.inventory
        self.values.buffer = None
        assert buffer is not None
        assert inventory is not None
        try:
            if tags is None:
                self.captures.end()
        finally:  # collective: the other ranks wait, whatever failed here
            self._ranks = self.exchange.ranks.count if has_group() else 1
            if self._ranks > 1:
                self.exchange.run(buffer, active.plans, may_extend=active.mode is Mode.MONITORED)
        return buffer, inventory, self.values.take_tags() if tags is None else tags

    def _close_unmonitored(self, active: ActiveStep, tags: dict[str, Any] | None) -> None:
        if active.buffer is not None:
            recorder, policy = self.plugins.built_in.recorder, self.plugins.built_in.policy
            recorded = RecordedStep(active, *self._take(active, tags))
            oldest = self.pipeline.waiting[0].step if self.pipeline.waiting else None
            if recorder is not None:
                self.pipeline.backfill(self.plugins.call_one(recorder, recorder.keep, recorded, oldest) or ())
            if policy is not None and (known := policy.known) is not None and not active.is_overflowed:
                self.plugins.call_one(policy, self.pipeline.learn, *known)
        elif tags is None:
            self.values.tags = {}
        is_interrupted = "interrupted" in active.annotations  # the loop left the step by an error, so that it was not applied
        if active.is_overflowed:
            self.pipeline.count_refusal(is_interrupted)
        if self.pipeline.detectors.count_unmonitored(active.is_overflowed and not is_interrupted):
            self.plugins.alert(active.number)

    def _pending(self, active: ActiveStep, tags: dict[str, Any] | None) -> PendingStep:
        self._cost.monitored += 1
        if self._cost.monitored == self._cost.due:
            self._cost.look()
        buffer, inventory, found = self._take(active, tags)
        evaluate = self.captures.needed_modules().values.evaluator() if active.due else None
        readback = PendingReadback(buffer)
        if self.plugins.listening["annotate"]:
            self.plugins.call("annotate", active)
        groups = self.loop.ownership.groups(inventory) if self.loop is not None and self.factory.layers.choice == "blocks" else []
        cost, attached = self.fence.cost(), self.loop is not None
        return PendingStep(readback, active, inventory, evaluate, groups, found, cost, self._ranks, attached)

    # --- parts of a step that may be steps of their own ------------------------------------------------------------------------

    def set_aside(self) -> None:
        """An optimizer has stepped, and others are still to step: what was measured so far, and what is logged until the next pass, is a
        part of the open step, which may be a step of its own.
        """
        active, inventory = self.active, self.planner.inventory
        if active is None:
            return
        if self.captures.modules is not None:
            self.captures.modules.set_aside()
        part = active.set_aside()
        if active.buffer is not None and inventory is not None:
            active.buffer.used.update(inventory.foreign)
            self.values.buffer = part.buffer
        self._aside.append((part, self.values.take_tags()))

    def part_began(self) -> None:
        """A pass behind what was set aside begins another part."""
        active = self.active
        if active is not None and self._aside:
            self._aside[-1][1].update(self.values.take_late_tags())
            self.values.buffer = active.buffer
            if active.buffer is not None and active.is_monitored and self.pipeline.directory.path is not None:
                active.buffer.rng = rng_states()

    def rejoin(self, parts: int) -> None:
        """The last ``parts`` parts that were set aside belong to the same step as what came since."""
        if (active := self.active) is None:
            return
        for _ in range(parts):
            part, tags = self._aside.pop()
            active.rejoin(part)
            self.values.tags = {**tags, **self.values.tags}
        self.values.buffer = active.buffer

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
        step = self.state.step
        if step is not None and step != active.number:
            active.renumber(step, self.mode_of(step))

    # --- what is measured in a step --------------------------------------------------------------------------------------------

    def would_measure(self, step: int) -> bool:
        return not self.fence.inert and self.planner.module() is not None and self.cadence.wants(step)

    def mode_of(self, step: int) -> Mode:
        if self.fence.inert or self.planner.module() is None:
            if self.planner.has_lost_model:
                self.fence.complaints.add("model", f"{MODEL_GONE}; nothing is measured any more")
            return IDLE
        if self.cadence.wants(step):
            return Mode.MONITORED
        return Mode.RECORDED if self.plugins.requires_gradients else IDLE

    def prepare(self, active: ActiveStep) -> None:
        planner, captures, is_monitored = self.planner, self.captures, active.mode is Mode.MONITORED
        planner.refresh()
        if self.loop is not None and self.loop.ownership.has_changed():
            self.installed_for = None
        index = planner.inventory
        assert index is not None
        if index.spread:  # before anything is added up over ranks
            if self.exchange.ranks.count > 1:
                self.factory.summary.choice.store_all_columns()  # on each rank, with or without a run directory
            self.exchange.ranks_take_part(active.number)
        active.plans, active.due = planner.plans(active.number, self.factory.summary, gradients_only=not is_monitored)
        active.buffer = buffer = StepBuffer(active.number, self.fence.complaints)
        if is_monitored and self.pipeline.directory.path is not None:
            buffer.rng = rng_states()
        if index.homes:
            captures.measurer.ranks.count_at(index.homes)
        buffer.used.update(index.foreign)  # their ranks use them
        by_batch = planner.measures_each_batch and is_monitored
        captures.begin(active, index, by_batch, self.state.is_manual)
        if self.installed_for != (planner.version, is_monitored):
            self.install(on_modules=is_monitored)

    def prepare_next(self, may_rest: bool) -> None:
        """A step has closed: register the hooks that the next one needs before anything is seen of it. ``may_rest``: no value is on its
        way, and no plugin watches.
        """
        state, modules, step = self.state, self.captures.modules, self.state.next_step
        if state.is_manual:
            return
        if self.loop is not None and not (self.installed_for and self.installed_for[1]) and self.would_measure(step):
            self.install()  # the first thing seen of the next step may be its backward pass
        if modules is not None and modules.hooks.graphs.traced:  # or its forward, in a compiled graph
            modules.set_recording(self.would_measure(step))
        elif may_rest and state.is_plain and step - 1 == state.step and (steps := self.cadence.idle_ahead(step)) > 0:
            self._rest(steps)

    def _rest(self, steps: int) -> None:
        """The next ``steps`` steps are idle: only count them, if no hook is registered but those that every step needs, and a step of the
        optimizer is one call of its hooks.
        """
        modules = self.captures.modules
        if (loop := self.loop) is None or not self.is_bare or (modules is not None and modules.hooks.on_root):
            return
        if loop.optimizer_hooks.are_plain and loop.scaler is None:
            loop.program.begin(steps)

    def replan(self, drop_hooks: bool = False) -> None:
        """What is measured changed: register the hooks for it now, or leave that to the next step where there is time."""
        self.wake()
        if drop_hooks:
            self.uninstall()
            if self.captures.modules is not None and self.captures.modules.hooks.has_hooks:  # where they may not all go
                self._install_on_modules()
        elif self.loop is not None:
            if self.active is not None and self.active.is_monitored:
                self._install_on_modules()  # what is due in the open step stays, but the next one needs its hooks in time
            elif not self.state.is_open and self.would_measure(self.state.next_step):
                with outside_dispatch_modes():
                    self.install()

    # --- hooks -----------------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """What is measured may have changed, or which steps are monitored: follow the loop again."""
        if self.loop is not None:
            self.loop.program.wake()

    def install(self, on_modules: bool = True) -> None:
        """Register the hooks that monitored steps need, where they are missing; ``on_modules`` too, or on parameters only."""
        wanted, before = (self.planner.version, on_modules), self.installed_for
        if before == wanted or self.planner.module() is None or self.planner.inventory is None:
            return
        self.installed_for, self.is_bare = wanted, False
        if self.loop is not None:
            self.loop.program.is_ready = False
        if on_modules:
            self._install_on_modules()
        else:
            self._uninstall_from_modules()
        if self.loop is not None and (before is None or before[0] != wanted[0]):
            self.loop.install()

    def _install_on_modules(self) -> None:
        """By the plan as it is now."""
        planner, module = self.planner, self.planner.module()
        if module is not None and planner.inventory is not None:
            metrics, self.is_bare, is_linked = planner.module_metrics(), False, bool(linkable(module))
            if metrics or is_linked or self.captures.modules is not None:
                self.captures.needed_modules().install(module, planner.inventory, metrics, planner.version, is_linked)

    def _uninstall_from_modules(self) -> None:
        modules = self.captures.modules
        if modules is not None and modules.has_removable_hooks:
            modules.uninstall(self.planner.module_metrics())

    def uninstall(self) -> None:
        self.installed_for = None
        self._uninstall_from_modules()
        if self.loop is not None:
            self.loop.backward_hooks.uninstall()
        self.is_bare = self.captures.modules is None or not self.captures.modules.hooks.measures

"""Opens and closes steps: what is measured in them, what ranks exchange, and where the record goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Set
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ...step.active_step import IDLE, ActiveStep
from ...step.planner import OF_MODULES
from ..pipeline.record_pipeline import PendingQueue
from .step_closing import StepClosing
from .step_planning import StepPlanning
from .value_log import ValueLog

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
        before = self.captures.modules.paused
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
        if not is_idle or self.plugins.watch_idle_steps:
            self.plugins.call("before_step", step, is_idle=is_idle)
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

    def open(self, step: int, *, is_tentative: bool, hides_forward: bool, was_undecided: bool) -> None:
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
            modules.set_recording(False)
            if not self.hooks.is_bare:
                self.hooks.uninstall()
        else:
            self.planning.prepare(active)
            if not (self.captures.had_root_inputs or hides_forward or self.state.is_manual) and modules.hooks.on_root_inputs:
                modules.root_inputs_missed()
            if was_undecided and hides_forward and active.buffer is not None:
                active.buffer.absent.update(((source, ""), _IN_EVAL) for source in OF_MODULES)
        modules.step_began(in_eval=is_tentative)
        self.values.step_opened(active.buffer, active.is_monitored, hides_forward, is_tentative)

    def pass_idle(self, step: int) -> None:
        """The steps up to ``step`` were idle, or are, and were only counted."""
        self.active = ActiveStep(step)

    def confirm(self) -> None:
        """The open step trains, although a call in evaluation mode opened it."""
        self.captures.modules.step_confirmed()
        self.values.take_early()

    def count_eval(self) -> None:
        """From now on calls in evaluation mode count as training in the open step."""
        self.captures.modules.count_eval()

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
        is_measured = active is not None and active.buffer is not None and not self.captures.modules.paused
        if active is None or loop is None or not is_measured or not self.plugins.has("before_optimizer_step"):
            return False
        context = loop.decisions.context_of(optimizer, done, overflowed, is_overflowed)
        try:
            self.plugins.call("before_optimizer_step", active, context)
        finally:
            if active.is_skipped:
                self.plugins.call("on_skip", active)
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
                active.buffer.begins(self.planning.random_states())

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

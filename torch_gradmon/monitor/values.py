"""Values that a script logs, in time and late."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..capture.hooks import copied
from ..core.errors import GradmonWarning
from ..core.fence import Fence
from ..core.keys import Key
from ..core.torch_modes import outside_dispatch_modes
from ..statistics.request import accumulator_dtype
from ..step.buffer import Aggregation, StepBuffer
from ..step.planner import ExchangePolicy
from .machine import StepState
from .records import RecordPipeline

if TYPE_CHECKING:
    from ..plugins.clipping import DeviceValue

#: Without these a tensor on the CPU is read by ``item()`` as the loop itself would read it.
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_interpreter = torch._C._functorch.peek_interpreter_stack
_REAL = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))


class ValueLog:
    """Routes what the loop tells to steps: values that it logs, and facts (tags) about steps."""

    def __init__(self, state: StepState, fence: Fence, pipeline: RecordPipeline, exchange: ExchangePolicy) -> None:
        self._state, self._fence, self._pipeline = state, fence, pipeline
        self._exchange = exchange
        self.buffer: StepBuffer | None = None  # of the open step, or of a part of it; None where it takes no values
        self.is_recording = False  # all that is due is measured in the open step
        self.is_detached = False  # the monitor left the run, and drops what is logged
        self._early: StepBuffer | None = None  # logged for the step to come
        self._hidden: StepBuffer | None = None  # and from inside of a forward that no hook sees
        self._first_keys: frozenset[Key] = frozenset()
        self._plain: dict[str, Key] = {}  # keys under which numbers were logged before
        self._waiting: list[tuple[Key, float, str]] = []  # numbers, and to which step they belong
        self.logged: set[Key] = set()
        self.of_trainer: set[Key] = set()  # those that only a trainer has logged
        self.tags: dict[str, Any] = {}  # of the open step, or of the one to come
        self._undecided_tags: dict[str, Any] = {}
        self._ahead: set[str] = set()  # names of facts that the loop gives before a step's forward
        self._unseen_overflows: Tensor | None = None  # of steps that are not monitored

    def step_opened(self, buffer: StepBuffer | None, is_monitored: bool, hides_forward: bool, is_tentative: bool) -> None:
        """A step opened with ``buffer``; ``hides_forward``: no hook saw the forward, whose values belong to it."""
        self.buffer, self.is_recording = buffer, is_monitored
        hidden, self._hidden = self._hidden, None
        if hidden is not None and buffer is not None and hides_forward:
            buffer.absorb(hidden)
        if self._early is not None and not is_tentative:
            self.take_early()

    def take_early(self) -> None:
        """The open step is a training step: what was logged for it belongs to it."""
        early, self._early = self._early, None
        if early is not None and self._state.ended is None:
            self._first_keys = early.logged
        if early is not None and self.buffer is not None:
            self.buffer.absorb(early)

    def release(self) -> None:
        """No backward pass has followed the undecided call: what was logged since belongs to the last step."""
        early, self._early = self._early, None
        if early is not None:
            self._pipeline.add(early)
        tags, self._undecided_tags = self._undecided_tags, {}
        if tags:
            self._pipeline.tag(tags)

    # --- by the loop -----------------------------------------------------------------------------------------------------------

    def keep(self, name: str, value: Any) -> bool:
        """Log a number of the CPU under a key that was logged before; False where :meth:`log` has to do it.

        The number waits until the fence runs something, so before the state changes that decides to which step it belongs. That costs
        the loop what ``float(loss)`` does. A step that a file has gets it at once, since the file's readers need not be in this process.
        """
        began, key, pipeline = perf_counter(), self._plain.get(name), self._pipeline
        if key is None or self.is_detached or self._exchange.shares_values:
            return False
        has_modes = _function_modes() or _dispatch_modes() or _interpreter() is not None  # which see each question to a tensor
        if type(value) is Tensor:
            if has_modes or not value.is_cpu or value.numel() != 1 or value.dtype not in _REAL:
                return False
            value = value.item()
        elif type(value) is not float and (type(value) is not int or value.bit_length() > 1000):  # which no float holds
            return False
        number = value + 0.0  # a mean is never a negative zero
        step = self._step_of(key)
        if step == "last" and pipeline.last is not None and pipeline.directory.path is not None:
            try:
                if has_modes or self._waiting or not pipeline.add_numbers({key: number}):
                    return False
            except GradmonWarning:  # where warnings were made errors
                raise
            except Exception as error:
                self._lose(key, error)
        elif step and (step != "last" or pipeline.last or pipeline.is_last_monitored or pipeline.recorded):
            if step == "last" and pipeline.directory.path is not None and not pipeline.is_last_monitored:
                return False  # the recorder has it, which may be asked for it at any time
            self._waiting.append((key, number, step))
            self._fence.deferred = self._log_waiting
        if not self._fence.is_inside:
            self._fence.seconds += perf_counter() - began
        return True

    def _log_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        numbers = dict(map(itemgetter(0, 1), waiting))
        are_late = len(numbers) == len(waiting) and set(map(itemgetter(2), waiting)) == {"last"}
        if are_late and self._pipeline.add_numbers(numbers):
            return
        late, are_late = StepBuffer(-1, self._fence.complaints), False
        for key, value, _ in waiting:
            try:
                are_late |= self._log(key, value, "mean", False, False, late) is late
            except ValueError as error:
                self._lose(key, error)
        if are_late:
            self._pipeline.add(late)

    def log(
        self,
        key: Key,
        value: Any,
        aggregation: Aggregation,
        reducer: str = "",
        is_measured: bool = False,
        stands_in: bool = False,
    ) -> None:
        """Log a value as :meth:`ModuleMonitor.log_scalar` says. ``is_measured``: it is part of a training forward, and goes where that
        goes; ``stands_in``: it comes from a trainer, for a step in which the script logs no value like it.
        """
        if self._fence.inert:
            return
        began, text = perf_counter(), "/".join(filter(None, key))
        try:
            if self.is_detached:
                if not stands_in:
                    self._fence.complaints.add(f"away:{text}", f"{text} was logged while the monitor is detached, and is dropped")
                return
            if reducer:
                self._exchange.reduces = True
            if not stands_in:
                self.of_trainer.discard(key)
            elif key not in self.logged:
                self.of_trainer.add(key)
            self.logged.add(key)
            is_late = self._exchange.shares_values and self._step_of(key) == "last"
            if is_late and (reducer or self._pipeline.detectors.watches(key)):
                self._fence.complaints.add(
                    f"late:{text}",
                    f"{text} was logged after optimizer.step(), after the ranks had exchanged their values: it stays on this rank, or is "
                    "lost where they have merged earlier ones of this step, and no detector judges it; log it earlier",
                )
            with outside_dispatch_modes():
                if self._waiting:
                    self._log_waiting()
                late = StepBuffer(-1, self._fence.complaints)
                buffer = self._log(key, value, aggregation, is_measured, stands_in, late)
                if buffer is late:
                    self._pipeline.add(late)
                elif reducer and buffer is not None:
                    buffer.share(key, reducer)
            if not key.source and not key.metric and not reducer and aggregation == "mean" and not stands_in:
                self._plain[key.name] = key
        except GradmonWarning:  # where warnings were made errors
            raise
        except Exception as error:  # the value, or the code that gets it, is at fault
            self._lose(key, error)
        finally:
            if not self._fence.is_inside:
                self._fence.seconds += perf_counter() - began

    def _lose(self, key: Key, error: Exception) -> None:
        text = "/".join(filter(None, key))
        absent = self._pipeline.absent_of_last if self.buffer is None else self.buffer.absent
        absent[key.source, key.name] = str(error)
        self._fence.complaints.add(f"log:{text}", f"a value of {text} is lost", error)

    def _log(
        self, key: Key, value: Any, aggregation: Aggregation, is_measured: bool, stands_in: bool, late: StepBuffer
    ) -> StepBuffer | None:
        """Which buffer has the value, ``late`` that of a step that has ended; None where it is dropped."""
        step = self._step_of(key, is_measured)
        buffer = self.buffer if step == "open" else late if step == "last" else None
        if step == "hidden":
            buffer = self._hidden = self._hidden or StepBuffer(-1, self._fence.complaints)
        elif step == "next":
            buffer = self._early = self._early or StepBuffer(-1, self._fence.complaints)
        return buffer if buffer is not None and buffer.merge_logged(key, value, aggregation, stands_in) else None

    def _step_of(self, key: Key, is_measured: bool = False) -> str:
        """To which step a value belongs that is logged now: the ``open`` one, the ``last`` or the ``next`` one, or one whose forward is
        running and ``hidden`` from hooks; empty if that is not monitored.
        """
        state = self._state
        if self.buffer is not None and (is_measured or not state.progress.is_tentative):
            return "open"
        if is_measured and not state.is_open:
            return "hidden"
        if state.is_open:
            return "next" if state.progress.is_tentative else ""
        # what came before the first backward pass shows on which side of a hidden forward the loop logs
        is_ahead = state.patterns.hides_forward and (key in self._first_keys or self._early is not None)
        return "next" if is_ahead or state.step is None or state.patterns.is_undecided else "last"

    def put(self, values: Mapping[Key, DeviceValue]) -> None:
        """Merge device values into the open step; conditional values are replaced, others are summed."""
        if self.buffer is None:
            return
        for key, one in values.items():
            if one.there is None:
                self.buffer.merge_value(key, one.value, "sum")
            else:
                self.buffer.put_where(key, one.value, one.there)

    # --- facts -----------------------------------------------------------------------------------------------------------------

    def tag(self, tags: Mapping[str, Any]) -> None:
        """Add facts about the step that a scalar logged now would belong to; between two steps about the coming one, if that is how
        they were given at first.
        """
        if self.is_detached:
            return
        if self._state.step is None:
            self._ahead |= tags.keys()
        given = {name: copied(value) for name, value in tags.items()}  # loops fill the same list or tensor again
        late = {} if self._state.is_open else {name: value for name, value in given.items() if name not in self._ahead}
        self.tags.update((name, value) for name, value in given.items() if name not in late)
        if self._state.patterns.is_undecided:
            self._undecided_tags.update(late)
        elif late:
            self._pipeline.tag(late)

    def begin_tags(self, is_kept: bool) -> None:
        """A step opens, and what is known of it so far ``is_kept``."""
        self.tags, self._undecided_tags = {**self.tags, **self._undecided_tags} if is_kept else {}, {}

    def take_tags(self) -> dict[str, Any]:
        tags, self.tags = self.tags, {}
        return tags

    def take_late_tags(self) -> dict[str, Any]:
        """The facts of the open step, without those that the loop gives before a forward."""
        late = {name: value for name, value in self.tags.items() if name not in self._ahead}
        self.tags = {name: value for name, value in self.tags.items() if name not in late}
        return late

    def note_overflow(self, found_inf: Tensor) -> None:
        """A fused optimizer did not apply the open step where ``found_inf`` is not zero, which stays on the device."""
        overflowed, buffer, unseen = (found_inf > 0).to(accumulator_dtype(found_inf.device)), self.buffer, self._unseen_overflows
        if buffer is not None:
            buffer.noted["found_inf"] = overflowed + buffer.noted.get("found_inf", 0.0)
        if buffer is None or not self.is_recording:
            self._unseen_overflows = overflowed if unseen is None else unseen + overflowed
        elif unseen is not None:
            buffer.noted["unseen_refusals"], self._unseen_overflows = unseen, None

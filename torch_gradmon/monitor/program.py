"""The short ways through steps in which nothing unusual happens: those that are only counted, and those that are measured."""

from __future__ import annotations

import sys
import weakref
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.keys import OPTIMIZER, UPDATE
from ..core.torch_modes import capture_check
from ..step.active_step import ActiveStep
from ..step.model_index import PLAIN_GRADIENTS
from .plugin_set import WATCHES

_has_grad, _running_task = torch.is_grad_enabled, torch._C._current_graph_task_id
_interpreter, _tracing_state = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state

#: The longest time without a look at requests from other processes, in seconds.
LONGEST = 1.0
#: Steps of the general path that show the habits of a loop, before others are taken for as usual.
AFTER = 2


class StepProgram:
    """Takes the events of steps that are as usual from the hooks, in place of the step machine and the life cycle of steps, and does what
    these would do, without their questions. ``loop`` is a ``FollowedLoop`` of runtime.py.

    *Idle steps*, behind an idle one in a loop whose habits are known, that are certain to be idle as well are only counted. Each event
    that such a step does not have ends the stretch before the event is handled: from there on the loop is followed as if it had always
    been. The last idle step before a monitored one is never part of a stretch, so that hooks are there in time. Nothing there is guarded
    by the fence: there is nothing that could fail.

    *Usual steps* are monitored ones in which each optimizer steps once in the known order, behind one or more backward passes in training
    mode. Each method leaves everything as the general path would have left it, so that each event can come to either;
    and what is not as usual is handed over before anything has changed: so is the beginning of a step with a closure, for one.

    Attributes:
        left: the number of idle steps that are left.
        is_ready: the events of usual steps may come here.
        depth: how many calls of each optimizer's step are running, by its id.
    """

    def __init__(self, loop: Any, optimizer: Optimizer) -> None:
        lifecycle = loop.lifecycle
        self._loop, self._lifecycle, self._state, self.fence = loop, lifecycle, lifecycle.state, lifecycle.fence
        self._values, self._plugins, self._planner = lifecycle.values, lifecycle.plugins, lifecycle.planner
        self._captures_graph, self._watchers = capture_check(), self._plugins.watchers
        self._audit, self._detail = self._plugins.built_in.audit, self._plugins.built_in.detail
        self.depth: dict[int, int] = {}
        self.left = self._thread = 0
        self._last_followed: int | None = None  # the number of the last step before a stretch
        self._due = self._spent = 0.0
        self.is_ready, self._until_ready = False, AFTER
        self._optimizer, self._key = weakref.ref(optimizer), id(optimizer)

    def wake(self) -> None:
        """What is measured may have changed, or which steps are monitored."""
        self.is_ready = False
        self.stop()

    # --- idle steps --------------------------------------------------------------------------------------------------------------

    def begin(self, steps: int) -> None:
        self.left, self._thread, self._due = steps, get_ident(), perf_counter() + LONGEST
        self._last_followed = self._state.step
        self._audit.count_only(steps)

    def stop(self) -> None:
        if self.left:
            self.left = 0
            self._leave()

    def _leave(self) -> None:
        if self._state.step is not None and self._state.step != self._last_followed:
            self._lifecycle.active = ActiveStep(self._state.step)
            if self._state.is_open:
                self._state.patterns.called_in_training = True
            else:
                self._state.leave_idle(self._key)
        self.fence.seconds += self._spent
        self._spent = 0.0

    # their code and data have left the cache since the last step, so each call and each object counts. Each returns whether that is all,
    # else the loop is followed again

    def idle_forward_began(self, module: nn.Module) -> bool:
        if not _has_grad() or _running_task() != -1:
            return True  # evaluation, or a recomputation
        if _interpreter() is not None or _tracing_state() is not None:
            return True  # a transform, or a trace
        began, state = perf_counter(), self._state
        is_usual = self._audit.forwards < self._audit.most_forwards  # else another optimizer may step now
        is_odd = not is_usual or not module.training or get_ident() != self._thread
        is_odd = is_odd or (self._captures_graph is not None and self._captures_graph())
        is_odd = is_odd or self._detail.watches_idle_steps or (len(self._watchers) > 0 and any(map(WATCHES, self._watchers)))
        if is_odd or state.progress.begun:
            self.stop()
            return False
        if not state.is_open:
            state.open_idle()
        self._audit.forwards += 1
        self._spent += perf_counter() - began
        return True

    def idle_step_began(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        state, key = self._state, self._key
        is_odd = not state.is_open or len(args) > 1 or bool(kwargs or state.progress.begun)
        is_odd = is_odd or getattr(optimizer, "found_inf", None) is not None
        is_odd = is_odd or (self._captures_graph is not None and self._captures_graph())
        is_odd = is_odd or self._detail.watches_idle_steps or (len(self._watchers) > 0 and any(map(WATCHES, self._watchers)))
        if is_odd or _running_task() != -1:
            self.stop()
            return False
        state.progress.begun.add(key)
        self.depth[key] = 1
        return True

    def idle_step_ended(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        began, state, key = perf_counter(), self._state, self._key
        if not state.is_open or key not in state.progress.begun:
            self.stop()
            return False
        state.close_idle(key)
        if self._values.tags:
            self._values.tags = {}
        self.depth[key] = self._audit.forwards = 0
        self._audit.left -= 1
        ended = perf_counter()
        self._spent += ended - began
        self.left -= 1
        if ended >= self._due or self.left <= 0:  # below if another thread has stopped it
            self.left = 0
            self._leave()
        return True

    # --- usual steps, inside of the fence ------------------------------------------------------------------------------------------

    def step_followed(self) -> None:
        """A step was followed to its end. It may have been the last one that differs from others: until something wakes, the loop is
        neither paused nor by hand, and its optimizers step in one order.
        """
        state = self._state
        self._until_ready -= 1
        is_plain = state.is_plain and state.in_backward.is_settled and self._until_ready <= 0 and not state.patterns.is_first
        self.is_ready = is_plain and not self._loop.optimizer_hooks.is_odd and self._planner.source is PLAIN_GRADIENTS

    def forward_began(self, module: nn.Module) -> None:
        """The model is called."""
        lifecycle, state, hooks, step = self._lifecycle, self._state, self._loop.optimizer_hooks, self._state.next_step
        progress, patterns = state.progress, state.patterns
        is_usual = self.fence.had_grad and module.training and _running_task() == -1
        is_usual = is_usual and _interpreter() is None and _tracing_state() is None
        is_usual = is_usual and not (patterns.is_undecided or self.fence.is_captured) and self._optimizer() is not None
        is_usual = is_usual and (hooks.is_shielded or "torch._dynamo" not in sys.modules)
        if state.is_open and not hooks.in_closure:
            is_usual = is_usual and not (progress.is_attempted or progress.begun or progress.is_between)
        if progress.is_tentative or not is_usual or state.step is None or (not state.is_open and step <= state.step):
            self._loop.model_hooks.model_called(module, True)
            return
        if not hooks.in_closure:
            self.depth.clear()
        if hooks.may_skip and not state.is_open:
            self._plugins.tell("policy", "before_forward", module)
        if self._audit.left and self._audit.forwards < self._audit.most_forwards:
            self._audit.forwards += 1
        else:
            self._plugins.call_one(self._audit, self._audit.on_forward)
        if not state.is_open:
            patterns.hides_forward = False
            lifecycle.seal(step)
            state.open(step, is_tentative=False)
            lifecycle.open(step, is_tentative=False, hides_forward=False)
        patterns.called_in_training = True
        lifecycle.captures.training_began()

    def backward_ended(self) -> None:
        """A backward pass is over that is no part of another one."""
        loop, state, progress, captures = self._loop, self._state, self._state.progress, self._lifecycle.captures
        if not state.is_open or progress.is_tentative or progress.is_between or self._optimizer() is None:
            loop.backward_ended(is_nested=False)
            return
        if not self._audit.left:
            self._plugins.call_one(self._audit, self._audit.on_backward_ended)
        progress.backwards += 1
        state.patterns.backward_since = True
        if captures.modules is not None:
            captures.modules.backward_ended()
        if progress.backwards < (state.patterns.fewest_backwards or 0) and loop.machine.expects_more():
            return
        if loop.scaler_hooks.scales.scaler is None and not progress.done:
            captures.gradients.before_clip(loop.ownership.all_positions, None)
        else:
            loop.measure_before_clip()

    def step_began(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The optimizer is about to step."""
        loop, state, key, active = self._loop, self._state, id(optimizer), self._lifecycle.active
        progress, captures, ownership = state.progress, self._lifecycle.captures, loop.ownership
        is_only, is_last = len(ownership.order) == 1, ownership.order[-1] == key
        is_usual = state.is_open and not (progress.is_attempted or progress.begun or progress.is_tentative)
        is_usual = is_usual and not (progress.awaits_next or progress.raised or key == loop.machine.resting)
        is_usual = is_usual and not (key in progress.times or key in progress.done)
        enough = (state.patterns.fewest_backwards or 1) if is_only else 1
        is_usual = is_usual and progress.backwards >= enough and _running_task() == -1
        is_usual = is_usual and not (loop.backward_hooks.awaited or self.fence.is_captured or args[1:] or kwargs)
        is_usual = is_usual and not self.depth.get(key) and getattr(optimizer, "grad_scale", None) is None
        if not is_usual or active is None or active.buffer is None:
            return loop.optimizer_hooks.step_began(optimizer, args, kwargs)
        self.depth[key] = 1
        loop.scaler_hooks.step_began(optimizer, takes_values=True)
        if not self._audit.left or self._plugins.listening["on_optimizer_step"]:
            self._plugins.call("on_optimizer_step", optimizer, False)
        state.in_backward.outside.add(key)
        progress.begun.add(key)
        turns = 0 if is_only else loop.machine.turns()
        self._lifecycle.note({"by_turns": float(turns)} if turns else {}, optimizer, ownership.order.index(key))
        if not is_only:
            loop.release_gradients(key)
        were_measured, progress.parameters_measured = progress.parameters_measured, True
        if not were_measured:
            captures.parameters.measure(ownership.all_positions)
        if not active.plans[UPDATE].empty:
            captures.parameters.before_step(ownership.all_positions if is_only else ownership.of(key, is_last), not were_measured)
        scale = None if loop.scaler_hooks.scales.scaler is None else loop.scaler_hooks.inverse_scale(optimizer)
        captures.gradients.after_clip(ownership.owned[key], scale)
        if ownership.unowned and is_last:
            loop.measure_unowned()
        is_skipped = loop.optimizer_hooks.may_skip and loop.machine.decide(key)
        progress.done.add(key)
        if is_skipped:
            loop.optimizer_hooks.holds.hold(optimizer)
        return None

    def step_ended(self, optimizer: Optimizer, *_: object) -> None:
        """The optimizer has stepped."""
        loop, state, key, active = self._loop, self._state, id(optimizer), self._lifecycle.active
        progress, patterns, hooks, order = state.progress, state.patterns, loop.optimizer_hooks, loop.ownership.order
        is_usual = state.is_open and not progress.is_attempted and len(progress.begun) == 1 and key in progress.begun
        is_usual = is_usual and self.depth.get(key) == 1 and _running_task() == -1
        is_usual = is_usual and not (hooks.holds.held or hooks.in_wrapper.get(key))
        is_usual = is_usual and not (patterns.called_in_eval or progress.raised or key in progress.times)
        if not is_usual or active is None or active.buffer is None or getattr(optimizer, "found_inf", None) is not None:
            hooks.step_ended(optimizer)
            return
        self.depth[key] = 0
        if self._audit.left and self._audit.forwards:
            self._audit.left, self._audit.forwards = self._audit.left - 1, 0
        else:
            self._plugins.call_one(self._audit, self._audit.on_optimizer_stepped, optimizer, True)
        if self._plugins.built_in.replicas is not None:
            self._plugins.tell("replicas", "on_optimizer_stepped", optimizer)
        progress.begun.clear()
        progress.done.add(key)
        progress.in_part.add(key)
        progress.times[key], progress.latest = 1, key
        patterns.backwards_at_step = progress.backwards
        if not (active.plans[UPDATE].empty and active.plans[OPTIMIZER].empty):
            self._lifecycle.captures.parameters.after_step(loop.ownership.owned[key], optimizer)
        if order[-1] != key:
            loop.machine.part_ended(key)
            return
        if len(order) > 1:
            loop.machine.round_ended(key)
        progress.is_attempted, state.attempts = True, state.attempts + 1
        patterns.called_in_training = patterns.backward_since = False
        if self._plugins.listening["after_attempt"]:
            self._lifecycle.attempt_ended(progress.is_overflowed)
        if not loop.scaler_hooks.in_step:
            state.close()
            self._lifecycle.close(is_overflowed=progress.is_overflowed)

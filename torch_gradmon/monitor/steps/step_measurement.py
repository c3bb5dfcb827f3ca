"""Carries out the measurements that the step machine requests."""

# ruff: noqa: D102 (the protocol has the docstrings)
from __future__ import annotations

import weakref
from collections.abc import Hashable, Set

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...capture.gradients import inverse
from ...core.keys import GRADIENT_BEFORE_CLIP
from ...statistics.request import accumulator_dtype
from ...step.model_index import PLAIN_GRADIENTS
from ..loop.loop_hooks import LoopHooks
from .ownership import Ownership
from .step_lifecycle import StepLifecycle

_UNFINISHED = "the last backward pass was interrupted, as by an exception, so gradients before clipping were not seen"
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
        """See :class:`StepMeasurements`, as for all methods here."""
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
        if active is not None and active.buffer is not None and gradients.there(gradients.not_clipped(positions)):
            active.buffer.refuse_all(GRADIENT_BEFORE_CLIP, _UNFINISHED)

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
        return any(self._lifecycle.plugins.call("sees_alternation"))

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

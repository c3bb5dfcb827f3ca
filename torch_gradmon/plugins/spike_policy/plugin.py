"""Decides before an optimizer steps whether the step is a spike, and how to handle it: one decision on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...core.errors import SpikeError, WarningLog
from ...core.keys import SUMMARY, Key
from ...spikes.detector_set import DetectorSet
from ...step.active_step import ActiveStep, Mode, RecordedStep
from ...step.exchange import RankExchange
from ...step.plugin import OptimizerContext, Plugin
from .buffers import KnownBuffers
from .decision import CALM, NONFINITE, Votes
from .policy import Act, Policy, Rollback, RolledBack
from .rollbacks import Rollbacks

_STEPS_SKIPPED = Key(SUMMARY, "", "steps_skipped")


class SpikePolicy(Plugin):
    """Handles the spikes of one run.

    Args:
        policy: the action on a spike.
        detectors: predict spikes. They learn nothing here, only later from the step's record.
        exchange: with the other ranks, only for decisions.
        complaints: receives a warning about each action.
        parts: what ranks must have in common to exchange tensors.

    Attributes:
        act: the action on the current step, or on the last one that ended; None if it is no spike.
        rolled_back: the rollback of that step, if there was one.
        skipped, rollbacks: their numbers so far.
    """

    name = "spike_policy"

    def __init__(
        self,
        policy: Policy,
        detectors: DetectorSet,
        exchange: RankExchange,
        complaints: WarningLog,
        parts: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.policy = policy.without_others() if isinstance(policy, Rollback) else policy
        self._model_buffers = KnownBuffers(complaints)
        self.act: Act | None = None
        self.rolled_back: RolledBack | None = None
        self.skipped = self.rollbacks = 0
        settings = policy.settings  # not the policy, which may hold the model
        self._votes = Votes(detectors, exchange, complaints, lambda: {**parts(), "on_spike=": settings})
        self._rollbacks = Rollbacks(policy, exchange.ranks, complaints) if isinstance(policy, Rollback) else None
        self._in_a_row = 0

    @property
    def requires_gradients(self) -> bool:
        """Whether optimizers are attached: then every step needs gradients."""
        return self.context.is_attached

    def on_detach(self) -> None:
        """Take part in no more decisions."""
        self._votes.end()

    # --- the model's buffers -------------------------------------------------------------------------------------------------

    def on_attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Remember the buffers before the first batch."""
        self._model_buffers.remember(module, self.context.plan_version)

    def before_forward(self, module: nn.Module) -> None:
        """Remember the buffers before a forward in training mode."""
        self._model_buffers.remember_once(module, self.context.plan_version)

    def on_drop(self) -> None:
        """The next step begins anew."""
        self._model_buffers.step_dropped()

    # --- the step ------------------------------------------------------------------------------------------------------------

    def on_step_open(self, step: ActiveStep) -> None:
        """A step begins, and with it the loop has done all that belongs to the one before: the time for a snapshot of it, which waits
        for the device.
        """
        self.act = self.rolled_back = None
        self._votes.begin()
        rollbacks = self._rollbacks
        if rollbacks is None or rollbacks.due is None:
            return
        if rollbacks.take_due(self.context.module, self.context.optimizers):
            self._in_a_row = 0

    @property
    def is_skipped(self) -> bool:
        """Whether the step in flight, or the one that ended last, is skipped."""
        return self.act is not None and self.act.skipped

    def overrules_scaler(self) -> bool:
        """Whether ranks' scalers disagreed about the step, which is therefore skipped."""
        return self._votes.split

    def before_optimizer_step(self, step: ActiveStep, optimizer: OptimizerContext) -> None:
        """Decide whether the optimizer that is about to step must change nothing. Synchronises; one or two collectives.

        Raises:
            SpikeError: the policy stops the run.
        """
        assert step.buffer is not None
        try:
            if not self.is_skipped:  # else all ranks know
                if not self._votes.are_common(step.number):
                    return
                severity, reason = self._votes.cast(step.buffer, step.plans, optimizer)
                if severity == CALM or not self._answer(step.number, severity, reason, optimizer.stepped):
                    return
            self._model_buffers.put_back()
        finally:
            if self.act is not None:
                step.mode = Mode.MONITORED  # what is done about a step is recorded, whatever the cadence
            step.is_skipped = self.is_skipped

    def annotate(self, step: ActiveStep) -> None:
        """Record the action on the step."""
        if self.act is not None:
            step.annotations.update(self.act.context())
        step.values[_STEPS_SKIPPED] = float(self.skipped)

    def on_unmonitored_step(self, recorded: RecordedStep) -> None:
        """Let the detectors learn from the values that were known at the decision."""
        if self._votes.known is not None and not recorded.step.is_overflowed:
            self.context.learn(*self._votes.known)

    def _answer(self, step: int, severity: float, reason: str, stepped: str) -> bool:
        policy = self.policy
        if self.act is not None and severity < NONFINITE:
            return False  # it was accepted when an earlier optimizer stepped
        self._in_a_row += self.act is None
        if policy.limit is not None and self._in_a_row > policy.limit:
            row = f"the {_ordinal(self._in_a_row)} spike in a row"
            if policy.on_limit == "stop":
                self.act = Act(reason, f"stopped, since it is {row}", True, self._in_a_row)
                self.skipped += 1
                self._model_buffers.put_back()
                raise SpikeError(f"step {step}: {reason}; this is {row}, and {policy!r} stops the run")
            if severity < NONFINITE:
                self.act = Act(reason, f"accepted, since it is {row}", False, self._in_a_row)
                return False
        words = f"skipped, {self._in_a_row} in a row" if self._in_a_row > 1 else "skipped"
        if policy.limit is not None and self._in_a_row > policy.limit:
            words += "; a step with NaN or Inf is never accepted"
        if stepped:
            words += f", but {stepped} had stepped before"
        self.act = Act(reason, words, True, self._in_a_row)
        self.skipped += 1
        return True

    # --- after the step --------------------------------------------------------------------------------------------------------

    def after_attempt(self, step: ActiveStep, applied: bool) -> None:
        """Restore a snapshot after a spike, when all optimizers have stepped or were skipped."""
        model = self.context.module
        if model is None:
            return
        if self.is_skipped:
            self._model_buffers.put_back()  # a forward may have followed the decision
        rollbacks, act = self._rollbacks, self.act
        if rollbacks is not None:
            rollbacks.attempt_ended(step.number, is_sound=applied and act is None)
        if applied and (rollbacks is None or act is not None):
            self._in_a_row = 0  # with rollbacks, a step that is no spike leaves this to the next snapshot
        elif not applied and rollbacks is not None and act is not None and act.skipped:
            done = rollbacks.go_back(step.number, model, self.context.optimizers)
            if done is not None:
                self.rollbacks, self.rolled_back = self.rollbacks + 1, done
                self.act = Act(act.reason, f"went back to the state after step {done.to_step}", True, act.in_a_row)
        self._model_buffers.attempt_ended(model, self.context.plan_version)

    def on_rewind(self, step: int) -> None:
        """The loop has gone back by itself: snapshots are of another branch."""
        if self._rollbacks is not None:
            self._rollbacks.rewind()

    def close(self) -> None:
        """The run ends."""
        self._model_buffers.forget()
        if self._rollbacks is not None:
            self._rollbacks.forget()

    # --- resume ----------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers. Snapshots are no part of it."""
        return {"in_a_row": self._in_a_row, "skipped": self.skipped, "rollbacks": self.rollbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._in_a_row, self.skipped, self.rollbacks = int(state["in_a_row"]), int(state["skipped"]), int(state["rollbacks"])
        self.on_rewind(0)


def _ordinal(number: int) -> str:
    kind = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{kind}"

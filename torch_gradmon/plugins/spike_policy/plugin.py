"""Decides, before an optimizer steps, whether the step is a spike, and what is done about it: one decision on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...core.errors import Complaints, SpikeError
from ...core.records import StepRecord
from ...spikes.detector_set import Judges
from ...step.buffer import StepBuffer
from ...step.exchange import Exchange
from ...step.plan import SourcePlan
from .buffers import Buffers
from .decision import CALM, NONFINITE, Votes
from .policy import Act, Policy, Rollback, RolledBack, View
from .snapshots import Snapshots


class Actor:
    """What is done about spikes in one run.

    Args:
        policy: what may be done.
        judges: the detectors, which are asked and learn nothing here: what a step brings they learn when its record is made.
        exchange: with the other ranks, for decisions alone.
        complaints: where it is said what was done.

    Attributes:
        act: what became of the step in flight, or of the one that ended last, if it is a spike.
        rolled_back: the same, where it went back to a snapshot.
        skipped, rollbacks: how many so far.
    """

    def __init__(self, policy: Policy, judges: Judges, exchange: Exchange, complaints: Complaints) -> None:
        self.policy = policy.without_others() if isinstance(policy, Rollback) else policy
        self.buffers = Buffers()
        self.act: Act | None = None
        self.rolled_back: RolledBack | None = None
        self.skipped = self.rollbacks = 0
        self._votes = Votes(judges, exchange, complaints, policy.settings)
        self._ranks, self._complaints = exchange.ranks, complaints
        self._snapshots = Snapshots(policy, exchange.ranks.rank) if isinstance(policy, Rollback) else None
        self._in_a_row = 0
        self._batches = 0  # that came, or were passed over
        self._worth_keeping: int | None = None  # the step before, if a snapshot is due after it

    # --- the step ------------------------------------------------------------------------------------------------------------

    def step_opened(self, model: nn.Module | None, optimizers: Sequence[Optimizer]) -> None:
        """A step begins, and with it the loop has done all that belongs to the one before: the time for a snapshot of it, which waits
        for the device.
        """
        self.act = self.rolled_back = self._votes.known = None
        self._votes.split = False
        step, self._worth_keeping = self._worth_keeping, None
        if step is None or self._snapshots is None or model is None:
            return
        self._in_a_row = 0
        try:
            self._snapshots.take(step, self._batches, model, optimizers)
        except Exception as error:  # a full disk, or what cannot be copied
            self._complaints.add("snapshot", f"no snapshot could be taken after step {step}", error)

    @property
    def skips(self) -> bool:
        """Whether the step in flight, or the one that ended last, is skipped."""
        return self.act is not None and self.act.skipped

    @property
    def known(self) -> tuple[StepRecord, dict[str, float]] | None:
        """What was known of the step when it was decided, as a record and whole-model values."""
        return self._votes.known

    @property
    def overrules_scaler(self) -> bool:
        """Whether ranks' scalers disagreed about the step, which is therefore skipped."""
        return self._votes.split

    def decide(self, buffer: StepBuffer, plans: Mapping[str, SourcePlan], view: View) -> bool:
        """Whether the optimizer that is about to step is to change nothing. Synchronises; a collective, or two.

        Args:
            buffer: what was measured in the step so far.
            plans: what was to be.
            view: the optimizer.

        Raises:
            SpikeError: the policy says to stop.
        """
        if not self.skips:  # else all ranks know
            if not self._votes.are_common:
                return False
            severity, reason = self._votes.cast(buffer, plans, view)
            if severity == CALM or not self._answer(buffer.step, severity, reason, view.stepped):
                return False
        self._put_buffers_back()
        return True

    def _put_buffers_back(self) -> None:
        if failed := self.buffers.put_back():
            names = ", ".join(failed[:3])
            message = f"buffers of the model ({names}) could not be made what they were before a step that was skipped"
            self._complaints.add("buffers", message)

    def _answer(self, step: int, severity: float, reason: str, stepped: str) -> bool:
        policy = self.policy
        if self.act is not None and severity < NONFINITE:
            return False  # it was accepted when an earlier optimizer stepped
        self._in_a_row += self.act is None
        if policy.limit is not None and self._in_a_row > policy.limit:
            row = f"the {_ordinal(self._in_a_row)} spike in a row"
            if policy.on_limit == "stop":
                self.act = Act(reason, f"stopped, for it is {row}", True, self._in_a_row)
                self.skipped += 1
                self._put_buffers_back()
                raise SpikeError(f"step {step}: {reason}; this is {row}, and {policy!r} says to stop")
            if severity < NONFINITE:
                self.act = Act(reason, f"accepted, for it is {row}", False, self._in_a_row)
                return False
        words = f"skipped, {self._in_a_row} in a row" if self._in_a_row > 1 else "skipped"
        if policy.limit is not None and self._in_a_row > policy.limit:
            words += "; what holds NaN or Inf is never accepted"
        if stepped:
            words += f", but {stepped} had stepped before"
        self.act = Act(reason, words, True, self._in_a_row)
        self.skipped += 1
        return True

    # --- after the step --------------------------------------------------------------------------------------------------------

    def attempt_over(self, step: int, applied: bool, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """All optimizers have stepped, or have not: go back to a snapshot where there was a spike."""
        if self.skips:
            self._put_buffers_back()  # a forward may have followed the decision
        self._batches += 1
        if applied and self.act is None:
            if self._snapshots is None:
                self._in_a_row = 0
            elif self._snapshots.is_due(step):
                self._worth_keeping = step
        elif applied:
            self._in_a_row = 0  # accepted
        elif self.skips and self._snapshots is not None:
            self._go_back(step, model, optimizers)

    def _go_back(self, step: int, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        assert isinstance(self.policy, Rollback)
        assert self._snapshots is not None
        assert self.act is not None
        snapshots = self._snapshots
        to = self._snapshots.choose(step, set(self._snapshots.steps).intersection(*self._ranks.gathered(self._snapshots.steps)))
        if to is None:
            return
        if failures := self._on_all(lambda: snapshots.load(to, model, optimizers)):  # all go back, or none
            self._snapshots.forget()
            self._complaints.add(
                "rollback", f"step {step} is skipped, but the model could not go back to step {to}: {failures[0]}"
            )
            return
        before = self._snapshots.batches_of(to)
        if failures := self._on_all(lambda: snapshots.go_back(step, model, optimizers)):
            message = f"not all of the model went back to step {to}, and what it is now is of no use: {failures[0]}"
            self._complaints.add("rollback:partly", message)
        self.rollbacks += 1
        self.rolled_back = RolledBack(step, to, self._batches - before, self.policy.skip_batches)
        self._batches += self.policy.skip_batches
        self.act = Act(self.act.reason, f"went back to the state after step {to}", True, self.act.in_a_row)

    def _on_all(self, action: Callable[[], object]) -> list[str]:
        """Do it on each rank; what went wrong, on any of them."""
        failure = ""
        try:
            action()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        return list(filter(None, self._ranks.gathered(failure)))

    def goes_back(self) -> None:
        """The loop has gone back by itself: snapshots are of another branch."""
        self._worth_keeping = None
        if self._snapshots is not None:
            self._snapshots.forget()

    def close(self) -> None:
        """The run ends."""
        self.buffers.forget()
        if self._snapshots is not None:
            self._snapshots.forget()

    # --- resume ----------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers. Snapshots are no part of it."""
        return {"in_a_row": self._in_a_row, "skipped": self.skipped, "rollbacks": self.rollbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._in_a_row, self.skipped, self.rollbacks = int(state["in_a_row"]), int(state["skipped"]), int(state["rollbacks"])
        self.goes_back()


def _ordinal(number: int) -> str:
    kind = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{kind}"

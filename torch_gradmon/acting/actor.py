"""Decides, before an optimizer steps, whether the step is a spike, and what is done about it: one decision on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .. import names as n
from ..errors import Complaints, SpikeError
from ..exchange import Exchange
from ..plan import SourcePlan
from ..record import Event, StepRecord
from ..spikes.judges import Judges
from ..statistics.moments import Column, identity
from ..step import StepBuffer
from ..summary import gradient_values
from .buffers import Buffers
from .policy import Act, Policy, Rollback, RolledBack
from .snapshots import Snapshots

#: What is known of a step before its optimizer steps.
_SOURCES = (n.GRADIENT_BEFORE_CLIP, n.GRADIENT)
#: What a rank says: nothing, that it saw a spike, or one of NaN and Inf.
_CALM, _SPIKE, _NONFINITE = 0.0, 1.0, 2.0
#: After so many steps in a row that cannot be accepted it is said again.
_TOLD = (1, 3, 30, 300, 3000)


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
        known: what was known of the step when it was decided, as a record and whole-model values.
        overrules_scaler: whether ranks' scalers disagreed about the step, which is therefore skipped.
        skipped, rollbacks: how many so far.
    """

    def __init__(self, policy: Policy, judges: Judges, exchange: Exchange, complaints: Complaints) -> None:
        self.policy = policy
        self.buffers = Buffers()
        self.act: Act | None = None
        self.rolled_back: RolledBack | None = None
        self.known: tuple[StepRecord, dict[str, float]] | None = None
        self.overrules_scaler = False
        self.skipped = self.rollbacks = 0
        self._judges, self._exchange, self._complaints = judges, exchange, complaints
        self._snapshots = Snapshots(policy, exchange.ranks.rank) if isinstance(policy, Rollback) else None
        self._in_a_row = 0
        self._batches = 0  # that came, or were passed over
        self._worth_keeping: int | None = None  # the step before, if a snapshot is due after it

    # --- the step ------------------------------------------------------------------------------------------------------------

    def step_opened(self, model: nn.Module | None, optimizers: Sequence[Optimizer]) -> None:
        """A step begins, and with it the loop has done all that belongs to the one before: the time for a snapshot of it, which waits
        for the device.
        """
        self.act, self.rolled_back, self.known, self.overrules_scaler = None, None, None, False
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

    def decide(self, buffer: StepBuffer, plans: Mapping[str, SourcePlan], has_scaler: bool, refused: bool, stepped: str) -> bool:
        """Whether the optimizer that is about to step is to change nothing. Synchronises; a collective, or two.

        Args:
            buffer: what was measured in the step so far.
            plans: what was to be.
            has_scaler: a GradScaler looks after infinite gradients, in the optimizer's own step.
            refused: it has refused this step.
            stepped: which optimizers have stepped already in this step, in words.

        Raises:
            SpikeError: the policy says to stop.
        """
        if self.skips:
            return True  # all ranks know
        if not self._exchange.all_take_part("decisions", self._layout):
            return False
        events: list[Event] = []
        try:
            record, whole = self._look(buffer, plans)
            self.known = record, whole
            events = self._seen(record, whole, has_scaler) if not refused else []
        except Exception as error:  # the others wait for this rank's vote
            self._complaints.add("internal:decide", f"whether step {buffer.step} is a spike could not be told", error)
        reason = "; ".join(event.reason for event in events)
        spoiled = self.known is not None and _nonfinite(self.known[0]) > 0
        severity = _CALM if not events else _NONFINITE if spoiled else _SPIKE
        severity, reason = self._vote(severity, reason, refused)
        return severity != _CALM and self._answer(buffer.step, severity, reason, stepped)

    def _layout(self) -> list[object]:
        return [repr(self.policy), sorted(self._judges.detectors)]

    def _look(self, buffer: StepBuffer, plans: Mapping[str, SourcePlan]) -> tuple[StepRecord, dict[str, float]]:
        """What is known now, merged over ranks: a record of it, and the whole-model values."""
        part = buffer.part(_SOURCES)
        spread = {source: (plans[source].exchanged, plans[source].columns) for source in _SOURCES if plans[source].exchanged}
        self._exchange.run(part, spread, self._judges.watches_values, self._judges.watches, asked="decisions")
        tables, values, _ = part.flush()
        refused = {*part.refused, *(source for (source, name) in part.absent if not name)}
        before = tables.get(n.GRADIENT_BEFORE_CLIP)
        whole = {} if before is None or n.GRADIENT_BEFORE_CLIP in refused else gradient_values(before)
        return StepRecord(buffer.step, 0.0, True, values, tables), whole

    def _seen(self, record: StepRecord, whole: Mapping[str, float], has_scaler: bool) -> list[Event]:
        events = self._judges.foresee(record, whole)
        count = _nonfinite(record)
        if count and has_scaler:
            return []  # infinite gradients are the scaler's own affair
        if count and not any(not math.isfinite(event.value) for event in events):
            reason = f"{count:,} elements of the gradients are NaN or infinite"
            events.append(Event(record.step, "grad_nonfinite", math.nan, math.inf, 0.0, reason))
        return events

    def _vote(self, severity: float, reason: str, refused: bool) -> tuple[float, str]:
        """What all ranks say together: the worst of it, and why."""
        ranks = self._exchange.ranks
        if ranks.count == 1:
            return severity, reason
        row = identity(2, ranks.device)
        row[0, Column.MAX] = severity
        row[1, [Column.MIN, Column.MAX]] = float(refused)
        merged = ranks.merged(row, frozenset({Column.MIN, Column.MAX}))
        worst, any_refused, all_refused = merged[0, Column.MAX].item(), merged[1, Column.MAX].item(), merged[1, Column.MIN].item()
        some_refused = any_refused > 0 and not all_refused
        self.overrules_scaler |= some_refused
        if worst == _CALM and not some_refused:
            return _CALM, ""
        if refused:
            reason = "the scaler did not let the optimizer step"
        told = {rank: words for rank, words in enumerate(ranks.gathered(reason)) if words}
        if len(told) == ranks.count and len(set(told.values())) == 1:
            return max(worst, _SPIKE), next(iter(told.values()))
        words = "; ".join(f"rank {rank}: {words}" for rank, words in list(told.items())[:3])
        return _NONFINITE if some_refused else worst, words + (f"; and {len(told) - 3} more ranks" if len(told) > 3 else "")

    def _answer(self, step: int, severity: float, reason: str, stepped: str) -> bool:
        policy = self.policy
        self._in_a_row += 1
        if policy.limit is not None and self._in_a_row > policy.limit:
            row = f"the {_ordinal(self._in_a_row)} spike in a row"
            if policy.then == "stop":
                self.act = Act(reason, f"stopped, for it is {row}", skipped=True)
                self.skipped += 1
                raise SpikeError(f"step {step}: {reason}; this is {row}, and {policy!r} says to stop")
            if severity < _NONFINITE:
                self.act = Act(reason, f"accepted, for it is {row}", skipped=False)
                return False
            if self._in_a_row - policy.limit in _TOLD:
                message = f"{self._in_a_row} steps in a row hold NaN or Inf and are skipped; none of them can be accepted"
                self._complaints.say(f"step {step}: {message}")
        self.buffers.put_back()
        number = f", {self._in_a_row} in a row" if self._in_a_row > 1 else ""
        self.act = Act(reason, f"skipped{number}{f', but {stepped} had stepped before' if stepped else ''}", skipped=True)
        self.skipped += 1
        return True

    # --- after the step --------------------------------------------------------------------------------------------------------

    def attempt_over(self, step: int, applied: bool, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """All optimizers have stepped, or have not: go back to a snapshot where there was a spike."""
        self.buffers.forget()
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
        ranks = self._exchange.ranks
        to = self._snapshots.choose(step, set(self._snapshots.steps).intersection(*ranks.gathered(self._snapshots.steps)))
        if to is None:
            return
        failure: Exception | None = None
        try:
            self._snapshots.load(to, model, optimizers)
        except Exception as error:
            failure = error
        if failures := list(filter(None, ranks.gathered(str(failure or "")))):  # all go back, or none
            self._snapshots.forget()
            message = f"step {step} is skipped, but the model could not go back to step {to}: {failures[0]}"
            self._complaints.add("rollback", message)
            return
        before = self._snapshots.go_back(step, model, optimizers)
        self.rollbacks += 1
        self.rolled_back = RolledBack(step, to, self._batches - before, self.policy.pass_over)
        self._batches += self.policy.pass_over
        self.act = Act(self.act.reason, f"went back to the state after step {to}", skipped=True)

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


def _nonfinite(record: StepRecord) -> int:
    """Elements of the gradients that are NaN or infinite."""
    return max((int(table.rows[:, Column.NONFINITE].sum().item()) for table in record.tables.values()), default=0)


def _ordinal(number: int) -> str:
    kind = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{kind}"

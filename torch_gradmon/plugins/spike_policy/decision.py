"""Whether a step is a spike, before its optimizer steps: the vote of this rank and the decision of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ...core import keys as n
from ...core.errors import WarningLog
from ...core.moments import Column, identity
from ...core.records import SpikeEvent, StepRecord
from ...spikes.detector_set import DetectorSet
from ...step.buffer import StepBuffer
from ...step.exchange import RankExchange
from ...step.plan import SourcePlan
from ...step.plugin import OptimizerContext
from ...step.summary import gradient_values

#: The sources that have values before the optimizer steps.
_SOURCES = (n.GRADIENT_BEFORE_CLIP, n.GRADIENT)
#: A rank's vote: no spike, a spike, or NaN or Inf that the optimizer would use.
CALM, SPIKE, NONFINITE = 0.0, 1.0, 2.0


class Votes:
    """Combines the predictions of the detectors, which learn nothing here, over all ranks.

    Args:
        judges: the detectors.
        exchange: with the other ranks, only for decisions.
        complaints: receives failures.
        parts: what must be the same on all ranks, see :meth:`ExchangePolicy.parts`.

    Attributes:
        known: the values of the step at the decision, as a record and whole-model values.
        split: whether the scalers of the ranks disagreed about the step, which is therefore skipped.
    """

    def __init__(
        self, judges: DetectorSet, exchange: RankExchange, complaints: WarningLog, parts: Callable[[], Mapping[str, Any]]
    ) -> None:
        self.known: tuple[StepRecord, dict[str, float]] | None = None
        self.split = False
        self._judges, self._exchange, self._complaints, self._parts = judges, exchange, complaints, parts

    def begin(self) -> None:
        """A step begins."""
        self.known, self.split = None, False

    def end(self) -> None:
        """The run ends on this rank."""
        self._exchange.end()

    def are_common(self, step: int) -> bool:
        """Whether all ranks vote, in the same way, in the step in flight."""
        return self._exchange.all_take_part("decisions", lambda: {**self._parts(), "detectors": self._judges.signals}, step)

    def cast(self, buffer: StepBuffer, plans: Mapping[str, SourcePlan], optimizer: OptimizerContext) -> tuple[float, str]:
        """The severity of the step according to all ranks, and the reason. Synchronises; one or two collectives.

        This rank votes even after a failure, since the others wait for it.
        """
        part = buffer.part(_SOURCES)
        for source in _SOURCES if optimizer.ignored else ():
            part.clear(source, optimizer.ignored)
        spread = {source: (plans[source].exchanged, plans[source].columns) for source in _SOURCES if plans[source].exchanged}
        self._exchange.run(part, spread, self._judges.watches_values, self._judges.watches, asked="decisions")
        events: list[SpikeEvent] = []
        count, refused = 0, optimizer.is_overflowed
        try:
            record, whole = self.known = _looked_at(part)
            count = _nonfinite(record)
            refused |= bool(count) and optimizer.has_scaler
            if not refused:  # the scaler handles infinite gradients itself
                events = self._judges.predict(record, whole)
        except Exception as error:
            self._complaints.add("internal:vote", f"whether step {buffer.step} is a spike could not be determined", error)
        reasons = [event.reason for event in events]
        if count and not refused and all(math.isfinite(event.value) for event in events):
            reasons.append(f"{count:,} elements of the gradients are NaN or infinite")
        if optimizer.is_stale:
            reasons.append("the gradients are those of a step that was skipped, and were not zeroed since")
        severity = CALM if not reasons else NONFINITE if count and not refused else SPIKE
        vote = self._together(severity, "; ".join(reasons), refused)
        self._judges.warn_of_failures(self._complaints)
        return vote

    def _together(self, severity: float, reason: str, refused: bool) -> tuple[float, str]:
        ranks = self._exchange.ranks
        if ranks.count == 1:
            return severity, reason
        row = identity(2, ranks.device)
        row[0, Column.MAX] = severity
        row[1, [Column.MIN, Column.MAX]] = float(refused)
        votes, refusals = ranks.merged(row, frozenset({Column.MIN, Column.MAX})).tolist()
        worst, split = votes[Column.MAX], bool(refusals[Column.MAX] and not refusals[Column.MIN])
        self.split |= split
        if worst == CALM and not split:
            return CALM, ""
        if refused and split:
            reason = "the scaler did not let the optimizer step"
        told = {rank: words for rank, words in enumerate(ranks.gathered(reason)) if words}
        if len(told) == ranks.count and len(set(told.values())) == 1:
            return worst, next(iter(told.values()))
        words = "; ".join(f"rank {rank}: {words}" for rank, words in list(told.items())[:3])
        return NONFINITE if split else worst, words + (f"; and {len(told) - 3} more ranks" if len(told) > 3 else "")


def _looked_at(part: StepBuffer) -> tuple[StepRecord, dict[str, float]]:
    """The values in ``part`` as a record, and the whole-model values that follow from them. Waits for the device."""
    tables, values, _ = part.flush()
    refused = {*part.refused, *(source for (source, name) in part.absent if not name)}
    before = tables.get(n.GRADIENT_BEFORE_CLIP)
    whole = {} if before is None or n.GRADIENT_BEFORE_CLIP in refused else gradient_values(before)
    return StepRecord(part.step, 0.0, True, values, tables), whole


def _nonfinite(record: StepRecord) -> int:
    """The number of NaN or infinite elements in the gradients that the optimizer will use, or, if unknown, before clipping."""
    table = record.tables.get(n.GRADIENT, record.tables.get(n.GRADIENT_BEFORE_CLIP))
    return 0 if table is None else int(table.rows[:, Column.NONFINITE].sum())

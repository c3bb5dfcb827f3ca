"""All detectors of a run, and what they know of its last steps. Each gets its signal once a step, as soon as there is a value."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..core.errors import WarningLog
from ..core.formatting import factor_text, times
from ..core.keys import GRADIENT, GRADIENT_BEFORE_CLIP, PARAMETER_SOURCES, SPIKE_SCORE, SUMMARY, Key, parse_key, shared_key
from ..core.moments import Column
from ..core.records import SpikeEvent, StatsTable, StepRecord, StepValues, loss_in
from ..step.summary import KEY_DOCUMENTATION, Summary, not_applied
from .detector import SpikeDetector, Verdict
from .hampel import LEAST, REMEMBERED
from .signals import MatchingValues, size, value_of

if TYPE_CHECKING:
    from .attribution import ParameterAttribution

# --- recovery ---

#: Number of steps observed after a spike.
AFTER = 5
#: Limits of recovery: the factor above usual, and the share of the way from usual to the spike. The second matters for a loss, for which
#: a factor of 1.5 is large.
BACK, SHARE_OF_WAY = 1.5, 0.25


def recovery_text(events: Sequence[SpikeEvent], values: Sequence[tuple[int, float]]) -> str:
    """Describe what became of a signal: ``events`` are its spike, in one step or consecutive ones, ``values`` the ``(step, value)`` of the
    steps after that; empty if it has not ended.
    """
    first, last = events[0], events[-1]
    if not values:
        fate = "" if math.isfinite(last.value) else ": it did not recover"
        return (
            f"the spike that began in step {first.step} continues, {first.signal} is {last.value:.4g} in step {last.step}{fate}"
        )
    when = f"step {first.step}" if first is last else f"steps {first.step} to {last.step}"
    return f"after the spike of {when} {first.signal} {_fate(first.usual, max(event.value for event in events), values)}"


def _fate(usual: float | None, worst: float, values: Sequence[tuple[int, float]]) -> str:
    count, end = len(values), f"step {values[-1][0]}"
    span = f"the {count} steps to {end}" if count > 1 else end
    finite = [value for _, value in values if math.isfinite(value)]
    if len(finite) < count and not math.isfinite(values[-1][1]):
        return f"is NaN or infinite in {count - len(finite)} of {span}: it did not recover"
    if usual is None or usual <= 0:
        return f"is {_range(finite)} in {span}"
    limit = min(BACK * usual, usual + SHARE_OF_WAY * (worst - usual)) if math.isfinite(worst) else BACK * usual
    high = [place for place, (_, value) in enumerate(values) if not value <= limit]
    calm = count - len(high)
    was = f"usual was {usual:.4g}"
    if 2 * calm >= count and (not high or high == list(range(len(high)))):
        return f"is back to normal since step {values[len(high)][0]} ({_range(finite[-calm:])} until {end}, {was})"
    if not calm:
        lowest, highest = min(finite) / usual, max(finite) / usual
        alike = factor_text(lowest) == factor_text(highest)
        factors = times(highest) if alike else f"{factor_text(lowest)} to {times(highest)}"
        return f"is still {factors} what was usual in {'all of ' if count > 1 else ''}{span} ({was})"
    top = max(values[place][1] for place in high)
    others = f"up to {times(top / usual)} what was usual" if math.isfinite(top) else "NaN or infinite"
    return f"is normal in {calm} of {span}, and {others} in the {'others' if len(high) > 1 else 'other one'} ({was})"


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return low if low == high else f"{low} to {high}"


# --- state of the current spikes ---

_SIGNAL, _VALUE, _IS_SPIKE = attrgetter("signal"), attrgetter("value"), attrgetter("is_spike")
#: Numbers of consecutive steps not applied that call for more detail: fewer are a gradient scaler's search for its scale.
_REJECTED = (3, 30, 300)


class FollowUp:
    """The state of the current spikes."""

    def __init__(self) -> None:
        self.rejected = 0  # consecutive steps that were not applied
        self._detail_at = 0  # the value of ``rejected`` when detail was requested last
        #: whose recovery is watched, by signal: the events of a spike, and the steps and values after it
        self.cases: dict[str, tuple[list[SpikeEvent], list[tuple[int, float]]]] = {}
        self._largest: dict[str, float] = {}  # by signal that spiked in the step before, its largest spike without a break
        self._origin_reported = False
        self.complete: StepRecord | None = None  # the last record that nothing more can come for
        self.added: list[str] = []  # to what there is to report

    def is_new(self, event: SpikeEvent) -> bool:
        """Whether the signal did not spike in the step before. NaN and Inf pass from one signal to all others."""
        goes_on = not math.isfinite(event.value) and math.inf in self._largest.values()
        return event.signal not in self._largest and not goes_on

    def is_largest(self, event: SpikeEvent) -> bool:
        """Whether the signal had no spike as large in the steps directly before."""
        return size(event) > self._largest.get(event.signal, 0.0)

    def alerts(self, events: Sequence[SpikeEvent]) -> list[str]:
        """One warning for all new spikes of a step; empty without any."""
        fresh = [event for event in events if self.is_new(event)]
        return [str(replace(fresh[0], reason="; ".join(event.reason for event in fresh)))] if fresh else []

    def step_ended(self, applied: bool) -> None:
        self.rejected = 0 if applied else self.rejected + 1
        self._detail_at = 0 if applied else self._detail_at

    def rejections_need_detail(self) -> bool:
        """True once for each limit."""
        due = (0, *_REJECTED)[bisect_right(_REJECTED, self.rejected)]
        is_due, self._detail_at = due > self._detail_at, max(due, self._detail_at)
        return is_due

    def reports(self, record: StepRecord, whole: Mapping[str, float]) -> list[str]:
        """Take a complete ``record``; return what there is to report on this spike's origin and on earlier ones."""
        self.complete, added, self.added = record, self.added, []
        if not (record.events or self.rejected or self._origin_reported or self.cases):
            self._largest = {}
            return added
        spikes = dict(zip(map(_SIGNAL, record.events), record.events, strict=True))
        recovered = self.recovered(record.step, spikes, lambda signal: value_of(signal, record, whole))
        for event in filter(self.is_new, record.events):
            self.cases.setdefault(event.signal, ([event], []))
        before, self._largest = self._largest, {}
        for signal, event in spikes.items():
            self._largest[signal] = max(size(event), before.get(signal, 0.0))
        return [*added, *self._origin(record), *recovered]

    def rewind(self, step: int) -> None:
        for signal, (events, values) in list(self.cases.items()):
            events[:] = [event for event in events if event.step < step]
            values[:] = [(known, value) for known, value in values if known < step]
            if not events:
                del self.cases[signal]

    def recovered(self, step: int, spikes: Mapping[str, SpikeEvent], value_of: Callable[[str], float | None]) -> list[str]:
        """Take the next step, with its ``spikes`` by signal; return reports about earlier spikes that are due. One that continues in the
        next step is the same spike, and the steps after its last one count; one of more than :data:`AFTER` steps is reported anyway.
        """
        found = []
        for signal, (events, values) in list(self.cases.items()):
            if step <= events[-1].step:
                continue
            if signal in spikes and not values:
                events.append(spikes[signal])
            elif (value := value_of(signal)) is not None:
                values.append((step, value))
            if len(values) >= AFTER or len(events) > AFTER:
                del self.cases[signal]
                found.append(recovery_text(events, values))
        return found

    def _origin(self, record: StepRecord) -> list[str]:
        """Where NaN or Inf began, once for consecutive steps with any."""
        rejected = self.rejected > _REJECTED[0]
        is_spoiled = rejected or not all(map(math.isfinite, map(_VALUE, record.events)))
        self._origin_reported = self._origin_reported and is_spoiled
        if self._origin_reported or not is_spoiled:
            return []
        from .attribution import nonfinite_origin  # most trainings have no spike

        # while the scaler searches for its scale, gradients are infinite although the forward pass is finite
        text = nonfinite_origin(record, forward_only=rejected)
        self._origin_reported = bool(text)
        since = f"; {self.rejected} steps in a row were not applied" if rejected else ""
        return [f"step {record.step}: {text}{since}"] if text else []


# --- gradients of the last steps ---

#: Steps with a spike whose suspects are kept: those with the largest spikes.
_SPIKES = 100


class _Known(NamedTuple):
    step: int
    table: StatsTable
    spoiled: tuple[str, ...] = ()  # the gradients that became NaN or infinite after the backward pass


class GradientNormHistory:
    """The statistics of the gradients of the last steps.

    Gradients before clipping are used if there are any, since a clip makes a step that stands out like all others. From then on steps
    without them are ignored, so that clipped norms are never compared with unclipped ones. NaN and Inf count at either stage.
    """

    def __init__(self) -> None:
        self._steps: deque[_Known] = deque(maxlen=REMEMBERED)
        self.source = GRADIENT
        #: of the step that was added last, the gradients that became NaN or infinite after the backward pass
        self.spoiled: tuple[str, ...] = ()

    def add(self, step: int, tables: Mapping[str, StatsTable]) -> None:
        """Add the gradients among ``tables``. A repeated step, as after a rollback, replaces all later ones."""
        if GRADIENT_BEFORE_CLIP in tables and self.source == GRADIENT:
            self.source = GRADIENT_BEFORE_CLIP
            self._steps.clear()
        if self._steps and self._steps[-1].step >= step:
            self.rewind(step)
        before, after, self.spoiled = tables.get(GRADIENT_BEFORE_CLIP), tables.get(GRADIENT), ()
        if after is not None and after.totals[Column.NONFINITE] and before is not None and not before.totals[Column.NONFINITE]:
            counts = after.rows[:, Column.NONFINITE].tolist()
            self.spoiled = tuple(name for name, count in zip(after.names, counts, strict=True) if count)
        if (table := tables.get(self.source)) is not None and Column.SQUARE_SUM in table.columns:
            self._steps.append(_Known(step, table, self.spoiled))

    def rewind(self, step: int) -> None:
        while self._steps and self._steps[-1].step >= step:
            self._steps.pop()

    def backfill(self, step: int, tables: Mapping[str, StatsTable]) -> None:
        table = tables.get(self.source)
        if table is not None and table.has("norm") and self.table(step) is None:
            steps = sorted([*self._steps, _Known(step, table)], key=lambda known: known.step)
            self._steps = deque(steps, maxlen=REMEMBERED)

    def table(self, step: int) -> StatsTable | None:
        return next((known.table for known in self._steps if known.step == step), None)

    def suspects(self, step: int) -> list[ParameterAttribution]:
        """The parameters in order of suspicion, see :func:`torch_gradmon.spikes.attribution.ranked`; empty if ``step`` is unknown."""
        known = [each for each in self._steps if each.step <= step]
        if not known or known[-1].step != step:
            return []
        from .attribution import ranked  # most trainings have no spike

        table, spoiled_after = known[-1].table, known[-1].spoiled
        norms, spoiled = (torch.stack(rows) for rows in zip(*(_aligned(each.table, table) for each in known), strict=True))
        found = ranked([each.step for each in known], table.names, norms, spoiled, is_part=table.is_part)
        if not spoiled_after:
            return found
        marked = [replace(each, is_spoiled_after=each.name in spoiled_after) for each in found]
        return sorted(marked, key=lambda each: not each.is_spoiled_after)


class SuspectHistory:
    """The gradients of the last steps, and the suspects of the steps with the largest spikes."""

    def __init__(self) -> None:
        self.gradients = GradientNormHistory()
        self.suspects: dict[int, list[ParameterAttribution]] = {}  # by step, in order of suspicion
        self._sizes: dict[int, float] = {}

    def at_spike(self, step: int, spike_size: float) -> list[ParameterAttribution]:
        """The suspects of a step with a spike, which are kept."""
        if step not in self.suspects:
            self.suspects[step] = self.gradients.suspects(step)
        self._sizes[step] = max(spike_size, self._sizes.get(step, 0.0))
        found = self.suspects[step]
        while len(self.suspects) > _SPIKES:
            smallest = min(self.suspects, key=self._sizes.__getitem__)
            del self.suspects[smallest], self._sizes[smallest]
        return found

    def first(self, step: int, spikes: Mapping[str, Verdict]) -> str:
        """The most suspicious signal: for gradients by suspicion, for others, and before the step has ended, by score."""
        names = {signal: key.name for signal in spikes if (key := parse_key(signal)).source == self.gradients.source}
        order = {suspect.name: place for place, suspect in enumerate(self.gradients.suspects(step))} if names else {}
        return min(spikes, key=lambda signal: (order.get(names.get(signal, ""), math.inf), -(spikes[signal].score or 0.0)))

    def rewind(self, step: int) -> None:
        self.gradients.rewind(step)
        for known in [known for known in self.suspects if known >= step]:
            del self.suspects[known], self._sizes[known]


def _aligned(other: StatsTable, table: StatsTable) -> tuple[Tensor, Tensor]:
    """Norms in ``other`` of the parameters in ``table``, NaN where missing; and numbers of NaN and infinite elements."""
    rows = other.rows
    if other.names != table.names:
        place = {name: row for row, name in enumerate(other.names)}
        absent = torch.full((1, rows.shape[1]), torch.nan, dtype=torch.float64, device="cpu")
        rows = torch.cat([rows, absent])[[place.get(name, -1) for name in table.names]]
    return rows[:, Column.SQUARE_SUM].sqrt(), rows[:, Column.NONFINITE].nan_to_num(0.0)


# --- all detectors ---

#: The signal whose score is the whole-model value ``gradmon/spike_score``.
MAIN_SIGNAL = "grad_norm"
MAIN_SCORE = Key(SUMMARY, "", "spike_score")
#: The norm of the gradients that the optimizer used. Its only spikes are NaN and Inf that came in after the backward pass: as a clip bounds
#: it, nothing else shows there.
USED_SIGNAL = "grad_norm_after_clip"
#: Steps without a value after which a signal is reported: of a whole-model value, which may be missing in the first steps, and of a logged
#: one, which may be logged rarely.
_PATIENCE, _LONG_PATIENCE = 3, 200
_NO_SCORE = "the detector's rule gave no score, as in its first steps, when it has not seen enough of them"
_NO_SIGNAL = "no step so far has it; log it with log_scalar(), or add the metric that it is a key of"

Absent = MutableMapping[tuple[str, str], str]


class DetectorSet:
    """Detectors by the name of their signal. A signal may be logged, and so have its value only after the step has ended."""

    def __init__(self, summary: Summary, complaints: WarningLog) -> None:
        self._summary, self._complaints = summary, complaints
        self._of_preset: set[str] = set()
        self.detectors: dict[str, SpikeDetector] = {}  # those in use, by signal
        self.accepts_late_values = True  # detect in values that come after the end of a step; off if ranks could disagree on them
        self.shows_main_score = False  # the score of ``grad_norm`` is a whole-model value
        self.history = SuspectHistory()
        self.follow_up = FollowUp()
        #: fetches the records of earlier, unmonitored steps when a spike starts
        self.fetch_recorded: Callable[[], Sequence[StepRecord]] = tuple
        self.fetched: list[StepRecord] = []
        self.awaits_loss = False  # the last spike is NaN or Inf, and was explained before the loss of its step was logged
        self.predicted: set[str] = set()  # signals that had a value before the optimizer stepped
        # failed detectors stay known, because what ranks exchange must not depend on a failure
        self._failed: dict[str, SpikeDetector] = {}
        self.failures: dict[str, Exception] = {}  # those without a warning so far
        self.due: dict[str, SpikeDetector] = {}  # those that may still have a value in this step
        self._done: dict[str, set[str]] = {}  # the signals of a pattern that have had one
        self._detected_in: object = None  # the values of this step in which the detectors have looked
        self._matches: dict[str, MatchingValues] = {}
        self._steps_without_value: dict[str, float] = {}  # -inf once there was a value
        self._names: tuple[str, ...] = ()  # of the last gradients
        self._had_gradients: set[str] = set()

    def add(self, detector: SpikeDetector, of_preset: bool = False) -> None:
        """Use ``detector``. One that the user brings replaces a preset's, and is not replaced by one.

        Raises:
            ValueError: the user has brought one for this signal already.
        """
        is_known = detector.name in self.detectors
        if of_preset:
            self.shows_main_score = True
        if is_known and of_preset:
            return
        if is_known and detector.name not in self._of_preset:
            raise ValueError(f"there is a detector for {detector.name!r} already; a signal has one")
        (self._of_preset.add if of_preset else self._of_preset.discard)(detector.name)
        self.detectors[detector.name] = detector
        self._summary.choice.require(detector.name.removeprefix(f"{SUMMARY}/"))

    def remove(self, detector: SpikeDetector) -> None:
        if self.detectors.get(detector.name) is detector:
            del self.detectors[detector.name]

    def begin(self, record: StepRecord, absent: Absent) -> None:
        """Start with the ``record`` of a step that has ended, which is not judged if it was not applied. :meth:`rewind` precedes one that
        was known before.
        """
        if self.detectors:
            self.history.gradients.add(record.step, record.tables)
            table = record.tables.get(GRADIENT_BEFORE_CLIP, record.tables.get(GRADIENT))
            if table is not None and table.names != self._names:
                self._compare_like_with_like(table)
        counts = record.applied or bool(record.skipped)  # a step that overflowed is the scaler's affair
        if (self.follow_up.rejected or not counts) and not record.interrupted:
            self.follow_up.step_ended(applied=counts)
        self.due, self._done, self._detected_in = dict(self.detectors) if counts else {}, {}, None
        if not counts:
            absent[SUMMARY, "spike_score"] = not_applied(record.context)

    def _compare_like_with_like(self, table: StatsTable) -> None:
        """The gradients are those of other parameters than in the last step. Let whole-model values begin anew if parameters that never
        had a gradient before, as those of a network that begins late or of layers that were frozen, make most of it: so much that the norm
        without them would not be as high as a spike.
        """
        new = [row for row, name in enumerate(table.names) if name not in self._had_gradients]
        is_first, self._names = not self._had_gradients, table.names
        self._had_gradients.update(table.names)
        if is_first or not new or Column.SQUARE_SUM not in table.columns:
            return
        squares = table.rows[:, Column.SQUARE_SUM]
        if float(squares[new].sum()) > (1 - LEAST**-2) * float(squares.sum()):
            for name, detector in self.detectors.items():
                if name.removeprefix(f"{SUMMARY}/") in KEY_DOCUMENTATION:
                    detector.restart()

    def predict(self, record: StepRecord, whole: Mapping[str, float]) -> list[SpikeEvent]:
        """The events that :meth:`detect` will find in the values known so far. Nothing is learned."""
        events: list[SpikeEvent] = []
        table = record.tables.get(GRADIENT_BEFORE_CLIP, record.tables.get(GRADIENT))
        if table is not None and table.names != self._names:
            self._compare_like_with_like(table)
        self.predicted = set()
        for name, detector in list(self.detectors.items()):
            try:
                if values := self._values(detector, record, whole):
                    is_one, step = isinstance(detector.signal, str), record.step
                    verdicts = {name: detector.predict(step, values[name])} if is_one else detector.predict_all(step, values)
                    if any(map(_IS_SPIKE, verdicts.values())):
                        events.append(self._event(detector, step, values, verdicts))
                    self.predicted |= values.keys()
                if name == MAIN_SIGNAL:
                    self.predicted.add(USED_SIGNAL)  # the decision counts NaN and Inf by itself
            except Exception as error:  # of a user's rule; the other detectors go on
                self._switch_off(name, error)
        return events

    def _switch_off(self, name: str, error: Exception) -> None:
        self._failed[name], self.failures[name] = self.detectors.pop(name), error
        self.due.pop(name, None)

    def warn_of_failures(self) -> None:
        """Warn of detectors that failed and are off. Their errors are dropped, since they hold frames of the training loop."""
        for name in list(self.failures):
            self._complaints.add(f"detector:{name}", f"the spike detector of {name} failed and is off", self.failures.pop(name))

    @property
    def signals(self) -> list[str]:
        """The names of all detectors, failed ones too: they may work on other ranks."""
        return sorted({*self._failed, *self.detectors})

    def detect(self, record: StepRecord, whole: Mapping[str, float], absent: Absent) -> tuple[StepRecord, list[SpikeEvent]]:
        """Feed the signals that have a value by now; returns ``record`` with the new scores and events, and these events. ``whole`` has
        the whole-model values by name; ``absent`` gets the reasons for missing scores.
        """
        if record.values is self._detected_in:  # no value came late
            return record, []
        scores: dict[Key, float] = {}
        events: list[SpikeEvent] = []
        step = record.step
        for name, detector in list(self.due.items()):
            try:
                is_one, done = isinstance(detector.signal, str), self._done.get(name)
                value = whole.get(name) if is_one else None
                # tables are complete at the first call
                values = self._values(detector, record, whole, with_tables=not done) if value is None else {name: value}
                if done:
                    values = {signal: value for signal, value in values.items() if signal not in done}
                if not values:
                    continue
                self._steps_without_value[name] = -math.inf
                if is_one:
                    del self.due[name]
                    verdicts = {name: detector.update(step, values[name])}
                else:
                    self._done.setdefault(name, set()).update(values)
                    verdicts = detector.update_all(step, values)
                if any(map(_IS_SPIKE, verdicts.values())):
                    events.append(self._event(detector, step, values, verdicts))
                if not done and name == MAIN_SIGNAL and self.history.gradients.spoiled:
                    norm = math.sqrt(record.tables[GRADIENT].totals[Column.SQUARE_SUM])
                    norm = math.nan if math.isfinite(norm) else norm  # finite where some tensors alone have squares
                    limit = float(detector.rule.threshold)
                    events.append(SpikeEvent(record.step, USED_SIGNAL, norm, math.inf, limit, f"{USED_SIGNAL} is {norm}"))
            except Exception as error:  # of a user's rule; it must not cost the record
                self._switch_off(name, error)
                continue
            for signal, verdict in verdicts.items():
                key = MAIN_SCORE if signal == MAIN_SIGNAL and self.shows_main_score else shared_key(SPIKE_SCORE, signal, "")
                if verdict.score is not None:
                    scores[key] = verdict.score
                else:
                    absent[key.source, key.metric or key.name] = _NO_SCORE
        try:
            if self.awaits_loss:
                record = self._revised(record)
            if scores or events:
                events = self._explained(events, record) if events else events
                known = StepValues.updated(record.values, scores)
                record = record._replace(values=known, events=(*record.events, *events))
        except Exception as error:  # the record must not be lost for it
            self._complaints.add("internal:judge", f"step {record.step} could not be judged", error)
            return record, []
        self._detected_in = record.values
        return record, events

    def _event(
        self, detector: SpikeDetector, step: int, values: Mapping[str, float], verdicts: Mapping[str, Verdict]
    ) -> SpikeEvent:
        """One event for all spikes among the ``verdicts``: it names the most suspicious signal."""
        spikes = {signal: verdict for signal, verdict in verdicts.items() if verdict.is_spike}
        first = next(iter(spikes)) if len(spikes) == 1 else self.history.first(step, spikes)
        event = detector.event(step, values[first], spikes[first], first)
        if others := len(spikes) - 1:
            event = replace(event, reason=f"{event.reason}, and {others} of the {len(verdicts) - 1} others spike with it")
        return event

    def _values(
        self, detector: SpikeDetector, record: StepRecord, whole: Mapping[str, float], with_tables: bool = True
    ) -> dict[str, float]:
        if isinstance(detector.signal, re.Pattern):
            return self._matches.setdefault(detector.name, MatchingValues(detector.signal)).values(record, with_tables)
        value = value_of(detector.signal, record, whole)
        return {} if value is None else {detector.name: value}

    # --- where a spike comes from, as the text of its event ----------------------------------------------------------------------

    def take_fetched(self) -> list[StepRecord]:
        taken, self.fetched = self.fetched, []
        return taken

    def _explained(self, events: list[SpikeEvent], record: StepRecord) -> list[SpikeEvent]:
        if any(map(self.follow_up.is_new, events)):
            for earlier in self.fetch_recorded():
                self.fetched.append(earlier)
                self.history.gradients.backfill(earlier.step, earlier.tables)
        if any(map(self.follow_up.is_largest, events)):  # a spike that shrinks is explained already
            largest, loss = max(map(size, events)), loss_in(record.values)
            self.awaits_loss = loss is None and largest == math.inf
            events = self._with_causes(events, record, largest, loss)
        return [replace(event, action=record.context.get("action", "")) for event in events]

    def _with_causes(
        self, events: Iterable[SpikeEvent], record: StepRecord, largest: float, loss: float | None
    ) -> list[SpikeEvent]:
        from .attribution import rank_norms_text, rows_text, spike_cause  # most trainings have no spike

        suspects, context = self.history.at_spike(record.step, largest), record.context
        before = self.follow_up.complete
        comes_late = before is not None and loss_in(before.values) is not None
        cause = spike_cause(suspects, record.step, loss, comes_late, "by_turns" in context)
        causes = (cause.words, rank_norms_text(context.get("batch_norms", {})), rows_text(context.get("rows", {})))
        return [replace(event, where="; ".join(filter(None, causes))) for event in events]

    def _revised(self, record: StepRecord) -> StepRecord:
        """The same record, with what its loss, logged after the end of the step, tells about NaN and Inf in it."""
        infinite = [event for event in record.events if size(event) == math.inf]
        if not infinite or (loss := loss_in(record.values)) is None:
            self.awaits_loss = bool(infinite)
            return record
        self.awaits_loss = False
        events = self._with_causes(record.events, record, math.inf, loss)
        if any(map(self.follow_up.is_new, infinite)) and events[0].where != record.events[0].where:
            self.follow_up.added.append(f"step {record.step}: {events[0].where}")
        return record._replace(events=tuple(events))

    # --- what is watched -----------------------------------------------------------------------------------------------------------

    def _watched(self) -> list[str | re.Pattern[str]]:
        return [detector.signal for detector in (*self.detectors.values(), *self._failed.values())]

    @property
    def watches_values(self) -> bool:
        """Whether any signal is, or may be, a logged value rather than one of the model."""
        return any(map(_is_of_a_batch, self._watched()))

    def watches(self, key: Key) -> bool:
        return any(key.name == each if isinstance(each, str) else each.search(key.name) for each in self._watched())

    def needs_detail(self) -> bool:
        """Whether steps not applied call for more detail; true once for each limit."""
        return self.follow_up.rejected > 0 and self.follow_up.rejections_need_detail() and bool(self.detectors)

    def rewind(self, step: int) -> None:
        self.history.rewind(step)
        self.follow_up.rewind(step)

    def finish(self, absent: Absent) -> None:
        """The record is complete: warn, once for each, about signals that never had a value in all steps allowed for that."""
        waited, self.due = self.due, {}
        for signal in waited:
            count, name = self._steps_without_value.get(signal, 0) + 1, signal.removeprefix(f"{SUMMARY}/")
            self._steps_without_value[signal] = count
            if count == (_PATIENCE if name in KEY_DOCUMENTATION else _LONG_PATIENCE):
                why = absent.get((SUMMARY, name), _NO_SIGNAL)
                self._complaints.add(f"signal:{signal}", f"the spike detector of {signal} has nothing to judge: {why}")

    # --- other steps, and the state ----------------------------------------------------------------------------------------------

    def learn(self, record: StepRecord, whole: Mapping[str, float], absent: Absent) -> list[str]:
        """Evaluate a step that is not monitored, with values for the detectors only. Returns what there is to report."""
        self.begin(record, {})
        self.detect(record, whole, absent)
        return self.follow_up.reports(record, whole)

    def count_unmonitored(self, is_refused: bool) -> bool:
        """Count a step that is not monitored. Returns whether a series of refused ones calls for more detail."""
        if not (is_refused or self.follow_up.rejected):
            return False
        self.follow_up.step_ended(applied=not is_refused)
        return self.needs_detail()

    def state_dict(self) -> dict[str, Any]:
        """The state of each detector by signal, as plain numbers and lists."""
        return {signal: detector.state_dict() for signal, detector in self.detectors.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for signal, detector in self.detectors.items():
            detector.load_state_dict(state[signal])


def _is_of_a_batch(signal: str | re.Pattern[str]) -> bool:
    """Whether a signal is, or may be, the value of a rank's own batch."""
    if isinstance(signal, re.Pattern):
        return True
    key = parse_key(signal)
    return signal not in KEY_DOCUMENTATION and key.source != SUMMARY and key.source not in PARAMETER_SOURCES

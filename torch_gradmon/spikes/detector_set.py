"""All detectors of a run. Each gets its signal once a step, as soon as there is a value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import replace

from ..core.errors import WarningLog
from ..core.keys import GRADIENT, GRADIENT_BEFORE_CLIP, PARAMETER_SOURCES, SPIKE_SCORE, SUMMARY, Key, parse_key, shared_key
from ..core.moments import Column
from ..core.records import SpikeEvent, StepRecord
from ..core.step_values import StepValues
from ..step.reasons import not_applied
from ..step.summary_keys import DOCUMENTATION
from .detector import SpikeDetector
from .explanations import Explanations
from .follow_up import FollowUp
from .level import LEAST
from .signals import MatchingValues, value_of
from .suspect_history import SuspectHistory
from .verdicts import Verdict

#: The signal whose score is the whole-model value ``gradmon/spike_score``.
MAIN_SIGNAL = "grad_norm"
MAIN_SCORE = Key(SUMMARY, "", "spike_score")
#: The norm of the gradients that the optimizer used. Its only spikes are NaN and Inf that came in after the backward pass: as a clip bounds
#: it, nothing else shows there.
USED_SIGNAL = "grad_norm_clipped"
#: Steps without a value after which a signal is reported: of a whole-model value, which may be missing in the first steps, and of a logged
#: one, which may be logged rarely.
_PATIENCE, _LONG_PATIENCE = 3, 200
_NO_SCORE = "the detector's rule gave no score, as in its first steps, when it has not seen enough of them"


class DetectorSet:
    """Detectors by the name of their signal. A signal may be logged, and so have its value only after the step has ended.

    Attributes:
        detectors: those in use, by signal.
        accepts_late_values: detect in values that come after the end of a step; off if ranks could disagree on them.
        history: gradients of the last steps, and the suspects of spikes.
        follow_up: new, continued and past spikes.
        explanations: the suspects of spikes, as text.
        predicted: signals that had a value before the optimizer stepped.
    """

    def __init__(self) -> None:
        self.detectors: dict[str, SpikeDetector] = {}
        self.accepts_late_values = True
        self._shows_main = False
        self.history = SuspectHistory()
        self.follow_up = FollowUp()
        self.explanations = Explanations(self.history, self.follow_up)
        self.predicted: set[str] = set()
        # failed detectors stay known, because what ranks exchange must not depend on a failure; the error waits for its warning
        self._failed: dict[str, tuple[SpikeDetector, Exception | None]] = {}
        self._waiting: dict[str, tuple[SpikeDetector, set[str]]] = {}  # detectors of this step, and the signals they have had
        self._matches: dict[str, MatchingValues] = {}
        self._steps_without_value: dict[str, float] = {}  # -inf once there was a value
        self._names: tuple[str, ...] = ()  # of the last gradients
        self._had_gradients: set[str] = set()

    def accept_late_values(self, is_accepted: bool) -> None:
        """Whether to detect in values that come after the end of a step; not if ranks could disagree on them."""
        self.accepts_late_values = is_accepted

    def add(self, detector: SpikeDetector) -> None:
        """Use ``detector``, in place of the one of the same signal."""
        self.detectors[detector.name] = detector

    def show_main_score(self) -> None:
        """The score of ``grad_norm`` is a whole-model value from now on."""
        self._shows_main = True

    def begin(self, record: StepRecord, absent: MutableMapping[tuple[str, str], str]) -> None:
        """Start with the ``record`` of a step that has ended. A step that was not applied is not judged.

        One that was known before is preceded by :meth:`rewind`.
        """
        if self.detectors:
            self.history.gradients.add(record.step, record.tables)
            self._compare_like_with_like(record)
        counts = record.applied or bool(record.skipped)  # a step that overflowed is the scaler's affair
        if not record.interrupted:
            self.follow_up.step_ended(applied=counts)
        self._waiting = {name: (detector, set()) for name, detector in self.detectors.items()} if counts else {}
        if not counts:
            absent[SUMMARY, "spike_score"] = not_applied(record.context)

    def _compare_like_with_like(self, record: StepRecord) -> None:
        """Let whole-model values begin anew if parameters that never had a gradient before, as those of a network that begins late or of
        layers that were frozen, make most of it: so much that the norm without them would not be as high as a spike.
        """
        table = record.tables.get(GRADIENT_BEFORE_CLIP, record.tables.get(GRADIENT))
        if table is None or table.names == self._names:
            return
        new = [row for row, name in enumerate(table.names) if name not in self._had_gradients]
        is_first, self._names = not self._had_gradients, table.names
        self._had_gradients.update(table.names)
        if is_first or not new or Column.SQUARE_SUM not in table.columns:
            return
        squares = table.rows[:, Column.SQUARE_SUM]
        if float(squares[new].sum()) > (1 - LEAST**-2) * float(squares.sum()):
            for name, detector in self.detectors.items():
                if name.removeprefix(f"{SUMMARY}/") in DOCUMENTATION:
                    detector.restart()

    def predict(self, record: StepRecord, whole: Mapping[str, float]) -> list[SpikeEvent]:
        """The events that :meth:`detect` will find in the values known so far. Nothing is learned."""
        events: list[SpikeEvent] = []
        self._compare_like_with_like(record)
        self.predicted = set()
        for name, detector in list(self.detectors.items()):
            try:
                values = self._values(detector, record, whole)
                verdicts = _verdicts(detector, record.step, values, learns=False)
                events.extend(self._events(detector, record.step, values, verdicts))
                self.predicted |= values.keys()
                if name == MAIN_SIGNAL:
                    self.predicted.add(USED_SIGNAL)  # the decision counts NaN and Inf by itself
            except Exception as error:  # of a user's rule; the other detectors go on
                self._switch_off(name, error)
        return events

    def _switch_off(self, name: str, error: Exception) -> None:
        self._failed[name] = self.detectors.pop(name), error
        self._waiting.pop(name, None)

    def warn_of_failures(self, complaints: WarningLog) -> None:
        """Warn of detectors that failed and are off. Their errors are dropped, since they hold frames of the training loop."""
        for name, (detector, error) in list(self._failed.items()):
            if error is not None:
                self._failed[name] = detector, None
                complaints.add(f"detector:{name}", f"the spike detector of {name} failed and is off", error)

    @property
    def signals(self) -> list[str]:
        """The names of all detectors, failed ones too: they may work on other ranks."""
        return sorted({*self._failed, *self.detectors})

    def detect(
        self, record: StepRecord, whole: Mapping[str, float], absent: MutableMapping[tuple[str, str], str]
    ) -> tuple[StepRecord, list[SpikeEvent]]:
        """Feed the signals that have a value by now.

        Returns ``record`` with the new scores and events, and these events. ``whole`` has the whole-model values by name; ``absent`` gets
        the reasons for missing scores.
        """
        scores: dict[Key, float] = {}
        events: list[SpikeEvent] = []
        for name, (detector, done) in list(self._waiting.items()):
            try:
                is_first = not done
                values = self._new_values(detector, done, record, whole)
                verdicts = _verdicts(detector, record.step, values)
                events.extend(self._events(detector, record.step, values, verdicts))
                if is_first and values and name == MAIN_SIGNAL and self.history.gradients.spoiled:
                    events.append(self._spoiled_between(detector, record))
            except Exception as error:  # of a user's rule; it must not cost the record
                self._switch_off(name, error)
                continue
            for signal, verdict in verdicts.items():
                key = MAIN_SCORE if signal == MAIN_SIGNAL and self._shows_main else shared_key(SPIKE_SCORE, signal, "")
                if verdict.score is not None:
                    scores[key] = verdict.score
                else:
                    absent[key.source, key.metric or key.name] = _NO_SCORE
        if self.explanations.awaits_loss:
            record = self.explanations.revised(record)
        if not scores and not events:
            return record, []
        events = self.explanations.explained(events, record)
        return replace(record, values=StepValues.of(record.values).updated(scores), events=(*record.events, *events)), events

    def _spoiled_between(self, detector: SpikeDetector, record: StepRecord) -> SpikeEvent:
        """Backward has left gradients finite, but what the optimizer uses is not."""
        value = math.sqrt(record.tables[GRADIENT].sums[Column.SQUARE_SUM])
        value = value if not math.isfinite(value) else math.nan  # squares of some tensors only
        return SpikeEvent(record.step, USED_SIGNAL, value, math.inf, float(detector.rule.threshold), f"{USED_SIGNAL} is {value}")

    def _events(
        self, detector: SpikeDetector, step: int, values: Mapping[str, float], verdicts: Mapping[str, Verdict]
    ) -> Iterator[SpikeEvent]:
        """At most one event: of many signals that spike together it names the most suspicious."""
        spikes = {signal: verdict for signal, verdict in verdicts.items() if verdict.is_spike}
        if not spikes:
            return
        first = next(iter(spikes)) if len(spikes) == 1 else self.history.first(step, spikes)
        event = detector.event(step, values[first], spikes[first], first)
        if others := len(spikes) - 1:
            event = replace(event, reason=f"{event.reason}, and {others} of the {len(verdicts) - 1} others spike with it")
        yield event

    def _new_values(
        self, detector: SpikeDetector, done: set[str], record: StepRecord, whole: Mapping[str, float]
    ) -> dict[str, float]:
        """The values of signals that are not yet ``done`` in this step."""
        found = self._values(detector, record, whole, with_tables=not done)  # tables are complete at the first call
        new = {signal: value for signal, value in found.items() if signal not in done}
        done.update(new)
        if new:
            self._steps_without_value[detector.name] = -math.inf
        return new

    def _values(
        self, detector: SpikeDetector, record: StepRecord, whole: Mapping[str, float], with_tables: bool = True
    ) -> dict[str, float]:
        if isinstance(detector.signal, re.Pattern):
            return self._matches.setdefault(detector.name, MatchingValues(detector.signal)).values(record, with_tables)
        value = value_of(detector.signal, record, whole)
        return {} if value is None else {detector.name: value}

    def _all(self) -> list[SpikeDetector]:
        return [*self.detectors.values(), *(detector for detector, _ in self._failed.values())]

    @property
    def watches_values(self) -> bool:
        """Whether any signal is, or may be, a logged value rather than one of the model."""
        return any(_is_of_a_batch(detector.signal) for detector in self._all())

    def watches(self, key: Key) -> bool:
        """Whether a detector uses the value logged under ``key``."""
        return any(
            bool(detector.signal.search(key.name)) if isinstance(detector.signal, re.Pattern) else detector.signal == key.name
            for detector in self._all()
        )

    def needs_detail(self) -> bool:
        """Whether steps not applied call for more detail; true once for each limit."""
        return self.follow_up.rejections_need_detail() and bool(self.detectors)

    def rewind(self, step: int) -> None:
        """Discard what is known of ``step`` and later: the run was rewound."""
        self.history.rewind(step)
        self.follow_up.rewind(step)

    def signals_without_values(self) -> list[str]:
        """End the step; return signals that never had a value in all steps allowed for that. Each is named once."""
        waited = [name for name in self._waiting if self._steps_without_value.get(name, 0) >= 0]
        self._waiting = {}
        found = []
        for name in waited:
            count = self._steps_without_value[name] = self._steps_without_value.get(name, 0) + 1
            if count == (_PATIENCE if name.removeprefix(f"{SUMMARY}/") in DOCUMENTATION else _LONG_PATIENCE):
                found.append(name)
        return found


def _is_of_a_batch(signal: str | re.Pattern[str]) -> bool:
    """Whether a signal is, or may be, the value of a rank's own batch."""
    if isinstance(signal, re.Pattern):
        return True
    key = parse_key(signal)
    return signal not in DOCUMENTATION and key.source != SUMMARY and key.source not in PARAMETER_SOURCES


def _verdicts(detector: SpikeDetector, step: int, values: Mapping[str, float], learns: bool = True) -> dict[str, Verdict]:
    if isinstance(detector.signal, re.Pattern):
        together = detector.update_all if learns else detector.predict_all
        return together(step, values) if values else {}
    one = detector.update if learns else detector.predict
    return {signal: one(step, value) for signal, value in values.items()}

"""All detectors of a run, each fed once a step with its signal as soon as there is a value for it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace

from ..core.errors import Complaints
from ..core.keys import PARAMETER_SOURCES, SPIKE_SCORE, SUMMARY, Key, parse_key
from ..core.records import Event, StepRecord
from ..step.micro_batches import in_words as batch_in_words
from ..step.summary import DOCUMENTATION
from .attribution import attribution
from .detector import SpikeDetector
from .episodes import size
from .nonfinite_origin import origin
from .recovery import Aftermath
from .signals import Matches, value_of
from .suspects import Gradients, Suspect
from .verdicts import Verdict

#: The signal whose score is the whole-model value ``gradmon/spike_score``.
MAIN_SIGNAL = "grad_norm"
MAIN_SCORE = Key(SUMMARY, "", "spike_score")
#: Steps without a value of the whole model, after which it is said: the first ones may have a reason of their own. What is logged
#: by hand may be logged seldom.
_PATIENCE, _LONG_PATIENCE = 3, 200
#: Steps with a spike whose suspects are remembered, those with the largest spikes.
_SPIKES = 100
_NO_SCORE = "the detector's rule gave no score, as in its first steps, when it has not seen enough of them"
#: So many steps in a row that a scaler refused are no longer its search for a scale, and worth a closer look; more, another one.
_REFUSALS = (3, 30, 300)


class Judges:
    """Detectors by the name of their signal.

    A signal may be logged by hand, and so come after the step has ended.

    Attributes:
        recall: gives records of earlier steps that nobody has seen, called where a spike makes them interesting.
        gradients: those of the last steps.
        suspects: the parameters by suspicion, for the steps with the largest spikes.
        foreseen: signals that there were values for before the optimizer stepped.
        refused: steps in a row that were not applied.
    """

    def __init__(self) -> None:
        self.detectors: dict[str, SpikeDetector] = {}
        self.recall: Callable[[], Sequence[StepRecord]] = tuple
        self.hears_late = True  # whether values are judged that come after the end of a step; ranks could not agree on them
        self._recalled: list[StepRecord] = []
        self._failures: list[tuple[str, Exception]] = []
        self.shows_main = False
        self.gradients = Gradients()
        self.suspects: dict[int, list[Suspect]] = {}
        self._sizes: dict[int, float] = {}
        self.foreseen: set[str] = set()
        self._off: dict[str, SpikeDetector] = {}  # that have failed; what ranks exchange must not depend on it
        self._waiting: dict[str, SpikeDetector] = {}
        self._judged: dict[str, set[str]] = {}
        self._matches: dict[str, Matches] = {}
        self._heard: set[str] = set()
        self._unheard: Counter[str] = Counter()
        self._aftermath = Aftermath()
        self._row: dict[str, float] = {}  # by signal that spiked in the step before, the largest spike of its row
        self._is_origin_told = False
        self.refused = 0
        self._looked_at = 0  # how many there were when a closer look was taken last

    def begin(self, record: StepRecord, absent: MutableMapping[tuple[str, str], str]) -> None:
        """A step ended with ``record``. One that was not applied is judged by nobody."""
        self.forget(record.step)  # after a rollback
        if self.detectors:
            self.gradients.see(record.step, record.tables)
        counts = record.applied or bool(record.skipped)  # what a scaler refused is no news of the training
        self.ended(applied=counts)
        self._waiting, self._judged = dict(self.detectors) if counts else {}, {}
        if not counts:
            absent[SUMMARY, "spike_score"] = "the step was not applied"

    def foresee(self, record: StepRecord, whole: Mapping[str, float]) -> list[Event]:
        """The events that :meth:`judge` will find in what ``record`` and ``whole`` have by now. Nothing is learned."""
        events: list[Event] = []
        self.foreseen = set()
        for name, detector in list(self.detectors.items()):
            try:
                values = self._values(detector, record, whole)
                verdicts = _verdicts(detector, record.step, values, learns=False)
                events.extend(self._events(detector, record.step, values, verdicts))
                self.foreseen |= values.keys()
            except Exception as error:  # of a rule of the user's; the others are asked all the same
                self._switch_off(name, error)
        return events

    def _switch_off(self, name: str, error: Exception) -> None:
        self._failures.append((name, error))
        self._off[name] = self.detectors.pop(name)
        self._waiting.pop(name, None)

    def report_failures(self, complaints: Complaints) -> None:
        """Warn of the detectors that failed and are off; what they raised is not kept, for it holds the frames of the loop."""
        failures, self._failures = self._failures, []
        for name, error in failures:
            complaints.add(f"detector:{name}", f"the spike detector of {name} failed and is off", error)

    @property
    def signals(self) -> list[str]:
        """What detectors there are, with those that have failed, which on other ranks they need not have."""
        return sorted({**self._off, **self.detectors})

    def judge(
        self, record: StepRecord, whole: Mapping[str, float], absent: MutableMapping[tuple[str, str], str]
    ) -> tuple[StepRecord, list[Event]]:
        """``record`` with the scores and events of the signals that there are values for by now, and these events.

        ``whole`` has the whole-model values by name.
        """
        scores: dict[Key, float] = {}
        events: list[Event] = []
        for name, detector in list(self._waiting.items()):
            try:
                values = self._new_values(detector, record, whole)
                verdicts = _verdicts(detector, record.step, values)
                events.extend(self._events(detector, record.step, values, verdicts))
            except Exception as error:  # of a rule of the user's; it must not cost the record
                self._switch_off(name, error)
                continue
            for signal, verdict in verdicts.items():
                key = MAIN_SCORE if signal == MAIN_SIGNAL and self.shows_main else Key(SPIKE_SCORE, signal, "")
                if verdict.score is not None:
                    scores[key] = verdict.score
                else:
                    absent[key.source, key.metric or key.name] = _NO_SCORE
        if not scores and not events:
            return record, []
        if any(event.signal not in self._row for event in events):
            for earlier in self.recall():
                self._recalled.append(earlier)
                self.gradients.fill(earlier.step, earlier.tables)
        if any(
            size(event) > self._row.get(event.signal, 0.0) for event in events
        ):  # of a row, the first one and those above all before
            suspects = self._suspects(record.step, max(map(size, events)))
            told = (attribution(suspects, record.step).words, batch_in_words(record.context.get("batch_norms", {})))
            events = [replace(event, where="; ".join(filter(None, told))) for event in events]
        events = [replace(event, action=record.context.get("action", "")) for event in events]
        return replace(record, values={**record.values, **scores}, events=(*record.events, *events)), events

    def _events(
        self, detector: SpikeDetector, step: int, values: Mapping[str, float], verdicts: Mapping[str, Verdict]
    ) -> Iterator[Event]:
        """At most one event: of many signals that spike together it tells of the first."""
        spikes = {signal: verdict for signal, verdict in verdicts.items() if verdict.is_spike}
        if not spikes:
            return
        first = next(iter(spikes)) if len(spikes) == 1 else self._first(step, spikes)
        event = detector.event(step, values[first], spikes[first], first)
        if others := len(spikes) - 1:
            event = replace(event, reason=f"{event.reason}, and {others} of the {len(verdicts) - 1} others spike with it")
        yield event

    def _first(self, step: int, spikes: Mapping[str, Verdict]) -> str:
        """Of gradients the first in the order of suspicion; of other signals, and before a step has ended, that with the largest score."""
        names = {signal: key.name for signal in spikes if (key := parse_key(signal)).source == self.gradients.source}
        order = {suspect.name: place for place, suspect in enumerate(self.gradients.suspects(step))} if names else {}
        return min(spikes, key=lambda signal: (order.get(names.get(signal, ""), math.inf), -(spikes[signal].score or 0.0)))

    def _suspects(self, step: int, how_large: float) -> list[Suspect]:
        """Those of a step with a spike, which are remembered."""
        if step not in self.suspects:
            self.suspects[step] = self.gradients.suspects(step)
        self._sizes[step] = max(how_large, self._sizes.get(step, 0.0))
        found = self.suspects[step]
        while len(self.suspects) > _SPIKES:
            smallest = min(self.suspects, key=lambda known: self._sizes[known])
            del self.suspects[smallest], self._sizes[smallest]
        return found

    def taken_recalled(self) -> list[StepRecord]:
        """The records that were recalled since this was last asked."""
        taken, self._recalled = self._recalled, []
        return taken

    def _new_values(self, detector: SpikeDetector, record: StepRecord, whole: Mapping[str, float]) -> dict[str, float]:
        """The values of its signals in this step that it has not judged yet."""
        judged = self._judged.setdefault(detector.name, set())
        found = self._values(detector, record, whole, with_tables=not judged)  # nothing comes late to those
        new = {signal: value for signal, value in found.items() if signal not in judged}
        judged.update(new)
        if new:
            self._heard.add(detector.name)
        return new

    def _values(
        self, detector: SpikeDetector, record: StepRecord, whole: Mapping[str, float], with_tables: bool = True
    ) -> dict[str, float]:
        """The values of its signals."""
        if isinstance(detector.signal, re.Pattern):
            return self._matches.setdefault(detector.name, Matches(detector.signal)).values(record, with_tables)
        value = value_of(detector.signal, record, whole)
        return {} if value is None else {detector.name: value}

    def news(self, events: Sequence[Event]) -> list[str]:
        """Spikes of this step in the words of one warning, but for signals that spiked in the step before as well."""
        fresh = [event for event in events if event.signal not in self._row]
        return [str(replace(fresh[0], reason="; ".join(event.reason for event in fresh)))] if fresh else []

    @property
    def watches_values(self) -> bool:
        """Whether any detector judges what is not of the model: values that were logged, or whatever a pattern finds."""
        return any(_is_of_a_batch(detector.signal) for detector in (*self.detectors.values(), *self._off.values()))

    def watches(self, key: Key) -> bool:
        """Whether a detector judges the value that was logged under ``key``."""
        return any(
            bool(detector.signal.search(key.name)) if isinstance(detector.signal, re.Pattern) else detector.signal == key.name
            for detector in (*self.detectors.values(), *self._off.values())
        )

    def ended(self, applied: bool) -> None:
        """A step has ended, monitored or not."""
        self.refused = 0 if applied else self.refused + 1
        self._looked_at = 0 if applied else self._looked_at

    def looks_closer(self) -> bool:
        """Whether it is worth a closer look that steps are not applied; said once for each number of them that is."""
        due = max((limit for limit in _REFUSALS if limit <= self.refused), default=0)
        looks, self._looked_at = due > self._looked_at and bool(self.detectors), max(due, self._looked_at)
        return looks

    def forget(self, step: int) -> None:
        """This step comes again: what is known of it and of later ones is of another branch."""
        self.gradients.forget(step)
        self.suspects = {known: found for known, found in self.suspects.items() if known < step}
        self._sizes = {known: how_large for known, how_large in self._sizes.items() if known < step}
        self._aftermath.forget(step)

    def aftermath(self, record: StepRecord, whole: Mapping[str, float]) -> list[str]:
        """What became of earlier spikes, in words, now that nothing more can come for this step."""
        spikes = {event.signal: event for event in record.events}
        told = self._aftermath.see(record.step, spikes, lambda signal: value_of(signal, record, whole))
        for event in record.events:
            if event.signal not in self._row:
                self._aftermath.follow(event)
        self._row = {signal: max(size(event), self._row.get(signal, 0.0)) for signal, event in spikes.items()}
        return [*self._origin(record), *told]

    def _origin(self, record: StepRecord) -> Iterator[str]:
        """Where NaN or Inf began, once for a row of steps that have them."""
        refused = self.refused > _REFUSALS[0]
        spoiled = refused or any(not math.isfinite(event.value) for event in record.events)
        # where the scaler only seeks its scale, gradients are infinite, but the forward pass is not
        words = origin(record, forward_only=refused) if spoiled and not self._is_origin_told else ""
        if words:
            since = f"; {self.refused} steps in a row were not applied" if refused else ""
            yield f"step {record.step}: {words}{since}"
        self._is_origin_told = spoiled and (self._is_origin_told or bool(words))

    def unheard(self) -> list[str]:
        """Signals that never had a value, in all the steps that they were waited for; each is named once."""
        never = self._waiting.keys() - self._heard
        self._unheard.update(never)
        self._waiting = {}
        patience = {name: _PATIENCE if name.removeprefix(f"{SUMMARY}/") in DOCUMENTATION else _LONG_PATIENCE for name in never}
        return [name for name in never if self._unheard[name] == patience[name]]


def _is_of_a_batch(signal: str | re.Pattern[str]) -> bool:
    """Whether it is, or may be, the value of a rank's own batch."""
    if isinstance(signal, re.Pattern):
        return True
    key = parse_key(signal)
    return signal not in DOCUMENTATION and key.source != SUMMARY and key.source not in PARAMETER_SOURCES


def _verdicts(detector: SpikeDetector, step: int, values: Mapping[str, float], learns: bool = True) -> dict[str, Verdict]:
    if isinstance(detector.signal, re.Pattern):
        together = detector.update_all if learns else detector.foresee_all
        return together(step, values) if values else {}
    one = detector.update if learns else detector.foresee
    return {signal: one(step, value) for signal, value in values.items()}

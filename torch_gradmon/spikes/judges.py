"""All detectors of a run, each fed once a step with its signal as soon as there is a value for it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace

from ..names import GRADIENT, GRADIENT_BEFORE_CLIP, SPIKE_SCORE, SUMMARY, Key
from ..record import Event, StepRecord
from .aftermath import Aftermath
from .detector import SpikeDetector
from .origin import origin
from .signals import Matches, value_of
from .suspects import Gradients, Suspect, in_words
from .verdicts import Verdict

#: The signal whose score is the whole-model value ``gradmon/spike_score``.
MAIN_SIGNAL = "grad_norm"
MAIN_SCORE = Key(SUMMARY, "", "spike_score")
#: Steps in a row without a value, after which it is said: the first ones may have a reason of their own.
_PATIENCE = 3
#: Steps with a spike whose suspects are remembered.
_SPIKES = 100


class Judges:
    """Detectors by the name of their signal.

    A signal may be logged by hand, and so come after the step has ended.

    Attributes:
        gradients: those of the last steps.
        suspects: the parameters by suspicion, for the last steps with a spike.
    """

    def __init__(self) -> None:
        self.detectors: dict[str, SpikeDetector] = {}
        self.shows_main = False
        self._waiting: dict[str, SpikeDetector] = {}
        self._matches: dict[str, Matches] = {}
        self._silent: Counter[str] = Counter()
        self.gradients = Gradients()
        self.suspects: dict[int, list[Suspect]] = {}
        self._aftermath = Aftermath()
        self._before: set[str] = set()
        self._is_origin_told = False

    def begin(self, record: StepRecord, absent: MutableMapping[tuple[str, str], str]) -> None:
        """A step ended with ``record``. One that was not applied is judged by nobody."""
        if self.detectors:
            self.gradients.see(record.step, record.tables.get(GRADIENT_BEFORE_CLIP, record.tables.get(GRADIENT)))
        self._waiting = dict(self.detectors) if record.applied else {}
        if not record.applied:
            absent[SUMMARY, "spike_score"] = "the step was not applied"

    def judge(
        self, record: StepRecord, whole: Mapping[str, float], absent: MutableMapping[tuple[str, str], str]
    ) -> tuple[StepRecord, list[Event]]:
        """``record`` with the scores and events of the signals that there are values for by now, and these events.

        ``whole`` has the whole-model values by name.
        """
        scores: dict[Key, float] = {}
        events: list[Event] = []
        for name, detector in list(self._waiting.items()):
            values = self._values(detector, record, whole)
            if not values:
                continue
            del self._waiting[name]
            self._silent.pop(name, None)
            verdicts = detector.update_all(record.step, values) if isinstance(detector.signal, re.Pattern) else {}
            verdicts = verdicts or {name: detector.update(record.step, values[name])}
            for signal, verdict in verdicts.items():
                key = MAIN_SCORE if signal == MAIN_SIGNAL and self.shows_main else Key(SPIKE_SCORE, signal, "")
                if verdict.score is not None:
                    scores[key] = verdict.score
                else:
                    absent[key.source, key.metric or key.name] = "the detector has not seen enough steps yet"
            events.extend(_events(detector, record.step, values, verdicts))
        if not scores and not events:
            return record, []
        if events:
            suspects = self.suspects[record.step] = self.gradients.suspects(record.step)
            events = [replace(event, where=in_words(suspects, record.step)) for event in events]
            while len(self.suspects) > _SPIKES:
                del self.suspects[next(iter(self.suspects))]
        return replace(record, values={**record.values, **scores}, events=(*record.events, *events)), events

    def news(self, events: Sequence[Event]) -> list[str]:
        """Spikes of this step in the words of one warning, but for signals that spiked in the step before as well."""
        fresh = [event for event in events if event.signal not in self._before]
        if not fresh:
            return []
        where = f"; {fresh[0].where}" if fresh[0].where else ""
        return [f"step {fresh[0].step}: {'; '.join(event.reason for event in fresh)}{where}"]

    def aftermath(self, record: StepRecord, whole: Mapping[str, float]) -> list[str]:
        """What became of earlier spikes, in words, now that nothing more can come for this step."""
        told = self._aftermath.see(record.step, lambda signal: value_of(signal, record, whole))
        for event in record.events:
            if event.signal not in self._before:
                self._aftermath.follow(event)
        self._before = {event.signal for event in record.events}
        return [*self._origin(record), *(words for _, words in told)]

    def _origin(self, record: StepRecord) -> Iterator[str]:
        """Where NaN or Inf began, once for a row of steps that have them."""
        spoiled = any(not math.isfinite(event.value) for event in record.events)
        words = origin(record) if spoiled and not self._is_origin_told else ""
        if words:
            yield f"step {record.step}: {words}"
        self._is_origin_told = spoiled and (self._is_origin_told or bool(words))

    def silent(self) -> list[str]:
        """Signals that had no value for the third step in a row, now that nothing more can come for this one."""
        self._silent.update(self._waiting.keys())
        waiting, self._waiting = list(self._waiting), {}
        return [name for name in waiting if self._silent[name] == _PATIENCE]

    def _values(self, detector: SpikeDetector, record: StepRecord, whole: Mapping[str, float]) -> dict[str, float]:
        if isinstance(detector.signal, re.Pattern):
            matches = self._matches.setdefault(detector.name, Matches(detector.signal))
            return matches.values(record)
        value = value_of(detector.signal, record, whole)
        return {} if value is None else {detector.name: value}


def _events(detector: SpikeDetector, step: int, values: Mapping[str, float], verdicts: Mapping[str, Verdict]) -> Iterator[Event]:
    """At most one event: of many signals that spike together it tells of the one that lies furthest above normal."""
    spikes = {signal: verdict for signal, verdict in verdicts.items() if verdict.is_spike}
    if not spikes:
        return
    worst = max(spikes, key=lambda signal: spikes[signal].score or 0.0)
    event = detector.event(step, values[worst], spikes[worst], worst)
    if others := len(spikes) - 1:
        event = replace(event, reason=f"{event.reason}, and {others} of {len(verdicts) - 1} other signals spike with it")
    yield event

"""All detectors of a run, each fed once a step with its signal as soon as there is a value for it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import replace

from ..names import SPIKE_SCORE, SUMMARY, Key
from ..record import Event, StepRecord
from .detector import SpikeDetector

#: The signal whose score is the whole-model value ``gradmon/spike_score``.
MAIN_SIGNAL = "grad_norm"
MAIN_SCORE = Key(SUMMARY, "", "spike_score")


class Judges:
    """Detectors by signal, one each.

    A signal is a whole-model value or a scalar that was logged by hand, which may come after the step has ended.
    """

    def __init__(self) -> None:
        self.detectors: dict[str, SpikeDetector] = {}
        self.shows_main = False
        self._waiting: dict[str, SpikeDetector] = {}

    def begin(self, record: StepRecord, absent: MutableMapping[tuple[str, str], str]) -> None:
        """A step ended with ``record``. One that was not applied is judged by nobody."""
        self._waiting = dict(self.detectors) if record.applied else {}
        if not record.applied:
            absent[SUMMARY, "spike_score"] = "the step was not applied"

    def judge(
        self, record: StepRecord, signals: Mapping[str, float], absent: MutableMapping[tuple[str, str], str]
    ) -> tuple[StepRecord, list[Event]]:
        """``record`` with the scores and events of the signals that there are values for by now, and these events."""
        scores: dict[Key, float] = {}
        events: list[Event] = []
        for signal, detector in list(self._waiting.items()):
            value = signals.get(signal, record.values.get(Key("", signal, "")))
            if value is None:
                continue
            del self._waiting[signal]
            verdict = detector.update(record.step, value)
            key = MAIN_SCORE if signal == MAIN_SIGNAL and self.shows_main else Key(SPIKE_SCORE, signal, "")
            if verdict.score is not None:
                scores[key] = verdict.score
            else:
                absent[key.source, key.metric or key.name] = "the detector has not seen enough steps yet"
            if verdict.is_spike:
                events.append(detector.event(record.step, value, verdict))
        if not scores and not events:
            return record, []
        return replace(record, values={**record.values, **scores}, events=(*record.events, *events)), events

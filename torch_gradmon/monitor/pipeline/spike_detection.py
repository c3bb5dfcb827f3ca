"""The detectors of a run at work on its records."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from ...core.errors import WarningLog
from ...core.keys import SUMMARY
from ...core.records import SpikeEvent, StepRecord
from ...spikes.detector import SpikeDetector
from ...spikes.detector_set import DetectorSet
from ...step.summary import Summary

Absent = MutableMapping[tuple[str, str], str]

_NO_SIGNAL = "no step so far has it; log it with log_scalar(), or add the metric that it is a key of"


class SpikeDetection:
    """Evaluates detectors on each record, when it enters and again when values come late.

    Args:
        summary: has to compute the whole-model values that detectors need.
        complaints: where failures are reported.

    Attributes:
        detector_set: the detectors and what they know.
    """

    def __init__(self, summary: Summary, complaints: WarningLog) -> None:
        self.detector_set = DetectorSet()
        self._summary, self._complaints = summary, complaints
        self._of_preset: set[str] = set()

    def enter(self, record: StepRecord, signals: Mapping[str, float], absent: Absent) -> tuple[StepRecord, list[SpikeEvent]]:
        """Evaluate a new record. Returns it with scores and events, and these events; ``absent`` gets reasons for missing scores."""
        self.detector_set.begin(record, absent)
        return self._detect(record, signals, absent)

    def detect_late(self, record: StepRecord, absent: Absent) -> tuple[StepRecord, list[SpikeEvent]]:
        """Evaluate the signals of the same record that had no value before."""
        return self._detect(record, {}, absent) if self.detector_set.accepts_late_values else (record, [])

    def _detect(self, record: StepRecord, signals: Mapping[str, float], absent: Absent) -> tuple[StepRecord, list[SpikeEvent]]:
        try:
            return self.detector_set.detect(record, signals, absent)
        except Exception as error:  # the record must not be lost for it
            self._complaints.add("internal:judge", f"step {record.step} could not be judged", error)
            return record, []

    def reports(self, record: StepRecord, signals: Mapping[str, float]) -> list[str]:
        """What there is to report on the complete ``record`` and on earlier spikes."""
        return self.detector_set.follow_up.reports(record, signals)

    def finish(self, absent: Absent) -> None:
        """The record is complete: warn about signals that never had a value."""
        for signal in self.detector_set.signals_without_values():
            why = absent.get((SUMMARY, signal.removeprefix(f"{SUMMARY}/")), _NO_SIGNAL)
            self._complaints.add(f"signal:{signal}", f"the spike detector of {signal} has nothing to judge: {why}")

    # --- steps that are not monitored ----------------------------------------------------------------------------------------

    def learn(self, record: StepRecord, signals: Mapping[str, float], absent: Absent) -> list[str]:
        """Evaluate a step that has values for the detectors only. Returns what there is to report."""
        self.detector_set.begin(record, {})
        self._detect(record, signals, absent)
        return self.reports(record, signals)

    def count_unmonitored(self, is_refused: bool) -> bool:
        """Count a step that is not monitored. Returns whether a series of refused ones calls for more detail."""
        if not (is_refused or self.detector_set.follow_up.rejected):
            return False
        self.detector_set.follow_up.step_ended(applied=not is_refused)
        return self.detector_set.needs_detail()

    # --- detectors and state -------------------------------------------------------------------------------------------------

    def add(self, detector: SpikeDetector, of_preset: bool = False) -> None:
        """Use ``detector``. One that the user brings replaces a preset's, and is not replaced by one.

        Raises:
            ValueError: the user has brought one for this signal already.
        """
        is_known = detector.name in self.detector_set.detectors
        if of_preset:
            self.detector_set.show_main_score()
        if is_known and of_preset:
            return
        if is_known and detector.name not in self._of_preset:
            raise ValueError(f"there is a detector for {detector.name!r} already; a signal has one")
        (self._of_preset.add if of_preset else self._of_preset.discard)(detector.name)
        self.detector_set.add(detector)
        self._summary.choice.require(detector.name.removeprefix(f"{SUMMARY}/"))

    def state_dict(self) -> dict[str, Any]:
        """The state of each detector by signal, as plain numbers and lists."""
        return {signal: detector.state_dict() for signal, detector in self.detector_set.detectors.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        for signal, detector in self.detector_set.detectors.items():
            detector.load_state_dict(state[signal])

"""The steps that have ended: their records, what is added late, who judges them, and where they go."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from ...analysis.spike_report.source import RecentSteps
from ...core.errors import SpikeError, warn_user
from ...core.fence import Fence
from ...core.keys import SUMMARY, Key
from ...core.metric import Metric
from ...core.records import SpikeEvent, StepRecord
from ...plugins.spike_policy.policy import Policy, policy_of
from ...spikes.detector import SpikeDetector
from ...spikes.detector_set import DetectorSet
from ...step.buffer import StepBuffer
from ...step.layer_values import LayerSelection
from ...step.reasons import ReasonContext
from ...step.record_builder import asked_for, missing
from ...step.summary import Summary
from ..publisher import Outbox
from .record_sample import Memory

#: Of skipped steps in a row, those that are worth a warning.
_TOLD = frozenset({1, 2, 3, 4, 10, 30, 100, 300, 1000, 3000, 10_000})
_NO_SIGNAL = "no step so far has it; log it with log_scalar(), or add the metric that it is a key of"


@dataclass
class Options:
    """What is done with records; :class:`torch_gradmon.ModuleMonitor` explains each."""

    show: Callable[[Mapping[Key, float]], dict[str, float]]
    history: int = 1000
    on_spike: str | Policy | Callable[[SpikeEvent], Any] | None = None


class Ledger:
    """Keeps the record of the last step open to late values until the next step begins.

    Args:
        options: what is done with records.
        guard: where failures are reported.
        outbox: where records go.
        layers: which per-layer values are shown.
    """

    def __init__(self, options: Options, guard: Fence, outbox: Outbox, layers: LayerSelection) -> None:
        self.outbox = outbox
        self.summary = Summary(all_columns=outbox.stores, of_layers=layers.needs)
        self.layers = layers
        self.judges = DetectorSet()
        self.last: StepRecord | None = None
        self.absent: dict[tuple[str, str], str] = {}
        self.situation: ReasonContext | None = None  # of the step that ended last
        self._options = options
        self._guard = guard
        self._records: OrderedDict[int, StepRecord] = OrderedDict()
        self._between: OrderedDict[int, StepRecord] = OrderedDict()
        self.memory = Memory()
        self.matrices: Mapping[str, int] = {}
        self.kinds: Mapping[str, str] = {}
        self._noted: dict[str, Any] = {}  # of the model, in the run directory
        self._late: StepBuffer | None = None  # what is logged for the step that ended last, until it is finished
        self._logged: StepBuffer | None = None  # the same of a finished one
        self._signals: Mapping[str, float] = {}
        self.on_alert: Callable[[int], object] = lambda _: None  # a step is worth a look at more
        self.on_record: Callable[[StepRecord], object] = lambda _: None
        self._preset_signals: set[str] = set()
        self.observers: list[
            Callable[[StepRecord, bool], object]
        ] = []  # called with each record, and whether it replaces the last one

    def enter(self, record: StepRecord, signals: Mapping[str, float], buffer: StepBuffer) -> None:
        """A step has ended with ``record``; ``signals`` are its whole-model values, ``buffer`` what it was made of."""
        self.absent = buffer.absent
        self.judges.begin(record, self.absent)
        record, events = self._judged(record, signals)
        self._late = buffer.scalars()
        self._keep(record)
        self.fill(self.judges.take_fetched())
        self._signals = signals
        self.on_record(self.last or record)
        self._tell(events, record.context.get("action", ""))

    def knows(self, facts: Mapping[str, Any]) -> None:
        """The model as it is now, see :attr:`torch_gradmon.step.model_index.ModelIndex.facts`."""
        if facts["matrices"] is self.matrices:
            return
        self.matrices, self.kinds = facts["matrices"], facts["kinds"]
        # alternating models, as in a GAN, change the inventory in every step, but no other fact
        new = {name: fact for name, fact in facts.items() if fact != self._noted.get(name)}
        if new:
            self._noted.update(new)
            self.outbox.note(**new)

    def pass_by(self, refused: bool) -> bool:
        """A step that is not monitored has ended; whether a series of refused ones is worth a look at more."""
        if not (refused or self.judges.follow_up.rejected):
            return False
        self.judges.follow_up.step_ended(applied=not refused)
        return self.judges.needs_detail()

    def learn(self, record: StepRecord, signals: Mapping[str, float]) -> None:
        """A step that is not monitored, whose values the detectors are to know all the same."""
        self.judges.begin(record, {})
        self._judged(record, signals)
        self._warn(self.judges.follow_up.reports(record, signals))

    def _judged(self, record: StepRecord, signals: Mapping[str, float]) -> tuple[StepRecord, list[SpikeEvent]]:
        try:
            return self.judges.detect(record, signals, self.absent)
        except Exception as error:  # the record must not be lost for it
            self._guard.complaints.add("internal:judge", f"step {record.step} could not be judged", error)
            return record, []

    def goes_back(self, step: int) -> None:
        """The run goes back to ``step``: what is known of later ones is of another branch."""
        for known in (self._records, self._between):
            while known and next(reversed(known)) >= step:
                known.popitem()
        self.memory.goes_back(step)
        self.judges.rewind(step)

    def was_monitored(self, step: int) -> bool:
        """Whether there is a record of ``step``."""
        return step in self._records

    def fill(self, records: Iterable[StepRecord]) -> None:
        """Take steps that were not monitored, now that a spike before or after them makes them interesting. No dashboard gets them."""
        for record in records:
            self.judges.history.gradients.backfill(record.step, record.tables)
            self._between[record.step] = replace(record, tables={})
            self.outbox.fill(record)
        while len(self._between) > self._options.history:
            self._between.popitem(last=False)

    def finish(self) -> None:
        """Nothing more can come for the step that has ended: judge the signals that came late, and send it out."""
        if self.last is not None and self._late is not None:
            self._logged, self._late = self._late, None
            self._finish_judging(self.last)
        self.outbox.publish()

    def _finish_judging(self, record: StepRecord) -> None:
        self._judge_again(record)
        self._warn(self.judges.follow_up.reports(self.last or record, self._signals))
        for signal in self.judges.signals_without_values():
            why = self.absent.get((SUMMARY, signal.removeprefix(f"{SUMMARY}/")), _NO_SIGNAL)
            self._guard.complaints.add(f"signal:{signal}", f"the spike detector of {signal} has nothing to judge: {why}")

    def judge_late(self) -> None:
        """Judge the signals that came late so far, of the step that has ended, before its record is finished."""
        if self.last is not None and self._late is not None:
            self._judge_again(self.last)

    def _judge_again(self, record: StepRecord) -> None:
        judged, events = self._judged(record, {}) if self.judges.accepts_late_values else (record, [])
        if judged is not record:
            self._keep(judged, amend=True)
            self.fill(self.judges.take_fetched())
        self._tell(events)

    def add(self, late: StepBuffer) -> None:
        """Late values for the step that ended last."""
        if self.last is not None:
            if self._late is None:
                self._late = self._logged or StepBuffer(self.last.step, self._guard.complaints)
            self._late.absorb(late)
            self.amend(self._late, self._late.flush()[1])

    def amend(self, late: StepBuffer, values: Mapping[Key, float]) -> None:
        """Late ``values`` of the step that was entered last; more of them will be merged in ``late``, where they are from."""
        if self.last is not None:
            self._late = late
            self._keep(replace(self.last, values={**self.last.values, **values}), amend=True)

    def is_awaited(self, step: int) -> bool:
        """Whether a sink that is not deferred, or ``on_spike``, needs the record of ``step`` when the next step begins."""
        return self.outbox.is_awaited(step) or self._options.on_spike not in (None, "warn")

    def tag(self, tags: Mapping[str, Any]) -> None:
        """Facts about the step that ended last."""
        if self.last is not None:
            context = {**self.last.context, "tags": {**self.last.context.get("tags", {}), **tags}}
            self._keep(replace(self.last, context=context), amend=True)

    def _keep(self, record: StepRecord, amend: bool = False) -> None:
        self.last = record
        self._records[record.step] = replace(record, tables={}, rng={})
        self.memory.keep(record)
        for observe in self.observers:
            observe(record, amend)
        while len(self._records) > self._options.history:
            self._records.popitem(last=False)
        self.outbox.put(record, functools.partial(_shown, self._options.show, record), amend)

    def _warn(self, told: Iterable[str]) -> None:
        for words in told if (self._options.on_spike == "warn" or self._acts) and not self.outbox.is_muted else ():
            warn_user(words)

    @property
    def _acts(self) -> bool:
        """Whether something is done about spikes before they change the model."""
        return policy_of(self._options.on_spike) is not None

    def _tell(self, events: Sequence[SpikeEvent], action: str = "") -> None:
        news = self.judges.follow_up.alerts(events)
        if self.last is not None and action:  # as a rank knows it, though not hundreds in a row
            if self.last.context["in_a_row"] not in _TOLD:
                return
            reasons = [event.reason for event in events] or [self.last.skipped]
            where = next((event.where for event in events if event.where), "")
            news = [f"step {self.last.step}: " + "; ".join(filter(None, (*reasons, where, action)))]
        elif self._acts and (late := [event for event in events if event.signal not in self.judges.predicted]):
            signals = ", ".join(event.signal for event in late)
            self._guard.complaints.add(
                f"late:{signals}",
                f"that {signals} spiked in step {late[0].step} became known only when the optimizer had stepped, so that nothing was "
                "done about it; what is logged has to be logged before optimizer.step()",
            )
        if (self.judges.needs_detail() or news) and self.last is not None:
            self.on_alert(self.last.step)
        self.judges.warn_of_failures(self._guard.complaints)
        self._warn(news)
        for event in events:
            if callable(self._options.on_spike):
                try:
                    self._options.on_spike(event)
                except Exception as error:
                    self._guard.complaints.add("on_spike", "the function on_spike failed; training continues", error)
            elif self._options.on_spike == "raise":
                raise SpikeError(str(event))

    # --- queries ---------------------------------------------------------------------------------------------------------------

    def shown(self, record: StepRecord) -> dict[str, float]:
        """What of ``record`` is for dashboards, by key."""
        return _shown(self._options.show, record)

    def history(self) -> dict[int, dict[str, float]]:
        """The same for the last steps; other threads may call this during training."""
        return {step: self.shown(record) for step, record in list(self._records.items())}

    def recent(self) -> RecentSteps:
        """The records that are kept for reports: those of the last steps, and those that a diagnosis needs."""
        kept = {record.step: record for record in self.memory.records()}
        return RecentSteps(
            {**kept, **self._between, **self._records}, self.judges.history.gradients, self.judges.history.suspects
        )

    def missing(
        self, metrics: Iterable[Metric], names: Mapping[str, Any], owned: Set[str] | None = None, why: str = ""
    ) -> dict[str, str]:
        """Why each of ``metrics`` has no value in the step that ended last, by key; ``owned``: parameters that attached optimizers have;
        ``why`` there are no values at all.
        """
        if why:
            reasons = dict.fromkeys(asked_for(metrics, names, self.summary.shown), why)
        elif self.last is None or self.situation is None:
            return {}
        else:
            reasons = missing(self.last, list(metrics), names, self.absent, self.situation, self.layers, owned)
        # the keys are made as those of the values are
        return dict(zip(self._options.show(dict.fromkeys(reasons, 0.0)), reasons.values(), strict=True))

    # --- detectors and state ---------------------------------------------------------------------------------------------------

    def add_detector(self, detector: SpikeDetector, of_preset: bool = False) -> None:
        """Feed ``detector``. One that the user brings takes the place of a preset's, and keeps it.

        Raises:
            ValueError: the user has brought one for this signal already.
        """
        there = detector.name in self.judges.detectors
        if of_preset:
            self.judges.shows_main = True
        if there and of_preset:
            return
        if there and detector.name not in self._preset_signals:
            raise ValueError(f"there is a detector for {detector.name!r} already; a signal has one")
        (self._preset_signals.add if of_preset else self._preset_signals.discard)(detector.name)
        self.judges.detectors[detector.name] = detector
        self.summary.signals.add(detector.name.removeprefix(f"{SUMMARY}/"))

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        detectors = {signal: detector.state_dict() for signal, detector in self.judges.detectors.items()}
        return {"summary": self.summary.state_dict(), "detectors": detectors}

    def load_part(self, part: str, value: Any) -> None:
        """The inverse of :meth:`state_dict`, for one of its parts."""
        if part == "summary":
            self.summary.load_state_dict(value)
        else:
            for signal, detector in self.judges.detectors.items():
                detector.load_state_dict(value[signal])


def _shown(show: Callable[[Mapping[Key, float]], dict[str, float]], record: StepRecord) -> dict[str, float]:
    # no method of the ledger, for what waits to be sent outlives it and must not keep on_spike and its model alive
    hidden = record.hidden
    return show({key: value for key, value in record.values.items() if key not in hidden} if hidden else record.values)

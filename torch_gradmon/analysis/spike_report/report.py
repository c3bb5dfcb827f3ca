"""The content of a spike report, as data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple

from ...core.formatting import is_multiple, strict, times
from ...core.keys import SUMMARY, parse_key
from ...core.records import SpikeEvent, loss_in
from ...spikes import detector_set as recovery
from ...spikes.attribution import ParameterAttribution, SpikeCause, spike_cause
from ...spikes.signals import Episode, episodes, largest
from .source import StepSource

#: Steps shown before and after the step of the report.
_BEFORE, _AFTER = 3, 4
#: Later steps that are searched for values of a signal, which may be logged seldom.
_SEARCHED = 1000
#: Whole-model values that are shown in addition to those that spiked and those with "loss" in their name.
_SIGNALS = ("grad_norm", "grad_norm_clipped", "update_norm", "spike_score")
#: Facts that are shown over the steps if they change.
_CHANGING = ("lr", "amp_scale")


@dataclass(frozen=True)
class SpikeReport:
    """What is known of one step and its spike, if it has one.

    Attributes:
        step: number of the step.
        events: its spikes.
        episode: the spike of successive steps that it belongs to; None without a spike.
        context: its facts.
        around: the steps near it, for :attr:`facts` and :attr:`signals`.
        facts: names and values of the facts that change in these steps; of several parameter groups the first.
        signals: names and values of the whole model, and of the signals that spiked, in these steps; None if unknown.
        suspects: its parameters, ranked by suspicion; empty if its gradients are unknown.
        recovery: for each signal that spiked, a sentence on the steps after the spike.
        others: the other spikes of the run.
        loss: of the step; None if it was not logged.
        is_loss_logged: one of the steps around it has a loss.
    """

    step: int
    events: Sequence[SpikeEvent]
    episode: Episode | None
    context: Mapping[str, Any]
    around: Sequence[int]
    facts: Sequence[tuple[str, Sequence[Any]]]
    signals: Sequence[tuple[str, Sequence[float | None]]]
    suspects: Sequence[ParameterAttribution]
    recovery: Sequence[str]
    others: Sequence[Episode]
    loss: float | None = None
    is_loss_logged: bool = False

    @classmethod
    def of(cls, source: StepSource, step: int | None = None) -> SpikeReport:
        """The report on ``step``, by default on the worst step of the largest spike.

        Raises:
            ValueError: the step is unknown, or there is no spike.
        """
        known = source.steps
        spikes = episodes(source.events, known)
        if step is None:
            if not spikes:
                raise ValueError(no_spike(source))
            step = largest(spikes, 1)[0].worst.step
        if step not in known:
            span = f"{len(known)} steps are known, from {known[0]} to {known[-1]}" if known else "none is"
            raise ValueError(f"step {step} is not known: {span}")
        spike = next((each for each in spikes if step in each.steps), None)
        events = [] if spike is None else [event for event in spike.events if event.step == step]
        around = known[max(0, known.index(step) - _BEFORE) : known.index(step) + _AFTER + 1]
        return cls(
            step,
            events,
            spike,
            source.context(step),
            around,
            list(_changing_facts(source, around)),
            list(_signals(source, around, [event.signal for event in events])),
            source.suspects(step),
            [] if spike is None else list(_recovery(source, known, spike)),
            [other for other in spikes if other is not spike],
            _loss(source, step),
            any(_loss(source, number) is not None for number in around),
        )

    @property
    def cause(self) -> SpikeCause:
        """What caused the spike."""
        return spike_cause(self.suspects, self.step, self.loss, self.is_loss_logged, "by_turns" in self.context)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the step, what spiked in it, its cause, and the values around it."""
        cause = self.cause
        spike = self.episode
        found = {
            "step": self.step,
            "spikes": [asdict(event) for event in self.events],
            "spike": None if spike is None else {"first": spike.first, "last": spike.last, "worst": spike.worst.step},
            "cause": asdict(cause),
            "loss": self.loss,
            "steps": list(self.around),
            "values": {name: list(values) for name, values in (*self.signals, *self.facts)},
            "parameters": [{**asdict(suspect), "factor": suspect.factor} for suspect in self.suspects],
            "recovery": list(self.recovery),
            "others": [{"first": other.first, "last": other.last, "worst": other.worst.step} for other in self.others],
        }
        return strict(found)  # type: ignore[no-any-return]


def no_spike(source: StepSource) -> str:
    """That there is no spike to report on."""
    known = source.steps
    if not known:
        return "there is no spike, because no step is known yet"
    return f"there is no spike in the {len(known)} monitored steps from {known[0]} to {known[-1]}; name a step to see its report"


def no_report() -> dict[str, Any]:
    """What :meth:`SpikeReport.to_dict` has where there is no spike."""
    return {
        **dict.fromkeys(("step", "spike", "cause", "loss")),
        **{name: [] for name in ("spikes", "steps", "parameters", "recovery", "others")},
        "values": {},
    }


def _loss(source: StepSource, step: int) -> float | None:
    return loss_in({parse_key(key): value for key, value in source.metrics(step).items()})


def _changing_facts(source: StepSource, around: Sequence[int]) -> Iterator[tuple[str, list[Any]]]:
    for name in _CHANGING:
        facts = [source.context(number).get(name) for number in around]
        facts = [fact[0] if isinstance(fact, list) and fact else fact for fact in facts]
        if any(fact != facts[0] for fact in facts):
            yield name, facts


def _signals(source: StepSource, around: Sequence[int], spiked: Sequence[str]) -> Iterator[tuple[str, list[float | None]]]:
    values = {number: source.metrics(number) for number in around}
    shown = set()
    for key in dict.fromkeys(key for number in around for key in values[number]):
        name = key.removeprefix(f"{SUMMARY}/")
        if name in (*spiked, *_SIGNALS) or key in spiked or ("loss" in key and not parse_key(key).source):
            shown |= {key, name}
            yield name, [values[number].get(key) for number in around]
    for signal in dict.fromkeys(spiked):
        if signal not in shown:  # a value of one parameter that is measured but not shown
            yield signal, [source.value(signal, number) for number in around]


def _recovery(source: StepSource, known: Sequence[int], spike: Episode) -> Iterator[str]:
    later = known[known.index(spike.last) + 1 :]
    for signal in dict.fromkeys(event.signal for event in spike.events):
        own = [event for event in spike.events if event.signal == signal]
        after = ((number, source.value(signal, number)) for number in later[:_SEARCHED])
        values = [*islice(((number, value) for number, value in after if value is not None), recovery.AFTER)]
        if values:
            yield recovery.recovery_text(own, values)


class SpikeSummary(NamedTuple):
    """A spike on one line.

    Attributes:
        step: the worst step.
        first, last: the first and the last step.
        words: which signals spiked in the worst step, and how far above the usual.
        layer: the parameter that moved first, or most; empty if no single one did, or the gradients are unknown.
        moved: what it did, or what all parameters did together.
    """

    step: int
    first: int
    last: int
    words: str
    layer: str
    moved: str

    @classmethod
    def of(cls, source: StepSource, spike: Episode) -> SpikeSummary:
        """The summary of ``spike``."""
        step = spike.worst.step
        found = spike_cause(source.suspects(step), step, _loss(source, step))
        return cls(step, spike.first, spike.last, ", ".join(map(_signal_text, spike.of_worst)), found.layer, found.did)


def _signal_text(event: SpikeEvent) -> str:
    if not math.isfinite(event.value):
        return f"{event.signal} is {event.value}"
    if event.usual is not None and is_multiple(event.value, event.usual):
        return f"{event.signal} {times(event.value / event.usual)} the usual"
    return f"{event.signal} is {event.value:.4g}"

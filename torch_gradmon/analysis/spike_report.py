"""The report on one step: its spikes, the signals around it, the parameters that moved, and the recovery."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Union

from ..core import keys as n
from ..core.formatting import ShownText, cut_start, factor_text, is_multiple, significant, strict, times
from ..core.keys import SUMMARY, Key, format_key, parse_key
from ..core.records import SpikeEvent, StepRecord, loss_in
from ..runs.detail_request import request_text
from ..spikes.attribution import ParameterAttribution, SpikeCause, spike_cause
from ..spikes.detector_set import AFTER, GradientNormHistory, recovery_text
from ..spikes.hampel import REMEMBERED
from ..spikes.signals import Episode, episodes, largest, value_of
from ..step.plan import value_in

if TYPE_CHECKING:
    from ..runs.reader import RunReader

# --- Where the values of a spike report come from ---


@dataclass(frozen=True)
class RecentSteps:
    """The last steps in a monitor's memory."""

    records: Mapping[int, StepRecord]
    gradients: GradientNormHistory  # of some of the steps
    ranked: Mapping[int, Sequence[ParameterAttribution]]  # the parameters at the time of each spike

    @property
    def steps(self) -> list[int]:
        return sorted(self.records)

    @property
    def events(self) -> list[SpikeEvent]:
        return [event for step in self.steps for event in self.records[step].events]

    def context(self, step: int) -> Mapping[str, Any]:
        return {"applied": self.records[step].applied, **self.records[step].context}

    def metrics(self, step: int) -> Mapping[str, float]:
        return {format_key(key): value for key, value in self.records[step].values.items()}

    def value(self, signal: str, step: int) -> float | None:
        key = parse_key(signal)
        found = value_of(signal, self.records[step], {})
        if found is None and not key.source:
            found = self.records[step].values.get(Key(SUMMARY, "", signal))
        return value_in(self.gradients.table(step), key) if found is None and key.source == self.gradients.source else found

    def suspects(self, step: int) -> Sequence[ParameterAttribution]:
        return self.ranked.get(step) or self.gradients.suspects(step)


#: Where the values of a spike report come from: a run on disk, or a monitor's last steps.
StepSource: TypeAlias = Union["RunReader", RecentSteps]


def suspects(source: StepSource, step: int) -> Sequence[ParameterAttribution]:
    """The parameters of a step, ranked by suspicion; empty if its gradients are unknown."""
    if isinstance(source, RecentSteps):
        return source.suspects(step)
    gradients = GradientNormHistory()
    for number in [number for number in source.steps if number <= step][-REMEMBERED:]:
        tables = {name: source.table(name, number) for name in (n.GRADIENT_BEFORE_CLIP, n.GRADIENT)}
        gradients.add(number, {name: table for name, table in tables.items() if table is not None})
    return gradients.suspects(step)


# --- The content of a spike report, as data ---

#: Steps shown before and after the step of the report.
_BEFORE, _AFTER = 3, 4
#: Later steps that are searched for values of a signal, which may be logged seldom.
_SEARCHED = 1000
#: Whole-model values that are shown in addition to those that spiked and those with "loss" in their name.
_SIGNALS = ("grad_norm", "grad_norm_after_clip", "update_norm", "spike_score")
#: Facts that are shown over the steps if they change.
_CHANGING = ("lr", "amp_scale")


@dataclass(frozen=True)
class SpikeReport:
    step: int
    events: Sequence[SpikeEvent]
    episode: Episode | None  # the spike of successive steps that it belongs to
    context: Mapping[str, Any]  # its facts
    around: Sequence[int]  # the steps near it, for facts and signals
    facts: Sequence[tuple[str, Sequence[Any]]]  # names and values of those that change there; of several groups the first
    # names and values of the whole model, and of the signals that spiked, in these steps; None if unknown
    signals: Sequence[tuple[str, Sequence[float | None]]]
    suspects: Sequence[ParameterAttribution]  # its parameters, ranked by suspicion; empty if its gradients are unknown
    recovery: Sequence[str]  # for each signal that spiked, a sentence on the steps after the spike
    others: Sequence[Episode]
    loss: float | None = None
    is_loss_logged: bool = False

    @classmethod
    def of(cls, source: StepSource, step: int | None = None) -> SpikeReport:
        """The report on ``step``, by default on the worst step of the largest spike; ValueError if it is unknown, or there is none."""
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
        contexts = [source.context(number) for number in around]
        all_facts = {name: [context.get(name) for context in contexts] for name in _CHANGING}
        facts = {
            name: [fact[0] if isinstance(fact, list) and fact else fact for fact in each] for name, each in all_facts.items()
        }
        changing = [(name, values) for name, values in facts.items() if any(value != values[0] for value in values)]
        signals = list(_signals(source, around, [event.signal for event in events]))
        recovery = [] if spike is None else list(_recovery(source, known, spike))
        others = [other for other in spikes if other is not spike]
        context, ranked, loss = source.context(step), suspects(source, step), _loss(source, step)
        is_logged = any(_loss(source, number) is not None for number in around)
        return cls(step, events, spike, context, around, changing, signals, ranked, recovery, others, loss, is_logged)

    @property
    def cause(self) -> SpikeCause:
        return spike_cause(self.suspects, self.step, self.loss, self.is_loss_logged, "by_turns" in self.context)

    def to_dict(self) -> dict[str, Any]:
        spike = self.episode
        found = {
            "step": self.step,
            "spikes": [asdict(event) for event in self.events],
            "spike": None if spike is None else {"first": spike.first, "last": spike.last, "worst": spike.worst.step},
            "cause": asdict(self.cause),
            "loss": self.loss,
            "steps": list(self.around),
            "values": {name: list(values) for name, values in (*self.signals, *self.facts)},
            "parameters": [{**asdict(suspect), "factor": suspect.factor} for suspect in self.suspects],
            "recovery": list(self.recovery),
            "others": [{"first": other.first, "last": other.last, "worst": other.worst.step} for other in self.others],
        }
        return strict(found)  # type: ignore[no-any-return]


def no_spike(source: StepSource) -> str:
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
        values = [*islice(((number, value) for number, value in after if value is not None), AFTER)]
        if values:
            yield recovery_text(own, values)


class SpikeSummary(NamedTuple):
    step: int  # the worst
    first: int
    last: int
    words: str  # which signals spiked and how far
    layer: str  # the parameter that moved first or most; empty if no single one did, or the gradients are unknown
    moved: str  # what it did, or what all parameters did together

    @classmethod
    def of(cls, source: StepSource, spike: Episode) -> SpikeSummary:
        step = spike.worst.step
        found = spike_cause(suspects(source, step), step, _loss(source, step))
        return cls(step, spike.first, spike.last, ", ".join(map(_signal_text, spike.of_worst)), found.layer, found.did)


def _signal_text(event: SpikeEvent) -> str:
    if not math.isfinite(event.value):
        return f"{event.signal} is {event.value}"
    if event.usual is not None and is_multiple(event.value, event.usual):
        return f"{event.signal} {times(event.value / event.usual)} the usual"
    return f"{event.signal} is {event.value:.4g}"


# --- The report on a spike as text, on one screen ---

#: Parameters, ranks and other spikes that are shown, and micro-batches or groups of each.
_LAYERS, _RANKS, _OTHERS, _ITEMS = 8, 8, 5, 8
_NAME_WIDTH, _WIDTH = 40, 11
_TITLES = ("norm", "usual", "times", "score", "share", "since")


def explain(source: StepSource, step: int | None = None) -> ShownText:
    """The report on ``step``, by default on the worst step of the largest spike, or that there is no spike; ValueError if it is unknown."""
    if step is None and not source.events:
        return ShownText(no_spike(source))
    report = SpikeReport.of(source, step)
    rows = [("signal", [f"[{number}]" if number == report.step else str(number) for number in report.around])]
    rows += [(name, list(map(_fact, facts))) for name, facts in report.facts]
    rows += [(name, list(map(significant, values))) for name, values in report.signals]
    lines = [*_heading(report), "", *(_row(name, cells) for name, cells in rows), "", *_parameters(report)]
    for sentence in report.recovery:
        lines += ["", sentence]
    if report.others:
        shown = largest(report.others, _OTHERS)
        left = len(report.others) - len(shown)
        lines += ["", f"other spikes: {', '.join(other.when for other in shown)}{f' and {left} smaller ones' if left else ''}"]
    return ShownText("\n".join(lines))


def _heading(report: SpikeReport) -> Iterator[str]:
    context = dict(report.context)
    action, skipped, _ = context.pop("action", ""), context.pop("skipped", ""), context.pop("in_a_row", 0)
    interrupted = context.pop("interrupted", "")
    if not report.events:
        yield f"step {report.step}: {skipped or 'no detector called it a spike'}"
    yield from (f"step {report.step}: {event.reason}" for event in report.events)
    spike = report.episode
    if spike is not None and len(spike.steps) > 1:
        worst = "" if report.step == spike.worst.step else f", the largest in step {spike.worst.step}"
        yield f"  one spike of {len(spike.steps)} steps in a row, {spike.first} to {spike.last}{worst}"
    applied = context.pop("applied", True)
    if action:
        yield f"  {action}"
    elif not applied:
        yield f"  the step was not applied{f': {interrupted}' if interrupted else ''}"
    if tuned := context.pop("tuned", None):
        yield f"  measured under a live change of detail (gradmon detail, number {tuned['number']}): {request_text(tuned)}"
    tags, norms, rows = context.pop("tags", {}), context.pop("batch_norms", {}), context.pop("rows", {})
    hidden = ("time", "overhead_fraction", n.NO_ATTENTION)
    if facts := [f"{name} {_fact(value)}" for name, value in {**tags, **context}.items() if name not in hidden]:
        yield "  " + ", ".join(facts)
    if rows:
        named = [f"{name} ({significant(float(loss))})" for name, loss in zip(rows["ids"], rows["losses"], strict=True)]
        yield f"  rows with the largest losses, of {rows['count']} with a sum of {significant(rows['sum'])}: {', '.join(named)}"
    for rank, each in list(norms.items())[:_RANKS]:
        yield f"  norms of the micro-batches of rank {rank}: {_items(list(map(significant, each)))}"
    if len(norms) > _RANKS:
        yield f"  ... and {len(norms) - _RANKS} more ranks"


def _items(items: Sequence[str]) -> str:
    return ", ".join(items[:_ITEMS]) + (", ..." if len(items) > _ITEMS else "")


def _fact(value: Any) -> str:
    if isinstance(value, list):
        return _fact(value[0]) if len(value) == 1 else f"[{_items(list(map(_fact, value)))}]"
    return f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())[:80]


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{cut_start(name, _NAME_WIDTH - 1):<{_NAME_WIDTH}}" + "".join(f"{f' {cell}':>{_WIDTH}}" for cell in cells)


def _parameters(report: SpikeReport) -> Iterator[str]:
    suspects, step, is_spike = report.suspects, report.step, bool(report.events)
    if not suspects:
        yield "the gradients of this step are not known (a monitor keeps 64 steps, and 100 with a spike; a run directory all)"
        return
    yield _row("parameter, by suspicion", _TITLES)
    yield from (_row(suspect.name, _cells(suspect, step)) for suspect in suspects[:_LAYERS])
    found = report.cause
    calm = sum(each.since is None and not (each.nonfinite or each.is_spoiled_after) for each in suspects)
    known = ""
    if not is_spike or not found.is_common:  # otherwise the last line states it
        is_known = any(suspect.score is not None for suspect in suspects)
        few = "too few earlier steps are known to determine what is usual"
        known = f"{calm} of {len(suspects)} as usual" if is_known else few
    if (left := len(suspects) - _LAYERS) > 0:
        yield f"... and {left} more{'; ' * bool(known)}{known}"
    elif known:
        yield f"{len(suspects)} parameters, {known}"
    if is_spike and found.words:
        yield found.words


def _cells(suspect: ParameterAttribution, step: int) -> list[str]:
    return [
        significant(suspect.norm),
        significant(suspect.usual),
        "-" if suspect.factor is None else factor_text(suspect.factor),
        "-" if suspect.score is None else f"{suspect.score:.1f}",
        "-" if suspect.share is None else f"{suspect.share:.1%}",
        "-" if suspect.since is None else "this step" if suspect.since == step else str(suspect.since),
    ]

"""The story of one step on one screen: what was said of it, the signals around it, the layers, what came after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from ..core.formatting import factor_text
from ..core.keys import SUMMARY, Key, format_key, parse_key
from ..core.records import SpikeEvent, StepRecord
from ..runs.detail_request import request_text
from ..spikes import recovery as aftermath
from ..spikes.attribution import spike_cause
from ..spikes.episodes import Episode, episodes, largest
from ..spikes.signals import value_of
from ..spikes.suspect_history import GradientNormHistory
from ..spikes.suspects import ParameterAttribution
from ..step.plan import value_in

#: Steps shown before and after the one that is told of, and parameters, ranks and other spikes shown.
_BEFORE, _AFTER, _LAYERS, _RANKS, _OTHERS = 3, 4, 8, 8, 5
#: Later steps that are looked through for values of a signal that may be logged seldom.
_READ_ON = 1000
#: Whole-model values that are shown where they are known, besides what spiked and whatever has "loss" in its name.
_SIGNALS = ("grad_norm", "grad_norm_clipped", "update_norm", "spike_score")
_NAME_WIDTH, _WIDTH = 40, 11


class Source(Protocol):
    """What a story is made of: a :class:`torch_gradmon.analysis.run.Run`, or what a monitor remembers."""

    @property
    def steps(self) -> list[int]:
        """The steps that are known, ascending."""

    @property
    def events(self) -> list[SpikeEvent]:
        """What the detectors found, in order."""

    def context(self, step: int) -> Mapping[str, Any]:
        """Facts about a step."""

    def metrics(self, step: int) -> Mapping[str, float]:
        """Values of a step by key."""

    def value(self, signal: str, step: int) -> float | None:
        """The value of one key in a step, or of a whole-model value by its name; None where nothing is known of it."""

    def suspects(self, step: int) -> Sequence[ParameterAttribution]:
        """The parameters of a step in the order of suspicion; none where nothing is known of its gradients."""


class Recent:
    """What a monitor remembers of its last steps, as a source of stories.

    Args:
        records: the last records by step.
        gradients: statistics of the gradients of some of them.
        suspects: the parameters by suspicion, as they were at the time of a spike.
    """

    def __init__(
        self,
        records: Mapping[int, StepRecord],
        gradients: GradientNormHistory,
        suspects: Mapping[int, Sequence[ParameterAttribution]],
    ) -> None:
        self._records, self._gradients, self._suspects = dict(records), gradients, suspects

    @property
    def steps(self) -> list[int]:
        """The steps that are remembered, ascending."""
        return sorted(self._records)

    @property
    def events(self) -> list[SpikeEvent]:
        """What the detectors found in them, in order."""
        return [event for step in self.steps for event in self._records[step].events]

    def context(self, step: int) -> Mapping[str, Any]:
        """Facts about a step."""
        return {"applied": self._records[step].applied, **self._records[step].context}

    def metrics(self, step: int) -> Mapping[str, float]:
        """Values of a step by key."""
        return {format_key(key): value for key, value in self._records[step].values.items()}

    def value(self, signal: str, step: int) -> float | None:
        """The value of one key in a step, or of a whole-model value by its name; None where nothing is known of it."""
        key = parse_key(signal)
        found = value_of(signal, self._records[step], {})
        if found is None and not key.source:
            found = self._records[step].values.get(Key(SUMMARY, "", signal))
        return value_in(self._gradients.table(step), key) if found is None and key.source == self._gradients.source else found

    def suspects(self, step: int) -> Sequence[ParameterAttribution]:
        """The parameters of a step in the order of suspicion; none where its gradients are forgotten."""
        return self._suspects.get(step) or self._gradients.suspects(step)


def tell(source: Source, step: int | None = None) -> str:
    """The story of ``step``, by default of the worst step of the largest spike.

    Raises:
        ValueError: the step is not known, or there is no spike to tell of.
    """
    known = source.steps
    spikes = episodes(source.events, known)
    if step is None:
        if not spikes:
            span = (
                f"in the {len(known)} monitored steps from {known[0]} to {known[-1]}" if known else "since no step is known yet"
            )
            raise ValueError(f"there is no spike to tell of {span}; name a step to look at it all the same")
        step = largest(spikes, 1)[0].worst.step
    if step not in known:
        span = f"{len(known)} steps are known, from {known[0]} to {known[-1]}" if known else "none is"
        raise ValueError(f"step {step} is not known: {span}")
    spike = next((each for each in spikes if step in each.steps), None)
    events = [] if spike is None else [event for event in spike.events if event.step == step]
    around = known[max(0, known.index(step) - _BEFORE) : known.index(step) + _AFTER + 1]
    return "\n".join(
        [
            *_heading(source, step, events, spike),
            "",
            *_signals(source, step, around, events),
            "",
            *_layers(source.suspects(step), step, is_spike=bool(events)),
            *_after(source, known, spike),
            *_others(spikes, spike),
        ]
    )


def _heading(source: Source, step: int, events: Sequence[SpikeEvent], spike: Episode | None) -> Iterator[str]:
    context = dict(source.context(step))
    action, skipped, _ = context.pop("action", ""), context.pop("skipped", ""), context.pop("in_a_row", 0)
    unknown = skipped or "no detector called it a spike"  # on this rank
    yield from [f"step {step}: {event.reason}" for event in events] or [f"step {step}: {unknown}"]
    if spike is not None and len(spike.steps) > 1:
        worst = "" if step == spike.worst.step else f", the largest in step {spike.worst.step}"
        yield f"  one spike of {len(spike.steps)} steps in a row, {spike.first} to {spike.last}{worst}"
    applied = context.pop("applied", True)
    if action:
        yield f"  {action}"
    elif not applied:
        yield "  the step was not applied"
    if tuned := context.pop("tuned", None):
        yield f"  measured under a live change of detail (gradmon detail, number {tuned['number']}): {request_text(tuned)}"
    tags, norms = context.pop("tags", {}), context.pop("batch_norms", {})
    facts = {name: value for name, value in {**tags, **context}.items() if name not in ("time", "overhead_pct")}
    if facts:
        yield "  " + ", ".join(f"{name} {_fact(value)}" for name, value in facts.items())
    for rank, each in list(norms.items())[:_RANKS]:
        yield f"  norms of the micro-batches of rank {rank}: {', '.join(map(_number, each[:8]))}{', ...' if len(each) > 8 else ''}"
    if len(norms) > _RANKS:
        yield f"  ... and {len(norms) - _RANKS} more ranks"


def _fact(value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(map(_fact, value[:8]))
        return f"[{shown}{', ...' if len(value) > 8 else ''}]" if len(value) != 1 else _fact(value[0])
    return f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())[:80]


def _signals(source: Source, step: int, around: Sequence[int], events: Sequence[SpikeEvent]) -> Iterator[str]:
    values = {number: source.metrics(number) for number in around}
    keys = list(dict.fromkeys(key for number in around for key in values[number]))
    wanted = [event.signal for event in events]
    names = {key: key.removeprefix(f"{SUMMARY}/") for key in keys}
    shown = [
        key
        for key in keys
        if names[key] in (*wanted, *_SIGNALS) or key in wanted or ("loss" in key and not parse_key(key).source)
    ]
    heads = "".join(f"{f'[{number}]' if number == step else number:>{_WIDTH}}" for number in around)
    yield f"{'signal':<{_NAME_WIDTH}}{heads}"
    for name in ("lr", "amp_scale"):  # only where it moved: else the heading has it
        facts = [source.context(number).get(name) for number in around]
        facts = [fact[0] if isinstance(fact, list) and fact else fact for fact in facts]  # of several groups the first
        if any(fact != facts[0] for fact in facts):
            yield f"{name:<{_NAME_WIDTH}}" + "".join(f"{_fact(fact):>{_WIDTH}}" for fact in facts)
    for key in shown:
        row = "".join(f"{_number(values[number].get(key)):>{_WIDTH}}" for number in around)
        yield f"{_cut(names[key])}{row}"
    for signal in dict.fromkeys(wanted):
        if signal not in (*shown, *(names[key] for key in shown)):  # of one parameter, which was measured and not asked for
            row = "".join(f"{_number(source.value(signal, number)):>{_WIDTH}}" for number in around)
            yield f"{_cut(signal)}{row}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _cut(name: str) -> str:
    return f"{name if len(name) < _NAME_WIDTH else '…' + name[-_NAME_WIDTH + 2 :]:<{_NAME_WIDTH}}"


def _layers(suspects: Sequence[ParameterAttribution], step: int, is_spike: bool) -> Iterator[str]:
    if not suspects:
        yield "the gradients of this step are not known (a monitor remembers 64 steps, and 100 with a spike; a run directory all)"
        return
    titles = ("norm", "usual", "times", "score", "share", "since")
    yield f"{'parameter, by suspicion':<{_NAME_WIDTH}}" + "".join(f"{title:>{_WIDTH}}" for title in titles)
    for suspect in suspects[:_LAYERS]:
        usual = suspect.usual
        cells = (
            _number(suspect.norm),
            _number(usual),
            "-" if suspect.factor is None else factor_text(suspect.factor),
            "-" if suspect.score is None else f"{suspect.score:.1f}",
            "-" if suspect.share is None else f"{suspect.share:.1%}",
            "-" if suspect.since is None else "this step" if suspect.since == step else str(suspect.since),
        )
        yield _cut(suspect.name) + "".join(f"{cell:>{_WIDTH}}" for cell in cells)
    found = spike_cause(suspects, step)
    calm = sum(suspect.since is None and not suspect.nonfinite for suspect in suspects)
    known = (
        ""  # the words have it
        if is_spike and found.is_common
        else f"{calm} of {len(suspects)} as usual"
        if any(suspect.score is not None for suspect in suspects)
        else "too few steps before are known to say what is usual"
    )
    if (left := len(suspects) - _LAYERS) > 0:
        yield f"... and {left} more{'; ' * bool(known)}{known}"
    elif known:
        yield f"{len(suspects)} parameters, {known}"
    if is_spike and found.words:
        yield found.words


def _after(source: Source, known: Sequence[int], spike: Episode | None) -> Iterator[str]:
    """What became of each signal in the steps after the spike."""
    if spike is None:
        return
    later = known[known.index(spike.last) + 1 :]
    for signal in dict.fromkeys(event.signal for event in spike.events):
        own = [event for event in spike.events if event.signal == signal]
        after = ((number, source.value(signal, number)) for number in later[:_READ_ON])
        values = [*islice(((number, value) for number, value in after if value is not None), aftermath.AFTER)]
        if values:
            yield ""
            yield aftermath.recovery_text(own, values)


def _others(spikes: Sequence[Episode], spike: Episode | None) -> Iterator[str]:
    """Where else there are spikes, the largest ones."""
    others = [other for other in spikes if other is not spike]
    if others:
        shown = [other.when for other in largest(others, _OTHERS)]
        more = f" and {len(others) - len(shown)} smaller ones" if len(others) > len(shown) else ""
        yield ""
        yield f"other spikes: {', '.join(shown)}{more}"

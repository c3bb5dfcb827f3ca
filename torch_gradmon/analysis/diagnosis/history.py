"""The input of the rules: the records of a run, subsampled if there are many, as series and matrices."""

from __future__ import annotations

import math
import shlex
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal

import torch

from ...core import keys as n
from ...core.formatting import also_in
from ...core.keys import Key
from ...core.loop_mistakes import LoopFinding
from ...core.moments import Column
from ...core.records import Severity, SpikeEvent, StepRecord, is_loss_of_network, is_whole_loss, loss_among
from ...core.trainers import advice_for
from ...core.validation import subsample_steps
from ...runs.reader import RunReader
from ...spikes.attribution import ParameterAttribution
from ...spikes.signals import Episode, by_size, episodes
from ..spike_report import suspects
from .findings import Finding
from .series import GradientEdit, Matrix, Series, lower_median

# --- Whether the model learns, which most rules need before they report a problem ---

State = Literal["falls", "flat", "rises", "unknown"]
#: The fewest losses that have a trend.
_FEWEST = 20
#: The last fifth is compared with the first fifth, by ranks, and with the first few losses, for models that learn quickly.
_HEAD, _TAIL, _FIRST_LOSSES = 0.2, 0.2, 5
#: A shift counts from this many standard deviations of the rank sum; losses of neighbouring steps are not independent.
_RANKS = 3.0
#: The first few losses count from this many standard deviations of the last fifth,
_SPREADS = 6.0
#: and either comparison from this share of the loss at the beginning.
_SHARE = 0.01
#: The standard deviation over the median absolute deviation, for a normal distribution.
_OF_MAD = 1.4826
#: A trend that makes the deviation this many times as large is none.
_NO_TREND = 10.0
#: The fewest values from which a trend is subtracted, and the expectation of the deviation of fewer ones, over the standard deviation.
_WITH_TREND, _EXPECTED = 6, {3: 0.673, 4: 0.509, 5: 0.821}
#: For n of more values it is 1 - 3 / n with a trend and 1 - 2 / n without: the means of 200,000 normal samples, to 0.02 up to n = 100.
_LOST_WITH_TREND, _LOST_ALONE = 3.0, 2.0
#: Standard errors within which a difference of medians may lie, and the error of a median over that of a mean, the root of pi / 2.
_ERRORS, _OF_MEDIAN = 2.0, 1.2533
#: A loss below 0 has no bound if it falls no slower in the end than in the middle, by this part at least, and ends this many times as far
#: from 0 as it began; or, however it falls, this many times.
_NO_SLOWER, _AWAY, _FAR_AWAY = 0.8, 10.0, 1e4
#: The share that a loss has to fall, and the start of the later part, in which a loss that has not should still fall.
_THIRD, _LATER = 1 / 3, 0.3
#: Losses before they are compared with chance; the share of it that counts as learnt, and where another fault has to be.
_LONG, _LEARNT, _NEAR = 50, 0.03, 1.2
#: A loss below this share of chance has been learnt, however soon. One that begins above this share began with nothing learnt.
_KNOWN, _UNKNOWN = 0.1, 0.9
#: After as many losses a fall that stays as near to chance is far too little.
_VERY_LONG = 200
#: A fall of the ranks by this many standard deviations happens by chance in one of twenty cases: the loss may well fall.
PERHAPS = 1.645
#: By this many it does so in one of a hundred, which is proof enough for a loss that is below chance already.
_PROBABLY = 2.33


@dataclass(frozen=True)
class Learning:
    state: State  # unknown without enough losses
    first: float = math.nan  # the median loss at the beginning; NaN if unknown
    last: float = math.nan  # the median of the last fifth
    # it fell by a third at least, also from its first value if that is below the first few, or is negative, or ends far below chance; a
    # third below it is far if it began there
    has_fallen: bool = False
    # it neither has fallen nor still falls; False if that is unknown, and for a resumed run whose loss was flat all the time: there may be
    # nothing left to learn
    is_stuck: bool = False
    # it ends where the loss of the best constant answer lies, and does not fall in the second half of a short run
    is_at_chance: bool = False
    is_worse: bool = False  # it ends above that, however far it has fallen, and does not fall any more, or has had long enough


def learning(loss: Series, is_resumed: bool = False, chance: float = 0.0) -> Learning:
    """The trend of the finite losses; ``chance`` is the loss of the best constant answer, 0 if it is unknown."""
    finite = loss.finite
    state, first, last = trend(finite)
    if state == "unknown":
        return Learning("unknown")
    from_ = min(first, finite.values[0])
    has_fallen = state == "falls" and not 0 < from_ * (1 - _THIRD) < last
    has_fallen |= state != "rises" and last < (_KNOWN if finite.values[0] < _UNKNOWN * chance else 1 - _THIRD) * chance
    is_at_rest = is_resumed and state == "flat"
    is_at_chance = _is_at_chance(finite, chance)
    has_fallen &= not is_at_chance  # from far above it, perhaps
    is_stuck = not has_fallen and not is_at_rest and (is_at_chance or trend(finite.part(_LATER, 1.0))[0] != "falls")
    is_worse = len(finite) >= _LONG and last > _NEAR * chance > 0
    is_worse &= len(finite) >= _VERY_LONG or trend(finite.part(0.5, 1.0))[0] != "falls"
    return Learning(state, first, last, has_fallen, is_stuck, is_at_chance, is_worse)


def _is_at_chance(finite: Series, chance: float) -> bool:
    is_near = chance > 0 and len(finite) >= _LONG and 1 - _LEARNT < finite.part(1 - _TAIL, 1).median / chance < _NEAR
    before, after = finite.part(0.5, 0.75), finite.part(0.75, 1)
    shift = rank_shift(before.values, after.values)
    may_fall = shift < -PERHAPS and before.median - after.median > _SHARE * abs(before.median)
    may_fall |= shift < -_PROBABLY and after.median < chance  # from above it, it would fall by itself
    return is_near and (len(finite) >= _VERY_LONG or not may_fall)


def trend(finite: Series) -> tuple[State, float, float]:
    """The trend of the losses against their own noise, and the medians of the beginning and the end.

    The first and the last fifth are compared by their ranks (Mann and Whitney 1947, Ann. Math. Stat. 18, 50-60), a test that assumes
    nothing about the noise.
    """
    if len(finite) < _FEWEST:
        return "unknown", math.nan, math.nan
    few, head, tail = finite[:_FIRST_LOSSES], finite.part(0.0, _HEAD), finite.part(1 - _TAIL, 1.0)
    least = _SHARE * abs(few.median)
    fell = few.median - tail.median
    if fell > max(_SPREADS * spread(tail), least):
        return "falls", few.median, tail.median
    shift, change = rank_shift(head.values, tail.values), tail.median - head.median
    state: State = "flat"
    if abs(shift) > _RANKS and abs(change) > least:
        state = "falls" if shift < 0 else "rises"
    return state, head.median, tail.median


def falls_without_bound(loss: Series) -> bool:
    fifths = [loss.part(at / 5, (at + 1) / 5).median for at in range(5)]
    falls = [before - after for before, after in pairwise(fifths)]
    is_slower = min(falls) <= 0 or falls[-1] < _NO_SLOWER * max(falls[:-1])
    return -fifths[-1] > (_FAR_AWAY if is_slower else _AWAY) * max(abs(fifths[0]), abs(loss.values[0]))


def spread(part: Series) -> float:
    """The standard deviation of a part, from its median absolute deviation after subtracting a straight trend.

    A trend that makes the deviation far larger is none: in a short part a single value may be taken for one. From the shortest parts,
    whose values it would go through, none is subtracted. The deviation of few values is too small on average, so it is divided by
    its expectation for a normal distribution.
    """
    if len(part) < _WITH_TREND:
        return _OF_MAD * _deviation(part) / _EXPECTED.get(len(part), 1.0)
    values = part.values
    third = max(len(values) // 3, 1)
    rise = part[-third:].median - part[:third].median
    slope = rise / max(len(values) - third, 1)
    level = _deviation(Series(part.steps, tuple(value - slope * place for place, value in enumerate(values))))
    as_it_is = _deviation(part)
    count = len(values)
    is_none = 0 < _NO_TREND * as_it_is < level
    return _OF_MAD * (as_it_is / (1 - _LOST_ALONE / count) if is_none else level / (1 - _LOST_WITH_TREND / count))


def may_fall(before: Series, after: Series, least: float) -> bool:
    """Whether the losses are so noisy that the medians of two parts may differ by ``least``, though they do not show it."""
    noise = max(spread(before), spread(after))
    return before.median - after.median + _ERRORS * _OF_MEDIAN * noise * math.sqrt(1 / len(before) + 1 / len(after)) > least


def _deviation(part: Series) -> float:
    middle = part.median
    return lower_median(abs(value - middle) for value in part.finite.values)


def rank_shift(before: Sequence[float], after: Sequence[float]) -> float:
    """By how many standard deviations ``after`` ranks above ``before``; ties have the mean of their ranks."""
    count, other = len(after), len(before)
    below = sum((a > b) + 0.5 * (a == b) for a in after for b in before)
    return (below - count * other / 2) / math.sqrt(count * other * (count + other + 1) / 12)


# --- The input of the rules: the records of a run, subsampled if there are many, as series and matrices ---

#: Steps of a long run that are looked at: the first, the last, those around spikes, and evenly spaced ones.
MOST = 400
#: By how much the logged loss may differ from the one that goes backward, the first of several where a closure is called again.
_AGREES = 0.4
#: Where plugins keep what they found in the facts about a run.
_FINDINGS = ("audit", "replicas", "setup", "data", "foresight")
#: The relative difference of two numbers that are one, but for rounding.
_SAME = 1e-6
#: The noise of a loss that rests, relative to it.
_QUIET = 0.01
#: In words, with the values of which rules take those of the beginning.
_OF_BEGINNING = {n.PARAMETER: "parameters", n.ACTIVATION: "outputs of modules", n.GRADIENT_BEFORE_CLIP: "gradients"}
#: A matrix begins near zero if its gain is below this part of the usual one.
_NEAR_ZERO = 0.1
#: The facts about a run that have the name that they have here.
_OF_META = ("matrices", "kinds", "acts", "parameters", "trainer", "clip_bound")
#: The outputs that can be the loss of a model that computes its own.
_OWN_LOSS = (f"{n.ROOT}.loss", n.ROOT, f"{n.ROOT}[0]")


@dataclass(eq=False)
class History:
    """The records of a run, ascending by step, and what is known of its model, optimizers and loop."""

    records: Sequence[StepRecord]
    events: Sequence[SpikeEvent] = ()
    facts: Sequence[LoopFinding] = ()
    # parameters of two or more dimensions; their fan in, 0 if it is unknown
    matrices: Mapping[str, int] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    place: str = ""  # path of the run as in a command line; empty for a run without a directory
    recorded: Sequence[int] | None = None  # all recorded steps, ascending; None for those of the records
    # the parameters of a step, ranked by suspicion; empty if its gradients are unknown
    suspects: Callable[[int], Sequence[ParameterAttribution]] = lambda step: ()
    known_chance: Mapping[str, float] = field(default_factory=dict)  # the loss of the best constant answer, see Targets.chance
    groups: Sequence[Mapping[str, Any]] = ()
    frozen: frozenset[str] = frozenset()  # parameters that did not require a gradient when the optimizers were attached
    acts: bool = False  # the data depend on the model, as those of a policy or of a GAN do
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # all of the model, with their "shape" and "dtype"
    trainer: object = ""
    is_cut: bool = False  # the rest, whose parameters are NaN or infinite, was left out
    clip_bound: float | None = None  # the norm to which the trainer clips gradients, 0 if it does not; None if that is unknown
    raised: str = ""  # the exception that ended the training, as text; empty without

    def __post_init__(self) -> None:
        self.records = sorted(self.records, key=lambda record: record.step)
        self.events = self.events or [event for record in self.records for event in record.events]
        # a gain in the shape of a matrix, such as [channels, 1, 1], is none
        vectors = {name for name, about in self.parameters.items() if sum(size > 1 for size in about["shape"]) < 2}
        self.matrices = {name: fan_in for name, fan_in in self.matrices.items() if fan_in or name not in vectors}
        self.advice = advice_for(self.trainer)
        self._matrices: dict[tuple[str, str], Matrix] = {}

    @classmethod
    def of_run(cls, run: RunReader, most: int = MOST) -> History:
        events, meta = run.events, run.meta
        loss = loss_among(run.scalars)
        liked = [] if loss is None or len(run.steps) <= most else sorted(run.stored(loss))
        window = run.window(subsample_steps(run.steps, by_size(events), most, liked))
        return cls(
            [record._replace(tables=window.tables(step)) for step, record in window.records.items()],
            events,
            loop_findings(meta),
            place=shlex.quote(str(run.path)),
            recorded=run.steps,
            suspects=partial(suspects, run),
            known_chance=meta.get("chance", {}),
            groups=meta.get("optimizers", ()),
            frozen=frozenset(meta.get("frozen", ())),
            raised=meta.get("raised", "") if run.status.has_ended else "",
            **{name: meta[name] for name in _OF_META if name in meta},
        )

    def before_nonfinite(self) -> History:
        """The part before parameters become NaN or infinite and stay so; itself if they never do."""
        last = len(self.records)
        for record in reversed(self.records):
            table = record.tables.get(n.PARAMETER)
            if table is None or not bool(table.rows[:, Column.NONFINITE].any()):
                break
            last -= 1
        return self if last == len(self.records) else replace(self, records=self.records[:last], is_cut=True)

    @property
    def steps(self) -> list[int]:
        return [record.step for record in self.records]

    @property
    def span(self) -> tuple[int, int] | None:
        return (self.records[0].step, self.records[-1].step) if self.records else None

    @property
    def spikes(self) -> list[Episode]:
        """The finite spikes up to the last step that is looked at, ascending."""
        steps = self.steps if self.recorded is None else self.recorded
        last = self.steps[-1] if self.records else -math.inf
        return episodes([event for event in self.events if event.step <= last and math.isfinite(event.value)], steps)

    def series(self, name: str) -> Series:
        """A whole-model value by its name, such as ``grad_norm``, or a logged value by its key; empty without any."""
        return self._of_keys(Key(n.SUMMARY, "", name), Key("", name, ""))

    def _of_keys(self, *keys: Key) -> Series:
        return Series.of((record.step, record.values[key]) for record in self.records for key in keys if key in record.values)

    @cached_property
    def loss(self) -> Series:
        """The logged loss; otherwise the only number that the model returns, if its outputs were measured; empty without any."""
        if self._loss_key is not None:
            return self._of_keys(self._loss_key)
        outputs = self.matrix(n.ACTIVATION, "mean")
        returned = next((name for name in _OWN_LOSS if name in self.returned_numbers), None)
        return Series() if not outputs or returned is None else outputs.column(returned)

    @cached_property
    def _loss_key(self) -> Key | None:
        """By its name; else, of a single optimizer, the logged value that is the loss that went backward."""
        named = loss_among({key for record in self.records for key in record.values})
        known, step = self.known_chance.get("went backward", 0.0), self.known_chance.get("step")
        if named is not None or len({group.get("number") for group in self.groups}) > 1 or known % 1 == 0:
            return named  # a whole number may be that of the epoch as well
        values = next((record.values for record in self.records if record.step == step), {})
        return next((key for key, value in values.items() if not key.source and math.isclose(value, known, rel_tol=_SAME)), None)

    @property
    def the_loss(self) -> str:
        """How a sentence begins about it: by its name, unless it is the whole loss of the training."""
        key = self._loss_key
        return "The loss" if key is None or (is_whole_loss(key) and not is_loss_of_network(key)) else key.name

    @cached_property
    def chance(self) -> Mapping[str, float]:
        """As given, unless another loss is logged than the one that goes backward, such as a sum for a mean."""
        known, logged = self._went_backward
        return {} if abs(logged - known) > _AGREES * abs(known) else self.known_chance

    @property
    def backward_over_logged(self) -> float:
        """By what the loss that goes backward is larger than the logged one, as a sum is than a mean; 1 if that is unknown."""
        known, logged = self._went_backward
        return known / logged if known > (1 + _AGREES) * logged > 0 else 1.0

    @cached_property
    def _went_backward(self) -> tuple[float, float]:
        """The loss that went backward in a step, and the one that was logged; the same where one of them is unknown."""
        known, step = self.known_chance.get("went backward", 0.0), self.known_chance.get("step")
        logged = next((value for at, value in self.loss.pairs() if at == step), known)
        return (known, logged) if "went backward" in self.known_chance else (logged, logged)

    @cached_property
    def learning(self) -> Learning:
        """The trend of the loss. That of a model which gets other data when it is better need not fall."""
        found = learning(self.loss, self.may_rest, self.chance.get("loss", 0.0))
        return replace(found, is_stuck=False, is_at_chance=False, is_worse=False) if self.acts else found

    @cached_property
    def rates(self) -> list[float]:
        """The largest learning rate of each step; 0 if it is unknown."""
        return list(map(max, self.group_rates))

    @cached_property
    def group_rates(self) -> list[Sequence[float]]:
        """The learning rates of each step, by parameter group; a single 0 if they are unknown."""
        return [record.context.get("lr") or [0.0] for record in self.records]

    @cached_property
    def largest_rates(self) -> Series:
        return Series.of((record.step, float(max(rates))) for record in self.records if (rates := record.context.get("lr")))

    @property
    def rests_at_chance(self) -> bool:
        """Whether the loss has come down to that of a constant answer and stays there without noise: no rate is at fault."""
        tail = self.loss.finite.part(0.8, 1)
        return self.learning.is_at_chance and spread(tail) < _QUIET * abs(tail.median)

    @property
    def need_not_fall(self) -> bool:
        """Whether the loss means little: the model acts, or optimizers alternate, as in a GAN."""
        return self.acts or self.alternates

    @property
    def alternates(self) -> bool:
        """Whether optimizers take turns, as in a GAN, whose losses work against each other and rest when it is sound."""
        is_of_one = self._loss_key is not None and is_loss_of_network(self._loss_key)
        return is_of_one or sum("by_turns" in record.context for record in self.records) > len(self.records) / 2

    @property
    def alarm(self) -> Severity:
        """The severity of a loss that is no good, unless it need not fall."""
        return "info" if self.need_not_fall else "warning"

    @property
    def concern(self) -> Severity:
        """The severity of a problem that matters only if the model does not learn, which a loss that need not fall does not show."""
        return "warning" if (self.learning.is_stuck or self.learning.is_worse) and not self.need_not_fall else "info"

    @cached_property
    def _owners(self) -> dict[str, int]:
        """The number of the first optimizer of each parameter that any of them had when they were attached."""
        groups = reversed([*enumerate(self.groups)])
        return {name: group.get("number", place) for place, group in groups for name in group.get("parameters", ())}

    def is_unowned(self, name: str) -> bool:
        return bool(self._owners) and name not in self._owners

    def first_to_step(self, names: Sequence[str], record: StepRecord) -> list[str]:
        """Of these parameters those of the optimizer that stepped first, where several take turns in the step; else all of them."""
        turns = [self._owners.get(name, math.inf) if "by_turns" in record.context else 0 for name in names]
        return [name for name, turn in zip(names, turns, strict=True) if turn == min(turns)]

    @property
    def is_resumed(self) -> bool:
        """Whether the training began earlier: the first step is not 0, or its optimizers had stepped before."""
        # steps that are numbered by hand may begin at 1
        return bool(self.records) and (self.records[0].step > 1 or "goes_on" in self.records[0].context)

    @property
    def may_rest(self) -> bool:
        return self.misses_beginning(self.loss.finite.steps)

    def misses_beginning(self, steps: Sequence[int]) -> bool:
        """Whether more steps lie before the first of these than usually between two: the beginning of the training is missing."""
        gaps = sorted(later - step for step, later in pairwise(steps))
        return self.is_resumed or (bool(gaps) and steps[0] - self.records[0].step > gaps[len(gaps) // 2])

    def beginning(self, steps: Sequence[int]) -> int | None:
        """The place in ``steps`` with parameters that have not moved yet; None if training or measuring did not begin there."""
        place = bisect_right(steps, self._unmoved) - 1
        return place if place >= 0 else None

    def at_beginning(self, matrix: Matrix) -> dict[str, float]:
        """The values of :meth:`beginning` by name; empty if they are unknown."""
        place = self.beginning(matrix.steps)
        return {} if place is None else matrix.by_name(matrix.values[place])

    @cached_property
    def _unmoved(self) -> float:
        """The first applied step of the training, whose forward and backward still see what it began with."""
        if self.is_resumed or not self.records:
            return -math.inf
        last = self.records[0].step
        for record in self.records:
            if record.step > last + 1:  # what came between may have been applied
                break
            last = record.step
            if record.applied:
                break
        return last

    @property
    def beginning_unknown(self) -> str:
        """Why values of the beginning are unknown; empty if they are known, or were not measured at all."""
        if self.is_resumed:
            return f"the training began before step {self.records[0].step}, the first of this run"
        matrices = {words: self.matrix(source, "norm") for source, words in _OF_BEGINNING.items()}
        return "; ".join(
            f"{words} were first measured in step {matrix.steps[0]}"
            for words, matrix in matrices.items()
            if matrix and self.beginning(matrix.steps) is None
        )

    @cached_property
    def first_loss(self) -> float:
        place = self.beginning(self.loss.finite.steps)
        return math.nan if place is None else self.loss.finite.values[place]

    def applied(self, name: str) -> Series:
        not_applied = {record.step for record in self.records if not record.applied}
        return Series.of(pair for pair in self.series(name).pairs() if pair[0] not in not_applied)

    @cached_property
    def edit(self) -> GradientEdit:
        if self.series("clip_limit"):  # an adaptive clip, whose bound changes, scales nothing else
            return GradientEdit()
        kept = self.ratio(n.GRADIENT, n.GRADIENT_BEFORE_CLIP)
        return GradientEdit.of(self.series("grad_norm").finite, self.series("grad_norm_after_clip").finite, kept)

    def gradients(self, metric: str) -> Matrix:
        """What backward brings, if it is known: for comparisons of layers and for outliers, which a clip would hide."""
        return self.matrix(n.GRADIENT_BEFORE_CLIP, metric) or self.matrix(n.GRADIENT, metric)

    def used_gradients(self, metric: str) -> Matrix:
        """What the optimizer used, if it is known: for comparisons with what it made of them."""
        return self.matrix(n.GRADIENT, metric) or self.matrix(n.GRADIENT_BEFORE_CLIP, metric)

    def unclipped_norms(self) -> Matrix:
        """What a clip gets, for comparisons with the loss: the norms of :meth:`gradients`, times what the loop scales them by."""
        norms = self.gradients("norm")
        if not norms or not self.edit.scales or n.GRADIENT_BEFORE_CLIP not in {s for r in self.records for s in r.tables}:
            return norms
        scales = norms.values.new_tensor([self.edit.scales.get(step, 1.0) for step in norms.steps])
        return replace(norms, values=norms.values * scales[:, None])

    @property
    def unclipped_norm(self) -> Series:
        return self.edit.before_clip(self.series("grad_norm"))

    def is_gone(self, name: str) -> bool:
        """Whether the model no longer has a parameter of this name, as after it was pruned, parametrised or replaced."""
        return bool(self.parameters) and name not in self.parameters

    @cached_property
    def always_reached(self) -> frozenset[str]:
        """Parameters with a gradient, possibly zero, in nearly all steps; not those that were frozen on the way."""
        norms = self.gradients("norm")
        there = norms.by_name((~norms.values.isnan()).double().mean(0))
        return frozenset(name for name, share in there.items() if share > 0.9)

    def heads(self, source: str, over: str) -> dict[str, Series]:
        """The ``"min"``, ``"mean"`` or ``"max"`` over the heads of each attention module."""
        keys = {key for record in self.records for key in record.values if key.source == source and key.metric == over}
        return {key.name: self._of_keys(key) for key in sorted(keys)}

    def ratio(self, source: str, base: str) -> Matrix:
        """The norm of each parameter's tensor of ``source`` over that of ``base`` in the same step."""
        return self.matrix(source, "norm").over(self.matrix(base, "norm"))

    def settled(self, ratios: Matrix, behind: bool = False) -> Matrix:
        """``ratios`` to the norms of weights, without those of matrices that began near zero and have not yet grown to a tenth of the usual
        gain, the root mean square times the root of the fan in (of the usual one where it is unknown). The second matrix of an adapter
        begins so, and the last of a branch: beside zero each gradient and each update is large, which tells nothing of depth or rates.
        ``behind`` leaves out the other matrices of the branch too, since what goes back to them passes through the one near zero.
        """
        sizes = self.matrix(n.PARAMETER, "rms")
        names = [name for name in ratios.names if name in self.matrices]
        fans = [self.matrices[name] for name in names if self.matrices[name]]
        if not sizes or not fans:
            return ratios
        factors = torch.tensor([self.matrices[name] or lower_median(fans) for name in names], dtype=torch.float64, device="cpu")
        gains = sizes.of(sizes.steps, names).values * factors.sqrt()
        first = gains.isfinite().double().argmax(0)  # the first row with a value, for a matrix that came later too
        usual = gains.where(gains > 0, math.nan).nanquantile(0.5, 1, interpolation="higher")
        small = gains.gather(0, first[None])[0] < _NEAR_ZERO * usual[first]
        if bool(small.all()) or not bool(small.any()):
            return ratios
        grown = (gains >= _NEAR_ZERO * gains[:, ~small].nanmedian(1, keepdim=True).values).cummax(0).values | ~small
        if behind:
            for name, is_small in zip(names, small.tolist(), strict=True):
                branch = _branch(name, names) if is_small else []
                grown[:, branch] &= grown[:, names.index(name)][:, None]
        steps = set(ratios.steps)
        rows = [row for row, step in enumerate(sizes.steps) if step in steps]
        values, places = ratios.values.clone(), [ratios.names.index(name) for name in names]
        values[:, places] = values[:, places].where(grown[rows], math.nan)
        return replace(ratios, values=values)

    @cached_property
    def returned_numbers(self) -> frozenset[str]:
        """The outputs of the whole model that are one number, such as its loss; none if a module inside returns one too."""
        numbers = frozenset(name for name, size in self.sizes(n.ACTIVATION).items() if size == 1)
        return numbers if all(name.startswith(n.ROOT) for name in numbers) else frozenset()

    def matrix(self, source: str, metric: str) -> Matrix:
        """A built-in metric of all tensors of a source, of the steps that have it; empty if it was not measured."""
        if (source, metric) not in self._matrices:
            tables = [(record.step, record.tables[source]) for record in self.records if source in record.tables]
            self._matrices[source, metric] = Matrix.of_tables(tables, metric)
        return self._matrices[source, metric]

    def finding(
        self,
        rule: str,
        where: str | Sequence[str],
        evidence: Mapping[str, float],
        cause: str,
        advice: str,
        weight: float,
        severity: Severity | None = None,
        steps: Sequence[int] = (),
    ) -> list[Finding]:
        """A list of one, as rules return it: by default of the severity :attr:`concern`, and from the first to the last of all steps.

        Of several places, as in ``where``, the finding is in the first one, and its cause names others.
        """
        first, last = (steps[0], steps[-1]) if steps else (self.records[0].step, self.records[-1].step)
        places = [where] if isinstance(where, str) else where
        return [
            Finding(rule, severity or self.concern, places[0], (first, last), evidence, cause + also_in(places), advice, weight)
        ]

    def sizes(self, source: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for record in reversed(self.records):
            table = record.tables.get(source)
            if table is not None:
                counts = zip(table.names, table.rows[:, Column.COUNT].tolist(), strict=True)
                found.update((name, count) for name, count in counts if name not in found)
        return found


def loop_findings(meta: Mapping[str, Any]) -> list[LoopFinding]:
    return [LoopFinding.of_dict(fact) for source in _FINDINGS for fact in meta.get(source, [])]


def _branch(name: str, names: Sequence[str]) -> list[int]:
    """The places of the other matrices in the innermost module, below the whole model, that has any beside ``name``."""
    parts = name.split(".")
    for depth in reversed(range(1, len(parts))):
        inside = f"{'.'.join(parts[:depth])}."
        if found := [place for place, other in enumerate(names) if other != name and other.startswith(inside)]:
            return found
    return []


# --- Precautions ---

#: A warm-up starts below this share of the largest learning rate.
_BEGINS = 0.5


class Precautions:
    def __init__(self, history: History) -> None:
        records, rates = history.records, history.largest_rates
        # whether the limit of the clip follows the gradients
        self.adaptive = any(len(history.series(name)) for name in ("clip_limit", "clipped_parameters"))
        # the norm to which gradients are clipped; None if clipped steps have none in common
        self.bound = None if self.adaptive else history.edit.bound
        # whether a clip has made gradients smaller; one whose bound no norm reaches, or that is infinite, is none
        has_clipped = any(share > 0 for share in history.series("clip_fraction").values)
        self.clips = self.adaptive or self.bound is not None or has_clipped
        scales = [float(scale) for record in records if (scale := record.context.get("amp_scale")) is not None]
        self.scale = scales[-1] if scales else None
        # steps in which the learning rate rises from the start; 0 without a warm-up
        self.warm_up = 0
        if rates and rates.values[0] < _BEGINS * (largest := max(rates.values)):
            self.warm_up = rates.steps[rates.values.index(largest)] - (0 if history.is_resumed else rates.steps[0])
        # whether the learning rate ends above its value in the middle
        self.raises = bool(rates) and rates.values[-1] > rates.at(0.5)
        # number of parameter groups according to the learning rates; 1 if unknown
        self.groups = max((len(record.context.get("lr") or [0]) for record in records), default=1)
        self.skips = any(record.skipped for record in records)

    @property
    def warm_up_advice(self) -> str:
        """The end of a sentence that recommends a lower learning rate."""
        return f"; the warm-up of {self.warm_up} steps is too short" if self.warm_up else "; add a warm-up"

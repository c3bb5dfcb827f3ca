"""The largest spike: its step, its origin, and what the training does about such steps."""

from __future__ import annotations

from collections.abc import Sequence

from ....core.formatting import times
from ....core.keys import SUMMARY, TENSOR_SOURCES, parse_key
from ....core.moments import VIEWS
from ....core.records import Severity
from ....spikes.attribution import ParameterAttribution, SpikeCause, spike_cause
from ....spikes.signals import Episode, largest, size
from ..findings import UNDONE, Finding
from ..history import History
from ..learning import rank_shift, trend
from ..precautions import Precautions
from ..series import Series, lower_median
from .depth import RECURRENT

#: A spike is grave from this many times the usual, if it is as far above all but this share of the other steps, and above the
#: median of this many later steps. A value that returns often is usual, and one that stays is a new level.
_GRAVE, _RARE, _AFTER = 10.0, 0.2, 20
#: A share of the largest spike's size that others reach where spikes are a habit; never of one this many times the usual.
_NEARLY, _HUGE = 0.25, 100.0
#: It is also this many times that of the first steps: norms jump where the loss is near zero.
_ABOVE = 2.0
#: What is usual is nothing below this share of the first values; any batch with a loss is far above it.
_NOTHING = 1e-9
#: A layer with a larger share of the squared norm is alone in it.
_ALONE = 0.9
#: The first losses, and by how many standard deviations of their ranks those after a spike lie above those before.
_FIRST, _RANKS = 5, 3.0
#: The loss of a bad batch is this many times that of the next one.
_LOUD = 2.0
#: Norms before and after a clip that does not act differ by no more than this part.
_ROUNDING = 1e-3
#: A learning rate jumped if it was this many times the usual one, at most this many steps before a spike.
_LEAP, _BEFORE = 2.0, 5


def check_spikes(history: History) -> list[Finding]:
    """One finding, about the largest spike."""
    found = history.spikes
    if not found:
        return []
    (spike,) = largest(found, 1)
    event = spike.worst
    suspects = history.suspects(event.step)
    losses = dict(zip(history.loss.steps, history.loss.values, strict=True))
    made = spike_cause(suspects, event.step, losses.get(event.step), bool(losses))
    far = f", {times(event.value / event.usual)} what was usual" if event.usual is not None and event.usual > 0 else ""
    when = f" in step {event.step}" if spike.first != spike.last else ""
    others = len(found) - 1
    more = "" if not others else f" There {'was 1 other spike' if others == 1 else f'were {others} other spikes'}, none larger."
    words = f"; {made.words}" if made.words else ""
    undone, evidence = _undone(history, spike) or ("", {})
    return history.finding(
        "spike",
        made.layer,
        {event.signal: event.value, **({} if event.usual is None else {"usual": event.usual}), "score": event.score, **evidence},
        f"{event.signal} was {event.value:.4g}{when}{far}{words}.{undone}{more}",
        _advice(history, spike, made, suspects),
        128.0 if undone else 15.0,
        severity="warning" if undone else _severity(history, spike, made),
        steps=(spike.first, spike.last),
    )


def _undone(history: History, spike: Episode) -> tuple[str, dict[str, float]] | None:
    """A sentence and the loss after it, if the steps after the only grave spike have lost half of the progress before it."""
    loss = history.loss.finite
    earlier = loss.before(spike.first)
    until, before, after = len(earlier), earlier.values[-_AFTER:], loss.since(spike.last + 1).values[:_AFTER]
    if min(len(before), len(after)) < _AFTER or not _applied(history, spike.worst.step):
        return None
    if sum(size(other.worst) >= _GRAVE for other in history.spikes) != 1 or size(spike.worst) < _GRAVE:
        return None
    first, was, now = (lower_median(values) for values in (loss.values[:_FIRST], before, after))
    if not (trend(earlier)[0] == "falls" and now > was + (first - was) / 2 and rank_shift(before, after) > _RANKS):
        return None
    if not loss.values[until] > _LOUD * loss.values[until + 1]:  # other data from here on, as in a curriculum
        return None
    told = f" It undid what was learnt: the loss, {first:.3g} at first, was {was:.3g} before it and {now:.3g} after it."
    return told, {UNDONE: now}


def _rate_jump(history: History, step: int) -> str:
    """What the learning rate did shortly before, if it jumped."""
    rates = [(record.step, max(lr)) for record in history.records if record.step <= step and (lr := record.context.get("lr"))]
    at, highest = max(rates[-_BEFORE:], key=lambda rate: rate[1], default=(step, 0.0))
    usual = lower_median(rate for _, rate in rates[:-_BEFORE][-_AFTER:])
    return (
        f"; the learning rate was {highest:.3g} in step {at}, {times(highest / usual)} the usual"
        if highest > _LEAP * usual > 0
        else ""
    )


def _severity(history: History, spike: Episode, made: SpikeCause) -> Severity:
    event = spike.worst
    if size(event) < _GRAVE or not _applied(history, event.step) or _recurs(history, spike):
        return "info"
    values = _values(history, event.signal)
    if event.usual is not None and event.usual < _NOTHING * values.part(0, 0.1).median:  # the loss is at zero
        return "info"
    others = sorted(value for step, value in zip(values.steps, values.values, strict=True) if step not in spike.steps)
    if others:
        after = values.since(spike.last + 1).values[:_AFTER]
        level = max(others[int((1 - _RARE) * (len(others) - 1))], lower_median(after) if after else 0.0)
        if event.value < max(_GRAVE * level, _ABOVE * values.part(0, 0.1).median):
            return "info"
    # a clip scales a loud batch to the usual norm; if one layer alone is loud, it leaves nothing of the others
    return "info" if made.is_common and _bounded(history, spike) is not None else "warning"


def _recurs(history: History, spike: Episode) -> bool:
    """Whether spikes of this size are a habit of the loss, and none is huge: two more are nearly as large, or the data change with what is
    trained, so that a loss which was low comes back, as that of a discriminator does when the generator has moved.
    """
    like_it = [other for other in history.spikes if other != spike and size(other.worst) > _NEARLY * size(spike.worst)]
    return size(spike.worst) < _HUGE and (history.need_not_fall or len(like_it) > 1)


def _values(history: History, signal: str) -> Series:
    """The finite values of a signal in applied steps; empty if it is unknown."""
    key = parse_key(signal)
    if key.source not in TENSOR_SOURCES:
        return history.applied(signal.removeprefix(f"{SUMMARY}/")).finite
    matrix = history.matrix(key.source, key.metric) if key.metric in VIEWS else None
    return Series() if matrix is None or key.name not in matrix.names else matrix.column(key.name).finite


def _applied(history: History, step: int) -> bool:
    return all(record.applied for record in history.records if record.step == step)


def _bounded(history: History, spike: Episode) -> float | None:
    """The norm to which the worst step was clipped; None if it was not."""
    before, after = (_at(series, spike.worst.step) for series in (history.unclipped_norm, history.series("grad_norm_clipped")))
    return after if before is not None and after is not None and after < (1 - _ROUNDING) * before else None


def _at(series: Series, step: int) -> float | None:
    return series.values[series.steps.index(step)] if step in series.steps else None


def _advice(history: History, spike: Episode, made: SpikeCause, suspects: Sequence[ParameterAttribution]) -> str:
    """What to look at, then what the run does not do yet."""
    step, run, bound = spike.worst.step, Precautions.of(history), _bounded(history, spike)
    report = f"'gradmon why {history.place} --step {step}'" if history.place else f"monitor.why({step})"
    what = "the batch and the loss" if made.is_common else "the batch"
    when = "this step" if spike.first == spike.last else f"step {step}"
    look = f"Look at {what} of {when}, and at {report}{_rate_jump(history, spike.first)}"
    skip = "on_spike='skip' leaves such steps out"
    if not _applied(history, step):
        return f"{look}. The step was not applied, so it changed nothing."
    if run.skips:
        return f"{look}. Other spikes were skipped, and this step was applied."
    if bound is not None:
        alone = any(suspect.name == made.layer and (suspect.share or 0.0) > _ALONE for suspect in suspects)
        left = f", which left almost nothing of the layers other than {made.layer}" if alone else ""
        return f"{look}. The clip reduced the norm of this step to {bound:.3g}{left}; {skip}."
    if run.clips:
        limit = f", which acts from {run.bound:.3g} on," if run.bound is not None else ""
        return f"{look}. The clip{limit} let it pass; a lower bound reduces such steps, and {skip}."
    if any(kind.removesuffix("Cell") in RECURRENT for kind in history.kinds.values()):
        recurs = "The gradient of a recurrence is a product over its time steps, so such steps come again"
        return f"{look}. {recurs}: clip_grad_norm_ bounds them, and an orthogonal or a gated recurrence has fewer; {skip}."
    return f"{look}; {skip}, and clip_grad_norm_ bounds them."

"""A loss that does not fall, that stops falling because nothing moves any more, or that diverges."""

from __future__ import annotations

from itertools import pairwise

from ..findings import Finding, NotMeasured
from ..history import History
from ..learning import PERHAPS, falls_without_bound, may_fall, rank_shift, spread
from ..precautions import Precautions
from ..series import Series

#: The last fifth of the losses lies above the best fifth or tenth by this factor, by this many standard deviations of its ranks,
#: and by this many of its noise.
_ABOVE, _RANKS, _SPREADS = 1.25, 3.0, 6.0
#: A loss that ends this many times above its beginning diverges, whatever its noise,
_FAR_ABOVE = 2.0
#: and so does one that ends this many times above its best.
_LOST = 8.0
#: A loss that loses this share of its fall again diverges, too.
_AGAIN = 0.25
#: The fewest rates that have a course.
_MANY_RATES = 20
#: A rate that never fell, and ends this many times above the middle of the run.
_RAISED = 1.5
#: The plateau of a loss with more noise relative to its level means nothing, as with a policy gradient.
_NOISE = 0.5
#: A learning rate that ends at its largest value, this many times the usual one, is still warming up.
_UP = 1.5
#: A loss that may well fall is no plateau, unless it fell by less than this share of it, in this many losses: far too little. In fewer
#: losses the share is as much smaller.
_LITTLE, _MANY = 0.05, 200
#: A loss whose last fifth lies below this part of its first one has fallen; one of a kind that is not recognised, which may have a floor,
#: from this part of its beginning on.
_RESTS, _FELL = 2 / 3, 0.85
#: A loss that rises, and ends below this share of chance, has hardly forgotten anything.
_HARDLY = 0.2
_NEED_NOT_FALL = (
    "Nothing, if this is the loss of one network that another one works against, or the data depend on the model: then judge by what the "
    "model makes. Otherwise: "
)
#: The fewest losses in a part that can rank three standard deviations apart.
_RANKED = 7
#: The fewest learning rates that show a warm-up.
_FEWEST_RATES = 7
#: A loss that still falls after this share of the run, and rests later, may have learnt all there is.
_BEGINNING = 0.1


def check_loss(history: History) -> list[Finding]:
    """Divergence first; a loss that rises is not reported as a plateau too."""
    loss = history.loss
    if loss and history.learning.state == "unknown":
        raise NotMeasured(
            f"the loss is known and finite in {len(loss.finite)} steps of {len(history.records)}, and has to be in twenty"
        )
    if history.learning.state == "unknown":
        raise NotMeasured(f"{history.advice.loss}, twenty steps of it at least")
    rules = _unbounded, _raised, _divergence, _at_chance, _plateau
    return next((found for rule in rules if (found := rule(history, loss.finite))), [])


def _at_chance(history: History, loss: Series) -> list[Finding]:
    """A loss that ends where that of the best constant answer lies."""
    chance, tail = history.chance.get("loss", 0.0), loss.part(0.8, 1)
    if not history.learning.is_at_chance or _is_warming_up(history):
        return []
    what = "the mean square around the targets' mean" if history.chance.get("is square") else "the entropy of the labels"
    return history.finding(
        "loss-at-chance",
        "",
        {"loss at the end": tail.median, "of a constant answer": chance, "examples seen": history.chance["examples"]},
        f"{history.the_loss} ends where that of a model lies which gives all inputs the same answer, {what}: little "
        "or nothing is learnt about the targets.",
        "Check that inputs and targets belong together, that no mask or reshape mixes examples, and that the loss depends on the inputs. "
        "Overfit one batch, then try another learning rate. If the targets are mostly noise, this may be all there is to learn.",
        62.0,
        severity="info" if history.is_resumed or _is_unclear(loss, loss.part(0.5, 0.75), loss.part(0.75, 1)) else "warning",
        steps=(loss.steps[0], loss.steps[-1]),
    )


def _unbounded(history: History, loss: Series) -> list[Finding]:
    """A loss that falls below 0, faster and faster."""
    if not falls_without_bound(loss):
        return []
    return history.finding(
        "loss-divergence",
        "",
        {
            f"loss {when}": loss.part(at, at + 0.2).median
            for when, at in (("at the beginning", 0.0), ("in the middle", 0.4), ("at the end", 0.8))
        },
        f"{history.the_loss} falls below 0, and ever faster: nothing bounds it.",
        "Look at the sign of each term, at a penalty that is subtracted, and at a loss that takes logarithms of probabilities.",
        86.0,
        severity="info" if history.need_not_fall else "warning",
        steps=(loss.steps[0], loss.steps[-1]),
    )


def _raised(history: History, loss: Series) -> list[Finding]:
    """A loss that has turned while the learning rate still rises."""
    if (best := _best_before_the_rate_rose(history, loss)) is None:
        return []
    return history.finding(
        "loss-divergence",
        "",
        {"learning rate": max(history.rates), "loss at its best": best.median, "at the end": loss.part(0.8, 1).median},
        f"{history.the_loss} has stopped falling, and the learning rate still rises.",
        "End the warm-up, or end the schedule that raises it, about where the loss was at its best.",
        86.0,
        severity="warning",
        steps=(best.steps[-1], history.steps[-1]),
    )


def _best_before_the_rate_rose(history: History, loss: Series) -> Series | None:
    """The best fifth of the losses, if these have risen since then with a rate that never fell."""
    rates = [max(rates) for record in history.records if (rates := record.context.get("lr"))]
    if len(rates) < _MANY_RATES or history.need_not_fall or history.learning.state == "unknown":
        return None
    if any(later < rate for rate, later in pairwise(rates)) or not rates[-1] > _RAISED * rates[len(rates) // 2] > 0:
        return None
    best, tail = _best(loss, 5), loss.part(0.8, 1)
    return best if tail.median > _ABOVE * best.median > 0 and rank_shift(best.values, tail.values) > _RANKS else None


def _divergence(history: History, loss: Series) -> list[Finding]:
    tail, first = loss.part(0.8, 1), Series(loss.steps[:5], loss.values[:5]).median
    fifth, tenth = _best(loss, 5), _best(loss, 10)
    # for example, a wrong sign makes the loss rise at once and then rest
    rose = tail.median - first > max((_ABOVE - 1) * first, _SPREADS * spread(tail)) and first > 0
    best = next((part for part in (fifth, tenth) if _is_above(tail, part) and tail.median > _forgotten(first, part)), None)
    if best is None and not rose:
        return []
    best, is_back = best or fifth, tail.median <= first
    is_far = tail.median > _FAR_ABOVE * first or tail.median > _LOST * best.median > 0
    is_lost = is_far or is_back or (_is_steady(loss) and not tail.median < _HARDLY * history.chance.get("loss", 0.0))
    return history.finding(
        "loss-divergence",
        "",
        {"loss at the beginning": first, "at its best": best.median, "at the end": tail.median},
        f"{history.the_loss} rises again, and loses a good part of its fall."
        if is_back
        else f"{history.the_loss} rises, and ends above where it began.",
        f"{_NEED_NOT_FALL if history.need_not_fall else ''}Lower the learning rate"
        f"{', or end the schedule that raises it' if Precautions.of(history).raises else ''}; look at the sign of the loss and of each "
        "penalty, and for maximize=True.",
        75.5,
        severity="warning" if not history.need_not_fall and is_lost else "info",
        steps=(best.steps[-1], tail.steps[-1]),
    )


def _forgotten(first: float, best: Series) -> float:
    """What a loss ends above if it has lost a good part of its fall."""
    return best.median + _AGAIN * max(first - best.median, 0.0)


def _best(loss: Series, parts: int) -> Series:
    """The part with the lowest level, among equal ones before the last fifth."""
    return min((loss.part(at / parts, (at + 1) / parts) for at in range(parts - parts // 5)), key=lambda part: part.median)


def _is_above(tail: Series, best: Series) -> bool:
    """Whether the last losses lie above the best ones, beyond their noise."""
    least = max(_ABOVE * best.median, best.median + 2 * min(spread(best), spread(tail)))
    return tail.median > least and rank_shift(best.values, tail.values) > _RANKS and best.median > 0


def _plateau(history: History, loss: Series) -> list[Finding]:
    is_flat = history.learning.state in ("flat", "rises") or history.learning.is_stuck
    if history.alternates or not is_flat:
        return []
    head, tail = loss.part(0, 0.2), loss.part(0.8, 1)
    shift = rank_shift(head.values, tail.values) if tail.median < head.median else 0.0
    is_little = len(loss) >= _MANY and head.median - tail.median < _LITTLE * abs(head.median)
    is_open = history.learning.state == "flat" and (_is_unclear(loss, head, tail) or (shift < -PERHAPS and not is_little))
    is_open |= _is_warming_up(history)
    at_rest = history.may_rest and history.learning.state == "flat"
    fell, has_rested = history.learning.state == "falls", tail.median < _RESTS * head.median
    later = loss.part(_BEGINNING, 1)
    is_open |= (
        fell and not history.chance.get("loss") and tail.median < _FELL * max(loss.values[0], head.median)
    )  # of an unusual loss
    begins, ends = later.part(0, 0.2), later.part(0.8, 1)
    is_open |= fell and (_is_unclear(loss, begins, ends) or rank_shift(begins.values, ends.values) < -PERHAPS)
    return history.finding(
        "loss-plateau",
        "",
        {"loss at the beginning": head.median, "at the end": tail.median, "its noise": spread(tail)},
        _cause(history.the_loss, fell, has_rested, is_open, at_rest),
        "If nothing else is found, check that inputs and targets belong together and that the loss depends on the model. "
        "Overfit one batch, then try another learning rate.",
        20.0,
        severity="warning" if not (history.need_not_fall or is_open or at_rest) and _is_steady(loss) else "info",
        steps=(loss.steps[0], loss.steps[-1]),
    )


def _is_unclear(loss: Series, before: Series, after: Series) -> bool:
    """Whether the losses are so few and noisy that the fall of a sound training may hide between these parts."""
    if len(before) < _RANKED:
        return True
    return len(loss) < _MANY and may_fall(before, after, _LITTLE * len(loss) / _MANY * abs(before.median))


def _cause(the_loss: str, fell: bool, has_rested: bool, is_open: bool, at_rest: bool) -> str:
    if has_rested:
        return f"{the_loss} fell at the beginning, and rests since then."
    if fell:
        return f"{the_loss} fell by less than a third, and does not fall any more."
    noise = ", as far as its noise and the few steps show" if is_open else ""
    rest = "; the training began earlier, and may have converged" if at_rest else ""
    return f"{the_loss} does not fall{noise}{rest}."


def _is_steady(loss: Series) -> bool:
    """Whether the loss has a level: it is positive, with less noise than that."""
    tail = loss.part(0.8, 1)
    return min(loss.values) >= 0 and spread(tail) < _NOISE * abs(tail.median)


def _is_warming_up(history: History) -> bool:
    """Whether the learning rate still rises."""
    rates = history.rates
    usual = sorted(rates)[len(rates) // 2] if rates else 0.0
    return len(rates) >= _FEWEST_RATES and rates[-1] == max(rates) > _UP * usual

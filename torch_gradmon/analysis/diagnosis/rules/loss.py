"""A loss that stays where it began, that stops falling because nothing moves any more, or that leaves for good."""

from __future__ import annotations

from ..findings import Finding, Unseen
from ..history import History
from ..learning import rank_shift, spread
from ..precautions import Precautions
from ..series import Series

#: The last fifth of the losses lies above the best fifth, or tenth, by that factor, and by so many standard deviations of its ranks.
_ABOVE, _RANKS, _SPREADS = 1.25, 3.0, 6.0
#: A loss that ends so many times above where it began diverges, whatever its noise.
_FAR_ABOVE = 2.0
#: and so does one that loses that much of what it had come to.
_LOST = 8.0
#: A rate that is so small a part of the largest one moves nothing any more; over such a share of the run that is too early.
_SPENT, _TOO_EARLY = 1e-3, 0.3
#: A loss whose noise is more than that of its level tells nothing by staying where it is, as with a policy's gradient.
_NOISE = 0.5
#: A learning rate that is at its largest in the end, and so many times the usual one, has yet to arrive.
_UP = 1.5
#: Where the ranks fall by so many standard deviations, which chance does in one of twenty cases, the loss may well fall.
_PERHAPS = 1.645
#: Fewer losses in a fifth cannot rank three standard deviations apart, however far they are.
_TELLING = 7
#: One that falls behind that part of the run, and rests later, may have learnt what there was to learn.
_BEGINNING = 0.1


def losses(history: History) -> list[Finding]:
    """Divergence first; a loss that rises is not called a plateau too."""
    loss = history.loss
    if history.learning.state == "unknown":
        raise Unseen('log the loss with monitor.log_scalar("loss", loss), twenty steps of it at least')
    return _divergence(history, loss.finite) or _plateau(history, loss.finite)


def _divergence(history: History, loss: Series) -> list[Finding]:
    tail, first = loss.part(0.8, 1), Series(loss.steps[:5], loss.values[:5]).median
    fifth, tenth = (min((loss.part(at / of, (at + 1) / of) for at in range(of - of // 5)), key=_level) for of in (5, 10))
    # a policy that goes the wrong way, say, rises at once and then rests
    rose = tail.median - first > max((_ABOVE - 1) * first, _SPREADS * spread(tail)) and first > 0
    best = next((part for part in (fifth, tenth) if _is_above(tail, part) and tail.median > first), None)
    if best is None and not rose:
        return []
    best = best or fifth
    is_far = tail.median > _FAR_ABOVE * first or tail.median > _LOST * best.median > 0
    return [
        Finding(
            "loss-divergence",
            "warning" if not _plays(history) and (_is_steady(loss) or is_far) else "info",
            "",
            (best.steps[-1], tail.steps[-1]),
            {"loss at the beginning": first, "at its best": best.median, "at the end": tail.median},
            "The loss rises, and ends above where it began.",
            f"Lower the learning rate{', or end the schedule that raises it' if Precautions.of(history).raises else ''}; look at the sign "
            "of the loss and of each penalty, and for maximize=True.",
            75.5,
        )
    ]


def _level(part: Series) -> float:
    return part.median


def _is_above(tail: Series, best: Series) -> bool:
    """Whether the last losses lie above the best ones, beyond their noise."""
    least = max(_ABOVE * best.median, best.median + 2 * min(spread(best), spread(tail)))
    return tail.median > least and rank_shift(best.values, tail.values) > _RANKS and best.median > 0


def _plateau(history: History, loss: Series) -> list[Finding]:
    if (since := _rate_ran_out(history)) is not None:
        return [
            Finding(
                "loss-plateau",
                "warning",
                "",
                (since, loss.steps[-1]),
                {"loss then": loss.since(since).part(0, 0.2).median, "loss at the end": loss.part(0.8, 1).median},
                "The learning rate has fallen to less than a thousandth of its largest "
                "value long before the end, and nothing moves any more.",
                "Step the schedule less often, once for each epoch if it was made for epochs, or let it end higher.",
                30.0,
            )
        ]
    if history.learning.state not in ("flat", "rises") and not history.learning.is_stuck:
        return []
    head, tail = loss.part(0, 0.2), loss.part(0.8, 1)
    shift = rank_shift(head.values, tail.values) if tail.median < head.median else 0.0
    is_open = history.learning.state == "flat" and (len(head) < _TELLING or shift < -_PERHAPS)
    is_open |= _warms_up(history)
    at_rest = history.goes_on and history.learning.state == "flat"
    fell = history.learning.state == "falls"
    later = loss.part(_BEGINNING, 1)
    is_open |= fell and rank_shift(later.part(0, 0.2).values, later.part(0.8, 1).values) < -_PERHAPS
    return [
        Finding(
            "loss-plateau",
            "warning" if not (_plays(history) or is_open or at_rest) and _is_steady(loss) else "info",
            "",
            (loss.steps[0], loss.steps[-1]),
            {"loss at the beginning": head.median, "at the end": tail.median, "its noise": spread(tail)},
            "The loss fell by less than a third, and does not fall any more." if fell else _words(is_open, at_rest),
            "If nothing else is found: check that inputs and targets belong together and that the loss depends on the model, overfit one "
            "batch, then try another learning rate.",
            20.0,
        )
    ]


def _words(is_open: bool, at_rest: bool) -> str:
    noise = ", as far as its noise and so few steps let that be told" if is_open else ""
    rest = "; the training did not begin here, and may have come to its end" if at_rest else ""
    return f"The loss does not fall{noise}{rest}."


def _is_steady(loss: Series) -> bool:
    """Whether it is a loss that has a level: positive, and with less noise than that."""
    tail = loss.part(0.8, 1)
    return min(loss.values) >= 0 and spread(tail) < _NOISE * abs(tail.median)


def _rate_ran_out(history: History) -> int | None:
    """From which step on all learning rates were next to nothing, if that is a large part of the run."""
    rates = list(zip(history.steps, _rates(history), strict=True))
    largest = max((rate for _, rate in rates), default=0.0)
    spent = [step for step, rate in rates if rate < _SPENT * largest]
    at_the_end = [step for step in spent if step > max((s for s, rate in rates if rate >= _SPENT * largest), default=-1)]
    return at_the_end[0] if len(at_the_end) > _TOO_EARLY * len(rates) else None


def _rates(history: History) -> list[float]:
    """The largest learning rate of each step; 0 where none is known."""
    return [max(record.context.get("lr") or [0.0]) for record in history.records]


def _plays(history: History) -> bool:
    """Whether optimizers step by turns, as where two models play against each other and neither loss has to fall."""
    return sum("by_turns" in record.context for record in history.records) > len(history.records) / 2


def _warms_up(history: History) -> bool:
    """Whether the learning rate is still on its way up."""
    rates = _rates(history)
    usual = sorted(rates)[len(rates) // 2] if rates else 0.0
    return len(rates) >= _TELLING and rates[-1] == max(rates) > _UP * usual

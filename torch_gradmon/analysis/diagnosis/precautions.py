"""What a training already does: clip, scale its loss, warm up, skip spikes. Advice must not recommend it again."""

from __future__ import annotations

from dataclasses import dataclass

from .history import History
from .series import Series

#: A warm-up starts below this share of the largest learning rate.
_BEGINS = 0.5


@dataclass(frozen=True)
class Precautions:
    """What the training already does.

    Attributes:
        clips: whether a clip has made gradients smaller; one whose bound no norm reaches, or that is infinite, is none.
        bound: the norm to which they are clipped; None if clipped steps have none in common.
        adaptive: whether the limit of the clip follows the gradients.
        scale: last scale of a GradScaler; None without one.
        warm_up: steps in which the learning rate rises from the start; 0 without a warm-up.
        raises: whether the learning rate ends above its value in the middle.
        groups: number of parameter groups according to the learning rates; 1 if unknown.
        skips: whether steps were skipped because of a spike.
    """

    clips: bool
    bound: float | None
    adaptive: bool
    scale: float | None
    warm_up: int
    raises: bool
    groups: int
    skips: bool

    @classmethod
    def of(cls, history: History) -> Precautions:
        """Those of a run, from its records."""
        rates = _rates(history)
        scales = [scale for record in history.records if (scale := record.context.get("amp_scale")) is not None]
        adaptive = any(len(history.series(name)) for name in ("clip_limit", "clipped_parameters"))
        bound = None if adaptive else history.edit.bound
        shares = history.series("clipped_share")
        return cls(
            clips=adaptive or bound is not None or any(share > 0 for share in shares.values),
            bound=bound,
            adaptive=adaptive,
            scale=float(scales[-1]) if scales else None,
            warm_up=_warm_up(rates, history.is_resumed),
            raises=bool(rates) and rates.values[-1] > rates.at(0.5),
            groups=max((len(record.context.get("lr") or [0]) for record in history.records), default=1),
            skips=any(record.skipped for record in history.records),
        )

    @property
    def warm_up_advice(self) -> str:
        """The end of a sentence that recommends a lower learning rate."""
        return f"; the warm-up of {self.warm_up} steps is too short" if self.warm_up else "; add a warm-up"


def _rates(history: History) -> Series:
    """The largest learning rate of each step that has one."""
    return Series.of((record.step, float(max(rates))) for record in history.records if (rates := record.context.get("lr")))


def _warm_up(rates: Series, is_resumed: bool) -> int:
    if not rates:
        return 0
    largest, first = max(rates.values), 0 if is_resumed else rates.steps[0]
    return rates.steps[rates.values.index(largest)] - first if rates.values[0] < _BEGINS * largest else 0

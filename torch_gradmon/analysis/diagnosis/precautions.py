"""What a training does already: it clips, scales its loss, warms up, skips spikes. Advice is to name nothing that is there."""

from __future__ import annotations

from dataclasses import dataclass

from .history import History
from .series import Series, clip_bound

#: A warm-up begins below that part of the largest learning rate.
_BEGINS = 0.5


@dataclass(frozen=True)
class Precautions:
    """What is there.

    Attributes:
        clips: whether the loop clips gradients, or changes them otherwise, between backward and step.
        bound: to what norm they are clipped; None where clipped steps have none in common.
        adaptive: whether a limit that follows the gradients clips them.
        scale: the last scale of a GradScaler; None without one.
        warm_up: steps in which the learning rate rises from the start; 0 where it does not.
        raises: whether the learning rate ends above where it was in the middle.
        groups: parameter groups, as far as learning rates tell; 1 where nothing is known.
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
        """Those of a run, as its records have them."""
        after = history.series("grad_norm_clipped")
        rates = _rates(history)
        scales = [scale for record in history.records if (scale := record.context.get("amp_scale")) is not None]
        adaptive = any(len(history.series(name)) for name in ("clip_limit", "clipped_parameters"))
        return cls(
            clips=adaptive or bool(len(after)) or bool(len(history.series("clipped_share"))),
            bound=None if adaptive else clip_bound(history.series("grad_norm").finite, after.finite),
            adaptive=adaptive,
            scale=float(scales[-1]) if scales else None,
            warm_up=_warm_up(rates),
            raises=bool(rates) and rates.values[-1] > rates.at(0.5),
            groups=max((len(record.context.get("lr") or [0]) for record in history.records), default=1),
            skips=any(record.skipped for record in history.records),
        )

    @property
    def warm_up_advice(self) -> str:
        """As the end of a sentence that lowers the learning rate."""
        return f"; the warm-up of {self.warm_up} steps does not suffice" if self.warm_up else "; add a warm-up"


def _rates(history: History) -> Series:
    """The largest learning rate of each step that has one."""
    pairs = [(record.step, float(max(rates))) for record in history.records if (rates := record.context.get("lr"))]
    return Series(tuple(step for step, _ in pairs), tuple(rate for _, rate in pairs))


def _warm_up(rates: Series) -> int:
    if not rates:
        return 0
    largest = max(rates.values)
    return rates.steps[rates.values.index(largest)] - rates.steps[0] if rates.values[0] < _BEGINS * largest else 0

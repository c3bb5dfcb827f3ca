"""The cadence that keeps the monitor's own time below a share of the training time."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..step.active_step import ActiveStep, Mode
from ..step.plugin import Plugin

#: Monitored steps per decision: ten, since every tenth one measures updates too; three if the share is off by this factor.
_MANY, _FEW, _FAR = 10, 3, 4
#: The largest factor by which one decision changes the interval, since one measurement may be an outlier.
_STRIDE = 4
#: The largest interval: beyond it, monitored steps are not the main cost.
_WIDEST = 1024


class OverheadBudget(Plugin):
    """Lengthens the interval by powers of two while monitoring takes more than a share of the time, and shortens it again.

    ``share``: the largest one of the wall-clock time of training for the monitor's own time on the host, such as 0.01; ``spent``: that own
    time so far, in seconds.
    """

    name = "overhead_budget"
    watches_idle_steps = True

    def __init__(self, share: float, spent: Callable[[], float]) -> None:
        self.share, self._spent = share, spent
        self.interval = 1  # every n-th of the steps that the cadence requests is monitored
        self._warm = False
        self._before = 1  # the interval when something else was measured last
        self._left_out = _WIDEST  # of the steps that were asked for since the last monitored one
        self._asked: tuple[int, bool] | None = None
        self._monitored = 0
        self._since = self._spent_before = 0.0

    def wants(self, step: int, asked: bool, ahead: int | None = 0) -> bool:
        if ahead == 0:
            self._asked = step, asked
        return asked and self._left_out + 1 >= self.interval

    def on_step_closed(self, step: ActiveStep) -> None:
        """Count the step; switch off if ranks must monitor the same steps."""
        if self.context.ranks_synchronised:
            self.interval, self.share = 1, 1.0
            self.context.warn(
                "budget:off", "max_overhead has no effect: ranks that exchange values have to monitor the same steps"
            )
        if not step.sets_cadence:
            self.count(step.number, step.mode is Mode.MONITORED, self._spent(), time.perf_counter())

    def count(self, step: int, monitored: bool, spent: float, now: float) -> None:
        """Decide about the next steps at the end of a step; ``spent``: the monitor's own time, by the clock of ``now``, in seconds."""
        if monitored:
            self._left_out = 0
        elif self._asked == (step, True):
            self._left_out += 1
        if not self._warm:  # the first one plans, packs and compiles
            if monitored:
                self._warm = True
                self._begin(spent, now)
            return
        self._monitored += monitored
        share = (spent - self._spent_before) / max(now - self._since, 1e-9)
        far = share > _FAR * self.share or share < self.share / _FAR**2
        if monitored and self._monitored >= (_FEW if far else _MANY):
            self._decide(share)
            self._begin(spent, now)
            self.context.ask_cadence_again()

    def on_detail_changed(self, is_back: bool) -> None:
        """Start a new measurement when the detail changes: the cost of one level does not predict that of the other."""
        if is_back:
            self.interval = self._before
        self._before = self.interval
        self._begin(self._spent(), time.perf_counter())

    def _begin(self, spent: float, now: float) -> None:
        self._spent_before, self._since, self._monitored = spent, now, 0

    def _decide(self, share: float) -> None:
        before = self.interval
        # unmonitored steps cost almost nothing, so the share falls with the interval
        while share > self.share and self.interval < min(_STRIDE * before, _WIDEST):
            self.interval, share = self.interval * 2, share / 2
        while share < self.share / 4 and self.interval > max(1, before // _STRIDE):  # a fourth, to avoid oscillation
            self.interval, share = self.interval // 2, share * 2
        if self.interval > before:
            which = "2nd" if self.interval == 2 else f"{self.interval}th"
            self.context.warn(
                f"budget:{self.interval}",
                f"monitoring took more than max_overhead={self.share:g} of the time; from here on every {which} step "
                "of those asked for is monitored",
            )

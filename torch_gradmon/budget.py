"""How often to monitor, so that the monitor's own time stays under a share of the training's."""

from __future__ import annotations

from collections.abc import Callable

from .errors import Complaints

#: Decide after so many monitored steps if the budget is exceeded, else after more: every tenth step measures updates too.
_FEW, _MANY = 3, 10
#: Beyond this interval it is not the monitored steps that cost too much.
_WIDEST = 1024


class Budget:
    """A cadence that widens, by powers of two, while monitoring takes more than a share of the time, and narrows again.

    Args:
        share: of the wall-clock time of training, what the monitor's own time on the host may take, such as 0.01.
        is_monitored: the cadence that was asked for.
        every: the interval of that cadence, 1 where there is none.
        complaints: where it is said that steps are left out.

    Attributes:
        interval: of the steps that the cadence asks for, every so-manyth is monitored.
    """

    def __init__(self, share: float, is_monitored: Callable[[int], bool], every: int, complaints: Complaints) -> None:
        self.share = share
        self.interval = 1
        self._is_monitored, self._every, self._complaints = is_monitored, every, complaints
        self._warm = False
        self._monitored = 0
        self._since = self._spent_before = 0.0

    def __call__(self, step: int) -> bool:
        """Whether ``step`` is monitored."""
        return step % (self._every * self.interval) == 0 and bool(self._is_monitored(step))

    def step_ended(self, monitored: bool, spent: float, now: float) -> None:
        """Take note that a step has ended, and decide about the steps to come.

        Args:
            monitored: whether it was.
            spent: the monitor's own time since it began, in seconds.
            now: the time in seconds, of the same clock.
        """
        if not self._warm:  # the first one plans, packs and compiles
            if monitored:
                self._warm = True
                self._begin(spent, now)
            return
        self._monitored += monitored
        share = (spent - self._spent_before) / max(now - self._since, 1e-9)
        if self._monitored >= (_FEW if share > self.share else _MANY):
            self._decide(share)
            self._begin(spent, now)

    def _begin(self, spent: float, now: float) -> None:
        self._spent_before, self._since, self._monitored = spent, now, 0

    def _decide(self, share: float) -> None:
        before = self.interval
        # what is not monitored costs next to nothing, so the share falls with the interval
        while share > self.share and self.interval < _WIDEST:
            self.interval, share = self.interval * 2, share / 2
        while share < self.share / 4 and self.interval > 1:  # a fourth, so that it does not go to and fro
            self.interval, share = self.interval // 2, share * 2
        if self.interval > before:
            which = "other" if self.interval == 2 else f"{self.interval}th"
            self._complaints.add(
                f"budget:{self.interval}",
                f"monitoring took more than overhead_budget={self.share:g} of the time; from here on every {which} step "
                "of those asked for is monitored",
            )

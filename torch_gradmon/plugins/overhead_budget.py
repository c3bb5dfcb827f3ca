"""How often to monitor, so that the monitor's own time stays under a share of the training's."""

from __future__ import annotations

from collections.abc import Callable

from ..core.errors import WarningLog

#: Decide after so many monitored steps, for every tenth one measures updates too; after few where it is far off.
_MANY, _FEW, _FAR = 10, 3, 4
#: By so much the interval changes at most in one decision, since what was measured may have been a hiccup.
_STRIDE = 4
#: Beyond this interval it is not the monitored steps that cost too much.
_WIDEST = 1024


class Budget:
    """A cadence that widens, by powers of two, while monitoring takes more than a share of the time, and narrows again.

    Args:
        share: of the wall-clock time of training, what the monitor's own time on the host may take, such as 0.01.
        is_monitored: the cadence that was asked for.
        complaints: where it is said that steps are left out.

    Attributes:
        interval: of the steps that the cadence asks for, every so-manyth is monitored.
    """

    def __init__(self, share: float, is_monitored: Callable[[int], bool], complaints: WarningLog) -> None:
        self.share = share
        self.interval = 1
        self._is_monitored, self._complaints = is_monitored, complaints
        self._warm = False
        self._before = 1  # the interval when something else was measured last
        self._left_out = _WIDEST  # of the steps that were asked for since the last monitored one
        self._asked: tuple[int, bool] | None = None
        self._monitored = 0
        self._since = self._spent_before = 0.0

    def __call__(self, step: int) -> bool:
        """Whether ``step`` would be monitored if it came next."""
        wanted = bool(self._is_monitored(step))
        self._asked = step, wanted
        return wanted and self._left_out + 1 >= self.interval

    def give_up(self, reason: str) -> None:
        """Leave out nothing any more."""
        self.interval, self.share = 1, 1.0
        self._complaints.add("budget:off", f"overhead_budget has no effect: {reason}")

    def step_ended(self, step: int, monitored: bool, spent: float, now: float) -> None:
        """Take note that a step has ended, and decide about the steps to come.

        Args:
            step: its number.
            monitored: whether it was.
            spent: the monitor's own time since it began, in seconds.
            now: the time in seconds, of the same clock.
        """
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

    def turn(self, is_back: bool, spent: float, now: float) -> None:
        """From here on something else is measured for a while, or if ``is_back`` the same as before that: what was found about the one
        says nothing of the other.
        """
        if is_back:
            self.interval = self._before
        self._before = self.interval
        self._begin(spent, now)

    def _begin(self, spent: float, now: float) -> None:
        self._spent_before, self._since, self._monitored = spent, now, 0

    def _decide(self, share: float) -> None:
        before = self.interval
        # what is not monitored costs next to nothing, so the share falls with the interval
        while share > self.share and self.interval < min(_STRIDE * before, _WIDEST):
            self.interval, share = self.interval * 2, share / 2
        while share < self.share / 4 and self.interval > max(1, before // _STRIDE):  # a fourth, so as not to go to and fro
            self.interval, share = self.interval // 2, share * 2
        if self.interval > before:
            which = "2nd" if self.interval == 2 else f"{self.interval}th"
            self._complaints.add(
                f"budget:{self.interval}",
                f"monitoring took more than overhead_budget={self.share:g} of the time; from here on every {which} step "
                "of those asked for is monitored",
            )

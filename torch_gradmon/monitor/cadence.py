"""Which steps are monitored: those that the script asks for, those after a spike, and those of a live change of detail."""

from __future__ import annotations

from collections.abc import Callable

from ..plugins.live_detail.plugin import Tuning
from ..plugins.post_spike_detail import CloserLook


class Cadence:
    """Answers for one step after the other.

    Args:
        asked: whether the script wants a step, by its number; need not give the same answer twice.
        closer: wants the steps after a spike.
        tuning: has a cadence of its own while a change is in force.
    """

    def __init__(self, asked: Callable[[int], bool], closer: CloserLook, tuning: Tuning) -> None:
        self.asked = asked
        self._closer, self._tuning = closer, tuning
        self._answer: tuple[int, bool] | None = None

    def wants(self, step: int) -> bool:
        """Whether the next step is monitored, if it is ``step``. The script is asked once for each."""
        if self._closer.goes_on:
            return True
        if self._answer is None or self._answer[0] != step:
            self._answer = step, bool(self.asked(step))
        return self._answer[1] if self._tuning.in_force is None else self._tuning.cadence(step, self._answer[1])

    def wants_alone(self, step: int) -> bool:
        """Whether a step that is wanted is one that other ranks do not monitor."""
        return self._tuning.is_alone and not self._closer.goes_on and self._answer != (step, True)

    def ask_again(self) -> None:
        """What the script said of the next step may be another answer by now."""
        self._answer = None

    def foretells(self, step: int, ahead: int, is_open: bool) -> bool:
        """Whether ``step`` would be monitored, by what is known now.

        Args:
            step: its number.
            ahead: so many steps lie between it and the next one.
            is_open: whether a step is under way.
        """
        asked = bool(self.asked(step))
        is_tuned = self._tuning.left is None or ahead < self._tuning.left - is_open
        return ahead < self._closer.left or (self._tuning.cadence(step, asked) if is_tuned else asked)

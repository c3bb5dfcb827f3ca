"""Places for rows in a W&B run that somebody else logs to as well.

A run has one counter. ``run.log(row)`` closes the open row and moves on, ``run.log(row, step=s)`` moves to ``s``, and a row for a
step that lies behind is dropped with no more than a line on the console. Who logs beside somebody else loses rows, or makes
him lose his, in three of six ways to do it.

A row may always join the row that is open. A new one moves the counter, and that is harmless only where the script will not
name a step that the counter has passed. What the script has done so far is known, since its calls are noted; what it will do
can only be taken from that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from ..core.keys import SUMMARY

#: The axis of everything that is logged here: the monitor's step.
AXIS = f"{SUMMARY}/step"
_ATTRIBUTE = "_gradmon_rows"


@dataclass
class Clock:
    """The steps of one monitor beside those that the script names.

    Attributes:
        at: the monitor's step; None before the first.
        gap: the largest difference between two of them.
        ahead: of how many steps the script was ahead when it last named one; None before it did.
        slow: whether it has fallen back at any time, so that its steps are not the monitor's.
    """

    at: int | None = None
    gap: int = 1
    ahead: int | None = None
    slow: bool = False

    def reach(self, step: int) -> None:
        """The monitor is at ``step``."""
        if self.at is not None:
            self.gap = max(self.gap, step - self.at)
        self.at = step

    def hear(self, named: int) -> None:
        """The script has named this step."""
        ahead = named - (-1 if self.at is None else self.at)
        self.slow |= self.ahead is not None and ahead + self.gap - 1 < self.ahead
        self.ahead = ahead

    @property
    def next_named(self) -> int:
        """No step before this one is named from now on, if the script goes on as it did."""
        if self.slow or self.at is None or self.ahead is None:
            return 0
        return self.at + self.ahead - self.gap + 2


class Rows:
    """What the script has logged to ``run``, and whether there is room for another row. All sinks of a run share one."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self.clocks: list[Clock] = []
        #: Whether the script has given ``step=``, and how many rows it has closed without, since our first.
        self.names, self.moves = False, 0
        #: Whether it has logged since our last row.
        self.moved = False
        #: A step that it named behind the counter, and the counter; a sink is to say so.
        self.overtaken: tuple[int, int] | None = None
        #: The step of our row in the open row; None where that has none.
        self._ours: float | None = None
        self._half = False  # whether the script has left its row open
        self._named: int | None = None  # its last step
        self._stride: int | None = None  # the smallest difference between two of them
        self._passing = False
        self._watch()

    @classmethod
    def of(cls, run: Any) -> Rows | None:
        """The one of this run; None where nothing is kept, as with a run that is disabled."""
        if not callable(getattr(run, "_log", None)) or not isinstance(getattr(run, "_local_step", None), int):
            return None
        # a run takes no attributes besides its own, so it hangs on the function that stands before one of them
        found: Rows | None = getattr(run._log, _ATTRIBUTE, None)
        return cls(run) if found is None else found

    def _watch(self) -> None:
        """Note every call of ``run.log`` and ``wandb.log``, which both come by here."""
        original: Callable[..., Any] = self.run._log

        def noted(data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> Any:
            with self.lock:
                counter = counter_of(self.run)
                result = original(data, step, commit)
                if not self._passing:
                    self._note(step, commit, counter)
                return result

        setattr(noted, _ATTRIBUTE, self)
        self.run._log = noted

    def _note(self, step: int | None, commit: bool | None, counter: int) -> None:
        """The script has logged so, where the run stood at ``counter``."""
        closes = bool(commit) or (step is None and commit is None)
        self.moved = True
        self._half = not closes
        if closes or (step is not None and step > counter):
            self._ours = None
        if step is None:
            self.moves += closes and any(clock.at is not None for clock in self.clocks)
            return
        if step < counter and (self._named is None or step > self._named):
            self.overtaken = step, counter
        if self._named is not None and step > self._named:
            self._stride = min(self._stride or step - self._named, step - self._named)
        self._named = step if self._named is None else max(step, self._named)
        for clock in self.clocks:
            clock.hear(self._named)
        self.names = True

    @contextmanager
    def _pass(self) -> Iterator[None]:
        self._passing = True
        try:
            yield
        finally:
            self._passing = False

    def may_join(self, axis: float) -> bool:
        """Whether a row of ours for the step ``axis`` may go into the open row: it would overwrite one of another step."""
        return self._ours is None or self._ours == axis

    def may_advance(self, alone: bool) -> bool:
        """Whether the counter may move on by one."""
        if not self.names:
            return alone or self.moves > 0
        if self._stride is None or self._named is None:
            return False
        # before the step that the script can name next, by its stride and by its clock
        next_named = min(self._named + self._stride, *(clock.next_named for clock in self.clocks))
        return counter_of(self.run) + 1 < next_named

    def put(self, row: Mapping[str, Any], alone: bool) -> None:
        """Log ``row``: into the open row if it may join that, else into a new one."""
        with self._pass():
            if not self.may_join(row[AXIS]):
                self.run.log({AXIS: self._ours}, commit=True)
                self._ours = None
            # a row that the script has begun is for the script to close, and its next row keeps its number if ours joins that
            closes = not self.names and not self._half and not self.moved and (alone or self.moves > 0)
            self.run.log(row, commit=closes)
        self._ours = None if closes else row[AXIS]
        self.moved = False


def counter_of(run: Any) -> int:
    """Where the run stands. It keeps count itself; asking for it costs half a millisecond."""
    count: int = run._local_step
    return count

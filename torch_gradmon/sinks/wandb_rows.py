"""Where a row fits into a W&B run that the script logs to as well.

A run has one counter. ``run.log(row)`` closes the open row and advances, ``run.log(row, step=s)`` advances to ``s``, and a row for a
step behind the counter is dropped with only a line on the console. In three of six combinations of two loggers, one of them loses rows.

A row may always join the open row. A new row advances the counter, which is harmless only if the script will not name a step that the
counter has passed. The script's calls so far are observed; what it will do is inferred from them. Until its first call, a new row
closes the one before; if the script then names a step that they have passed, its steps are counted from there, so that W&B drops none of
its rows.
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
    """The steps of one monitor compared with those that the script names.

    Attributes:
        at: the monitor's step; None before the first.
        gap: the largest difference between two of them.
        ahead: by how many steps the script was ahead when it last named one; None before that.
        slow: the script has fallen back, so its steps are not the monitor's.
    """

    at: int | None = None
    gap: int = 1
    ahead: int | None = None
    slow: bool = False

    def reach(self, step: int) -> None:
        """Set the monitor's step."""
        if self.at is not None:
            self.gap = max(self.gap, step - self.at)
        self.at = step

    def observe(self, named: int) -> None:
        """Take a step that the script has named."""
        ahead = named - (-1 if self.at is None else self.at)
        self.slow |= self.ahead is not None and ahead + self.gap - 1 < self.ahead
        self.ahead = ahead

    @property
    def next_named(self) -> int:
        """The first step that the script may still name, if it continues as before."""
        if self.slow or self.at is None or self.ahead is None:
            return 0
        return self.at + self.ahead - self.gap + 2


class Rows:
    """What the script has logged to ``run``, and whether there is room for another row. All sinks of a run share one.

    Attributes:
        names: the script has given ``step=``.
        moves: rows that it has closed without, since our first.
        moved: it has logged since our last row.
        shift: what is added to the steps that it names, because our rows came first.
        overtaken: a step that it named behind the counter, and the counter, until a sink has warned of it.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self.clocks: list[Clock] = []
        self.names, self.moves, self.moved = False, 0, False
        self.shift = 0
        self._is_silent = True  # the script has not logged since our first row
        self._led = 0  # by how much the counter advanced meanwhile, for our rows
        self.overtaken: tuple[int, int] | None = None
        self._ours: float | None = None  # step of our row in the open row
        self._half = False  # whether the script has left its row open
        self._named: int | None = None  # its last step
        self._stride: int | None = None  # the smallest difference between two of them
        self._logs_ours = False
        self._observe_script()

    @classmethod
    def of(cls, run: Any) -> Rows | None:
        """The rows of this run; None if it stores nothing, as a disabled run."""
        if not callable(getattr(run, "_log", None)) or not isinstance(getattr(run, "_local_step", None), int):
            return None
        # a run accepts no foreign attributes, so the object is stored on the wrapper of one of its methods
        found: Rows | None = getattr(run._log, _ATTRIBUTE, None)
        return cls(run) if found is None else found

    def _observe_script(self) -> None:
        """Wrap ``run._log``, through which ``run.log`` and ``wandb.log`` both go."""
        original: Callable[..., Any] = self.run._log

        def noted(data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> Any:
            with self.lock:
                counter = counter_of(self.run)
                if self._logs_ours:
                    return original(data, step, commit)
                if isinstance(step, int):
                    if self._is_silent and step < counter:
                        self.shift = min(counter - step, self._led)
                    step += self.shift
                result = original(data, step, commit)
                self._update(step, commit, counter)
                return result

        setattr(noted, _ATTRIBUTE, self)
        self.run._log = noted

    def _update(self, step: int | None, commit: bool | None, counter: int) -> None:
        """Take a call of the script, made when the run was at ``counter``."""
        closes = bool(commit) or (step is None and commit is None)
        self.moved = True
        has_begun = any(clock.at is not None for clock in self.clocks)
        self._is_silent &= not has_begun
        self._half = not closes
        if closes or (step is not None and step > counter):
            self._ours = None
        if step is None:
            self.moves += closes and has_begun
            return
        if step < counter and (self._named is None or step > self._named):
            self.overtaken = step, counter
        if self._named is not None and step > self._named:
            self._stride = min(self._stride or step - self._named, step - self._named)
        self._named = step if self._named is None else max(step, self._named)
        for clock in self.clocks:
            clock.observe(self._named)
        self.names = True

    def take_overtaken(self) -> tuple[int, int] | None:
        """:attr:`overtaken`, once."""
        found, self.overtaken = self.overtaken, None
        return found

    @contextmanager
    def _as_ours(self) -> Iterator[None]:
        self._logs_ours = True
        try:
            yield
        finally:
            self._logs_ours = False

    def may_join(self, axis: float) -> bool:
        """Whether our row for the step ``axis`` may join the open row. It must not overwrite our row of another step."""
        return self._ours is None or self._ours == axis

    def may_advance(self, alone: bool) -> bool:
        """Whether the counter may advance by one."""
        if not self.names:
            return alone or self._is_silent or self.moves > 0
        if self._stride is None or self._named is None:
            return False
        # the new row must lie before the next step that the script can name, by its stride and by its clock
        next_named = min(self._named + self._stride, *(clock.next_named for clock in self.clocks))
        return counter_of(self.run) + 1 < next_named

    def put(self, row: Mapping[str, Any], alone: bool) -> None:
        """Log ``row``, into the open row if it may join, else into a new one."""
        with self._as_ours():
            if not self.may_join(row[AXIS]):
                self.run.log({AXIS: self._ours}, commit=True)
                self._ours = None
                self._led += self._is_silent and not alone
            # a row that the script has begun is the script's to close; its next row keeps its number if ours joins it
            closes = not self.names and not self._half and not self.moved and (alone or self.moves > 0)
            self.run.log(row, commit=closes)
        self._ours = None if closes else row[AXIS]
        self.moved = False


def counter_of(run: Any) -> int:
    """The run's counter. Its public property takes half a millisecond."""
    count: int = run._local_step
    return count

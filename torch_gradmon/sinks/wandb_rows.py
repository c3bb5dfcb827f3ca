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
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..errors import GradmonWarning
from ..names import SUMMARY

#: The axis of everything that is logged here: the monitor's step.
AXIS = f"{SUMMARY}/step"
_ATTRIBUTE = "_gradmon_rows"


class Rows:
    """What the script has logged to ``run``, and whether there is room for another row. All sinks of a run share one."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.lock: AbstractContextManager[Any] = threading.RLock()
        #: Whether the script has given ``step=``, and how often it has logged without, since our first row.
        self.names, self.moves = False, 0
        #: Whether it has logged since our last row.
        self.moved = False
        #: The step of our row in the open row; None where that has none.
        self._ours: float | None = None
        self._half = False  # whether the script has left its row open
        self._at: int | None = None  # our step
        self._named: int | None = None  # the script's
        self._stride: int | None = None  # the smallest difference between two of them
        self._ahead = 0  # of how many steps it was ahead of ours
        self._passing = False
        self._told = False
        self._watch()

    @classmethod
    def of(cls, run: Any) -> Rows:
        """The one of this run."""
        # a run takes no attributes besides its own, so it hangs on the function that stands before one of them
        found: Rows | None = getattr(getattr(run, "_log", None), _ATTRIBUTE, None)
        return cls(run) if found is None else found

    def _watch(self) -> None:
        """Note every call of ``run.log`` and ``wandb.log``, which both come by here."""
        original: Callable[..., Any] | None = getattr(self.run, "_log", None)
        if original is None:  # a wandb whose calls cannot be seen: then no row is opened
            self.names = True
            return

        def noted(data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> Any:
            with self.lock:
                if not self._passing:
                    self._note(step, commit)
                return original(data, step, commit)

        setattr(noted, _ATTRIBUTE, self)
        self.run._log = noted

    def _note(self, step: int | None, commit: bool | None) -> None:
        closes = bool(commit) or (step is None and commit is None)
        self.moved = True
        self._half = not closes
        if step is None:
            self.moves += self._at is not None
            if closes:
                self._ours = None
            return
        counter = counter_of(self.run)
        if step < counter and not self._told and (self._named is None or step > self._named):
            self._told = True
            warnings.warn(
                f"torch_gradmon: this script logged to W&B without step= before, and now names step {step} where the run stands at "
                f"{counter}; W&B drops such rows. Name all steps or none",
                GradmonWarning,
                stacklevel=4,
            )
        if step > counter or closes:
            self._ours = None
        if self._named is not None and step > self._named:
            self._stride = min(self._stride or step - self._named, step - self._named)
        self._named = step if self._named is None else max(step, self._named)
        self._ahead = self._named - (-1 if self._at is None else self._at)
        self.names = True

    @contextmanager
    def _pass(self) -> Iterator[None]:
        self._passing = True
        try:
            yield
        finally:
            self._passing = False

    def reach(self, step: int) -> None:
        """The monitor is at ``step``."""
        self._at = step

    def may_join(self, axis: float) -> bool:
        """Whether a row of ours for the step ``axis`` may go into the open row: it would overwrite one of another step."""
        return self._ours is None or self._ours == axis

    def may_advance(self, alone: bool) -> bool:
        """Whether the counter may move on by one."""
        if not self.names:
            return alone or self.moves > 0
        if self._stride is None or self._named is None or self._at is None:
            return False
        # before the step that the script can name next, by its stride and by its clock
        return counter_of(self.run) + 1 < min(self._named + self._stride, self._at + self._ahead + 1)

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
    count: int | None = getattr(run, "_local_step", None)
    return run.step if count is None else count

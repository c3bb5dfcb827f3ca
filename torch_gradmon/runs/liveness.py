"""Whether a run still goes on: what its file tells of that, looked up and not read through."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .writer import open_to_read

#: A run whose last record is younger than this many seconds, or than so many times what usually lies between two, looks alive.
_FRESH, _TIMES = 60.0, 5.0
#: Records that tell what is usual.
_LOOKED_AT = 20


@dataclass(frozen=True)
class RunStatus:
    """What is known of a run at this moment.

    Attributes:
        meta: facts about it.
        step: its last record; None without any.
        age: seconds since that was made, by the clock of this machine.
        usual: seconds that usually lie between two records, as far as the last ones and the cadence tell; None where they do not.
    """

    meta: Mapping[str, Any]
    step: int | None = None
    age: float = 0.0
    usual: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether its monitor has said so; one that was killed has not."""
        return bool(self.meta.get("tune", {}).get("ended"))

    @property
    def looks_alive(self) -> bool | None:
        """Whether its last record is as young as they usually are; None where that cannot be told."""
        if self.has_ended:
            return False
        if self.step is None or (self.usual is None and self.age > _FRESH):
            return None
        return self.age <= max(_FRESH, _TIMES * (self.usual or 0.0))

    def __str__(self) -> str:
        if self.step is None:
            return "nothing was recorded so far"
        often = "" if self.usual is None else f" (one is due every {duration(self.usual)})"
        verdict = {True: "the run looks alive", False: "the run may be dead", None: "whether the run is alive cannot be told"}
        return (
            f"step {self.step} was recorded {duration(self.age)} ago{'' if self.has_ended else often}: "
            f"{'the run has ended' if self.has_ended else verdict[self.looks_alive]}"
        )


def run_status(path: str | os.PathLike[str]) -> RunStatus:
    """Feel the pulse of the run in ``path``. Takes a millisecond, however long the run is.

    Raises:
        FileNotFoundError: there is no run in it.
        ValueError: its file is not one of ours, or cannot be read.
    """
    db, meta = open_to_read(path)
    with contextlib.closing(db):
        last = db.execute(f"SELECT step, time FROM steps ORDER BY segment DESC, step DESC LIMIT {_LOOKED_AT}").fetchall()
    if not last:
        return RunStatus(meta)
    return RunStatus(meta, last[0][0], max(0.0, time.time() - last[0][1]), _usual(meta, last))


def _usual(meta: Mapping[str, Any], last: Sequence[tuple[int, float]]) -> float | None:
    """What lies between two of the ``last`` records, newest first, or between steps of the cadence in force, whichever is more."""
    gaps = sorted(abs(later - earlier) for (_, later), (_, earlier) in pairwise(last))
    if not gaps:
        return None
    usual = gaps[len(gaps) // 2]
    (newest, now), (oldest, then) = last[0], last[-1]
    every = (meta.get("tune", {}).get("in_force") or {}).get("every") or meta.get("every")
    if every is not None and newest > oldest:  # those under a live change come closer together than those after it
        usual = max(usual, every * (now - then) / (newest - oldest))
    return usual


def duration(seconds: float) -> str:
    """A length of time for people.

    >>> duration(0.0412), duration(75), duration(7300), duration(200000)
    ('41 ms', '75 s', '2.0 h', '2.3 days')
    """
    for limit, unit, length in ((1.0, "ms", 0.001), (120.0, "s", 1.0), (7200.0, "min", 60.0), (172_800.0, "h", 3600.0)):
        if seconds < limit:
            amount = seconds / length
            return f"{amount:.1f} {unit}" if amount < 10 and unit != "ms" else f"{amount:.0f} {unit}"
    return f"{seconds / 86_400:.1f} days"

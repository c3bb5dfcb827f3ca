"""Whether a run is still alive, from a quick look at its file."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ..core.torch_modes import is_gone
from .index import RunIndex, opening

#: A run looks alive if its last record is younger than this, in seconds, or than this multiple of the usual interval, or of the pauses that
#: it makes, for evaluations for instance.
_FRESH, _TIMES, PAUSES = 60.0, 5.0, 2.0
#: Number of last records among which pauses are looked for.
_RECENT = 5000
#: Number of last records that give the usual interval.
_LOOKED_AT = 20
#: Bytes that a file system has room for unless it is full.
_ROOM = 65_536


@dataclass(frozen=True)
class RunStatus:
    """What is known about a run now."""

    meta: Mapping[str, Any]  # facts about the run
    step: int | None = None  # of its last record; None without any
    age: float = 0.0  # seconds since that record, by this machine's clock
    usual: float | None = None  # usual seconds between two records, from the last ones and the cadence; None if unknown
    # the second-longest time between two of the last 5,000 records, so that a single interruption is none; 0 with fewer than three records,
    # and for a run that has ended or has a record from the last minute
    pause: float = 0.0
    is_gone: bool = False  # its process no longer exists, as can be seen on the same machine
    is_full: bool = False  # the file system of the run directory has no room

    @property
    def has_ended(self) -> bool:
        """Whether its monitor has reported the end; a killed run has not."""
        return bool(self.meta.get("tune", {}).get("ended"))

    @property
    def lost(self) -> str:
        """Why steps after the last one could not be written, as far as is known; empty if they were not lost."""
        if self.has_ended:
            return ""
        if "lost_after" in self.meta and self.meta["lost_after"] == self.step:
            return f"later steps could not be written ({self.meta.get('lost_why', 'OSError')})"
        return "later steps may be lost, since the disk is full" if self.is_full and not self.looks_alive else ""

    @property
    def looks_alive(self) -> bool | None:
        """Whether its process exists and its last record is as recent as usual; None if unknown."""
        if self.has_ended or self.is_gone:
            return False
        if self.step is None or (self.usual is None and self.age > _FRESH):
            return None
        return self.age <= max(_FRESH, _TIMES * (self.usual or 0.0), PAUSES * self.pause)

    def __str__(self) -> str:
        if self.step is None:
            return "nothing was recorded so far" + (", and its process is gone" if self.is_gone else "")
        often = "" if self.usual is None else f" (one is due every {duration(self.usual)})"
        verdict = {
            True: "the run looks alive",
            False: ("its process is gone" if self.lost else "its process is gone, so it was killed or crashed")
            if self.is_gone
            else "the run may be dead",
            None: "whether the run is alive cannot be determined",
        }
        return (
            f"step {self.step} was recorded {duration(self.age)} ago{'' if self.has_ended else often}: "
            f"{'the run has ended' if self.has_ended else verdict[self.looks_alive]}{'; ' * bool(self.lost)}{self.lost}"
        )


def run_status(path: str | os.PathLike[str]) -> RunStatus:
    """Read the liveness of the run in ``path``; raises as :func:`opening`.

    Takes a millisecond, or some if the last record is old, however long the run is.
    """
    with opening(path) as directory:
        index = RunIndex(directory)
    with contextlib.closing(index):
        return status_in(index, path)


def status_in(index: RunIndex, path: str | os.PathLike[str]) -> RunStatus:
    """The liveness of a run in ``path`` that is open."""
    meta = index.meta
    recent = list(zip(index.steps[-_RECENT:], index.times(_RECENT), strict=True))[::-1]
    if not recent:
        return RunStatus(meta, is_gone=is_gone(meta.get("process", {})))
    status = RunStatus(meta, recent[0][0], max(0.0, time.time() - recent[0][1]), _usual(meta, recent[:_LOOKED_AT]))
    if status.has_ended:
        return status
    gaps = sorted(later - earlier for (_, later), (_, earlier) in pairwise(recent)) if status.age > _FRESH else []
    pause = gaps[-2] if len(gaps) > 1 else 0.0
    return replace(status, pause=pause, is_gone=is_gone(meta.get("process", {})), is_full=_is_full(path))


def _is_full(path: str | os.PathLike[str]) -> bool:
    try:
        return shutil.disk_usage(path).free < _ROOM
    except OSError:
        return False


def _usual(meta: Mapping[str, Any], last: Sequence[tuple[int, float]]) -> float | None:
    """The interval between the ``last`` records, newest first, or between steps of the current cadence, whichever is longer."""
    gaps = sorted(abs(later - earlier) for (_, later), (_, earlier) in pairwise(last))
    if not gaps:
        return None
    usual = gaps[len(gaps) // 2]
    (newest, now), (oldest, then) = last[0], last[-1]
    every = (meta.get("tune", {}).get("in_force") or {}).get("every") or meta.get("every")
    if every is not None and newest > oldest:  # under a live request records come closer together than after it
        usual = max(usual, every * (now - then) / (newest - oldest))
    return usual


def duration(seconds: float) -> str:
    """A duration as text.

    >>> duration(0.0412), duration(75), duration(7300), duration(200000)
    ('41 ms', '75 s', '2.0 h', '2.3 days')
    """
    for limit, unit, length in ((1.0, "ms", 0.001), (120.0, "s", 1.0), (7200.0, "min", 60.0), (172_800.0, "h", 3600.0)):
        if seconds < limit:
            amount = seconds / length
            return f"{amount:.1f} {unit}" if amount < 10 and unit != "ms" else f"{amount:.0f} {unit}"
    return f"{seconds / 86_400:.1f} days"

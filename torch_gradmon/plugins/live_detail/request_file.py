"""Where a training looks for what is asked of it from outside: a small file in its run directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from ...core.errors import WarningLog
from ...runs import detail_request as change
from ...runs.detail_request import DetailRequest

#: Seconds between two looks at the file.
PERIOD = 1.0


class Mailbox:
    """Looks at ``tune.json`` at most once a second, and reads it only when it has become another one.

    A look costs a reading of the clock, and once a second an ``os.stat``. Whatever is in the file, training continues.

    Args:
        directory: the run directory.
        session: what this monitor calls itself; what was written for an earlier one is not for this one.
        complaints: where it is said, once, that a file is not what it should be.
        is_ours: whether this rank is the one that looks.
        clock: in seconds, never goes back.
    """

    def __init__(
        self,
        directory: Path,
        session: str,
        complaints: WarningLog,
        is_ours: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._session = directory / change.FILE_NAME, session
        self._complaints, self._is_ours, self._clock = complaints, is_ours, clock
        self._due = clock()
        self._seen: tuple[int, ...] | None = None
        self._last = DetailRequest()

    def look(self) -> DetailRequest | None:
        """What is newly asked for, if anything is."""
        now = self._clock()
        if now < self._due:
            return None
        self._due = now + PERIOD
        return self._read() if self._is_ours() else None

    def _read(self) -> DetailRequest | None:
        try:
            there = os.stat(self._path)
            seen = there.st_mtime_ns, there.st_size, there.st_ino
            if seen == self._seen:
                return None
            self._seen = seen
            found, session = change.read(self._path)
        except (FileNotFoundError, NotADirectoryError):
            self._seen = None
            return None
        except (OSError, ValueError) as error:
            # without the error as such, which a monitor that raises would raise: the file is not the training's doing
            self._complaints.add("tune:file", f"{self._path} is not heeded, and training continues as it was: {error}")
            return None
        if session != self._session or found.number < self._last.number or found == self._last:
            return None
        self._last = found
        return found

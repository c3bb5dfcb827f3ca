"""Requests from other processes: a small file in the run directory."""

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


class RequestFile:
    """Checks ``tune.json`` at most once a second, and reads it only if it has changed.

    A check reads the clock, and once a second calls ``os.stat``. An invalid file does not stop training.

    Args:
        directory: the run directory.
        session: the identifier of this monitor; requests for an earlier one are ignored.
        complaints: receives one warning about an invalid file.
        is_ours: whether this rank is the one that checks.
        clock: a monotonic clock, in seconds.
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
        """The new request, if there is one."""
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
            found, session = change.read(self._path, self._last.number)
        except (FileNotFoundError, NotADirectoryError):
            self._seen = None
            return None
        except (OSError, ValueError) as error:
            # only the error's text: strict monitors re-raise an error, but training is not responsible for this file
            self._complaints.add("tune:file", f"{self._path} is ignored, and training continues unchanged: {error}")
            return None
        if session != self._session or found.number < self._last.number or found == self._last:
            return None
        self._last = found
        return found

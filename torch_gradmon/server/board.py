"""What the server knows of all runs: a row for each, kept up to date, and a diagnosis of each from a thread of its own."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

from ..analysis.many_runs.card import RunCard
from ..analysis.many_runs.find import find_runs, is_below
from .watched_run import WatchedRun

#: Seconds between two looks for new runs, and seconds after the last request in which the thread still works.
_LOOK, _ASKED = 2.0, 10.0
#: Seconds after which rows that were never read before wait for the next request.
_PATIENCE = 8.0
#: Looking for runs takes at most this share of the time.
_SHARE = 0.1


class RunBoard:
    """The runs below a directory. Safe to use from several threads.

    Args:
        root: the directory.

    Raises:
        FileNotFoundError: there is no such directory.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = root
        self._walking = threading.Lock()
        self._runs: dict[str, WatchedRun] = {}
        self._due = 0.0
        self._take(find_runs(root))
        self._asked, self._worker = 0.0, threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def path(self, name: str) -> Path | None:
        """The directory of a run that was found; None for any other name."""
        run = self._run(name)
        return None if run is None or not is_below(run.path, self._root) else run.path

    def card(self, name: str) -> RunCard | None:
        """The row of a run; None if there is none of that name that can be read."""
        run = self._run(name)
        return None if run is None else run.card()

    def cards(self) -> list[RunCard]:
        """All rows, the latest run first. Only runs that have changed are read."""
        self._look()
        until = time.monotonic() + _PATIENCE
        rows = (run.card() for run in self._runs.values() if run.was_read or time.monotonic() < until)
        found = [card for card in rows if card is not None]
        self._ask()
        return sorted(found, key=lambda card: (card.began is None, -(card.began or 0.0), card.name))

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._worker.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, name: str) -> WatchedRun | None:
        self._look()
        if name not in self._runs:  # it may be new
            self._look(is_urgent=True)
        return self._runs.get(name)

    def _look(self, is_urgent: bool = False) -> None:
        """Find runs anew, in one thread while the others take what is known."""
        if (is_urgent or time.monotonic() >= self._due) and self._walking.acquire(blocking=is_urgent):
            try:
                begin = time.monotonic()
                with contextlib.suppress(OSError):
                    self._take(find_runs(self._root))
                end = time.monotonic()
                self._due = end + max(_LOOK, (end - begin) / _SHARE)
            finally:
                self._walking.release()

    def _take(self, found: dict[str, Path]) -> None:
        known = self._runs
        self._runs = {name: known.get(name) or WatchedRun(name, path) for name, path in found.items()}

    def _ask(self) -> None:
        """Let the thread diagnose what has changed, as long as a page is open."""
        self._asked = time.monotonic()
        with self._starting:
            if (self._thread is None or not self._thread.is_alive()) and not self._closed:
                self._thread = threading.Thread(target=self._work, name="torch_gradmon diagnoses", daemon=True)
                self._thread.start()
        self._worker.set()

    def _work(self) -> None:
        while True:
            self._worker.clear()
            if self._closed:  # looked at after clear(), which may have undone the set() of close()
                return
            for run in list(self._runs.values()):
                if self._closed or time.monotonic() - self._asked > _ASKED:
                    break
                run.diagnose()
            self._worker.wait(1.0 if time.monotonic() - self._asked < _ASKED else None)
            if not self._closed:
                time.sleep(0.2)  # requests come often

"""What the server knows of the runs: a row for each, kept up to date, and a diagnosis of each from a thread of its own."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from pathlib import Path

from ..analysis.diagnosis.diagnose import diagnose
from ..analysis.diagnosis.findings import Diagnosis
from ..analysis.many_runs.card import RunCard, run_card
from ..analysis.many_runs.find import find_runs
from ..runs.file import file_in

#: Seconds between two looks for new runs, and seconds after the last request in which the thread still works.
_LOOK, _ASKED = 2.0, 10.0
#: A diagnosis of a run that is still written takes at most this share of the time.
_SHARE = 0.05
#: Seconds after which a row is read again although its file is the same: a run that has become silent does not write.
_AGES = 2.0


def version(path: Path) -> str:
    """Changes with each write to the run in ``path``, and with another run in its place; empty if there is none."""
    file = file_in(path)
    found: list[int] = []
    for each in (file, Path(f"{file}-wal")):
        with contextlib.suppress(OSError):
            status = os.stat(each)
            found += [status.st_ino, status.st_size, status.st_mtime_ns]
    return "-".join(map(str, found))


class Board:
    """The runs below a directory. Safe to use from several threads.

    Args:
        root: the directory.

    Raises:
        FileNotFoundError: there is no such directory.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root, self._lock = root, threading.Lock()
        self._paths, self._looked = find_runs(root), time.monotonic()
        self._cards: dict[str, tuple[tuple[str, str], float, RunCard]] = {}
        self._diagnoses: dict[str, tuple[str, float, Diagnosis]] = {}
        self._asked, self._worker = 0.0, threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def path(self, name: str) -> Path | None:
        """The directory of a run that was found; None for any other name."""
        return self._runs().get(name) or self._runs(look=0.0).get(name)  # it may be new

    def card(self, name: str) -> RunCard | None:
        """The row of a run; None if there is none of that name that can be read."""
        path = self.path(name)
        with contextlib.suppress(OSError, ValueError, KeyError, sqlite3.Error):  # it may be made, or removed, just now
            return None if path is None else self._card(name, path)
        return None

    def cards(self) -> list[RunCard]:
        """All rows, the latest run first. Only runs that have changed are read."""
        found = [card for name in self._runs() if (card := self.card(name)) is not None]
        self._ask()
        return sorted(found, key=lambda card: (card.began is None, -(card.began or 0.0), card.name))

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._worker.set()
        if self._thread is not None:
            self._thread.join()

    def _runs(self, look: float = _LOOK) -> dict[str, Path]:
        with self._lock:
            if time.monotonic() - self._looked > look:
                with contextlib.suppress(OSError):
                    self._paths = find_runs(self._root)
                self._looked = time.monotonic()
            return self._paths

    def _card(self, name: str, path: Path) -> RunCard:
        now = time.monotonic()
        with self._lock:
            known, diagnosed = self._cards.get(name), self._diagnoses.get(name)
        current = version(path), "" if diagnosed is None else diagnosed[0]
        if known is not None and known[0] == current and (known[2].state == "ended" or now - known[1] < _AGES):
            return known[2]
        card = run_card(path, name, None if diagnosed is None else diagnosed[2])
        with self._lock:
            self._cards[name] = current, now, card
        return card

    def _ask(self) -> None:
        """Let the thread diagnose what has changed, as long as a page is open."""
        with self._lock:
            self._asked = time.monotonic()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._work, name="torch_gradmon diagnoses", daemon=True)
                self._thread.start()
        self._worker.set()

    def _work(self) -> None:
        while not self._closed:
            self._worker.clear()
            for name, path in self._runs().items():
                if self._closed or time.monotonic() - self._asked > _ASKED:
                    break
                self._diagnose(name, path)
            self._worker.wait(1.0 if time.monotonic() - self._asked < _ASKED else None)

    def _diagnose(self, name: str, path: Path) -> None:
        current, begin = version(path), time.monotonic()
        known = self._diagnoses.get(name)
        if known is not None and (known[0] == current or begin < known[1]):
            return
        with contextlib.suppress(OSError, ValueError, KeyError, sqlite3.Error):
            found = diagnose(path)
            end = time.monotonic()
            with self._lock:
                self._diagnoses[name] = current, end + (end - begin) / _SHARE, found

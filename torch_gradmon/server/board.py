"""What is known of all runs: a row for each, kept up to date, a diagnosis of each from a thread of its own, and alerts about them."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..analysis.diagnosis.findings import Diagnosis
from ..analysis.many_runs import RunCard
from ..analysis.run import diagnose, find_runs, is_below
from ..core.errors import error_text
from ..core.formatting import placed
from ..runs.format import version
from ..runs.liveness import duration
from ..runs.log import reading_within
from ..sinks.alerts import Alert, Messenger

# --- One run as the server knows it: its row and its diagnosis ---

_LOG = logging.getLogger(__name__)
#: Shares of the time that reading the row of a run, and its diagnosis, may take while it is written: both take longer as a run
#: grows.
_OF_ROWS, _OF_DIAGNOSES = 0.1, 0.05
#: Seconds that reading a row, and a diagnosis, may take: one run must not keep the others from being shown.
ROW_SECONDS, DIAGNOSIS_SECONDS = 5.0, 60.0
#: Seconds after which a row is read again although its file is the same: a run that has become silent does not write.
_AGES = 5.0


class WatchedRun:
    """Reads a run where its file has changed, one thread at a time. Safe to use from several threads, and raises nothing."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._reading = threading.Lock()
        self._card: RunCard | None = None
        self._read_at, self._due = 0.0, 0.0
        self._shown: tuple[str, str] | None = None  # versions of the file and of the diagnosis that the row has
        self._diagnosis: tuple[str, float | None, Diagnosis] | None = None  # of a version, and of a run that began then
        self._diagnosis_due = 0.0
        self._complained = False

    @property
    def was_read(self) -> bool:
        return self._shown is not None

    def card(self) -> RunCard | None:
        """The row; an older one while another thread reads, or where the last look took long. None if the run cannot be read."""
        if not self._reading.acquire(blocking=not self.was_read):
            return self._card
        try:
            return self._look()
        finally:
            self._reading.release()

    def _look(self) -> RunCard | None:
        begin, current = time.monotonic(), version(self.path)
        shown = current, "" if self._diagnosis is None else self._diagnosis[0]
        has_aged = (self._card is None or self._card.state != "ended") and begin - self._read_at > _AGES
        if not current:
            self._card, self._shown, self._due = None, None, 0.0
        elif begin >= self._due and (shown != self._shown or has_aged):
            self._card = self._row()
            self._shown, self._read_at = shown, time.monotonic()
            self._due = self._read_at + (self._read_at - begin) / _OF_ROWS
        return self._card

    def _row(self) -> RunCard | None:
        try:
            diagnosed = self._diagnosis
            with reading_within(ROW_SECONDS):
                card = RunCard(self.path, self.name, None if diagnosed is None else diagnosed[2])
                if diagnosed is not None and diagnosed[1] != card.began:  # of another run in the same directory
                    self._diagnosis = None
                    card = RunCard(self.path, self.name)
                return card
        except Exception as error:  # it may be made, or removed, just now; or a later version wrote it
            self._complain(error)
            return None

    def diagnose(self) -> None:
        """Apply the rules, if the run has changed and enough time has passed since the last time."""
        begin, current, card = time.monotonic(), version(self.path), self.card()
        if card is None or begin < self._diagnosis_due or (self._diagnosis is not None and self._diagnosis[0] == current):
            return
        try:
            with reading_within(DIAGNOSIS_SECONDS):
                found = diagnose(self.path)
        except Exception as error:
            self._complain(error)
            return
        finally:
            end = time.monotonic()
            self._diagnosis_due = end + (end - begin) / _OF_DIAGNOSES
        self._diagnosis = current, card.began, found

    def _complain(self, error: Exception) -> None:
        """Once, unless the run is gone."""
        if not self._complained and version(self.path):
            self._complained = True
            _LOG.warning("gradmon: the run %s cannot be read and is left out: %s", self.name, error_text(error))


# --- All runs ---

#: Seconds between two looks for new runs, and seconds after the last request in which the thread still works.
_LOOK, _ASKED = 2.0, 10.0
#: Seconds after which rows that were never read before wait for the next request.
_PATIENCE = 8.0
#: Looking for runs takes at most this share of the time.
_SHARE = 0.1


class RunBoard:
    """The runs below a directory. Safe to use from several threads."""

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


# --- Alerts from outside of the trainings: a run that stalls, a new spike, a new finding ---

#: Seconds between two looks, and between two alerts about spikes of one run.
_LOOK_FOR_ALARMS, _QUIET = 1.0, 60.0


class RunAlarms:
    """What was reported of one run; ``before`` is its row when looking began, None if it appeared later, so that all of it is new."""

    def __init__(self, before: RunCard | None = None) -> None:
        self._began: float | None = None if before is None else before.began
        self._stalled_at = before.step if before is not None and before.has_stalled else None
        self._spikes = 0 if before is None else before.spikes
        self._last = -_QUIET
        self._rules = set() if before is None else {rule for _, rule, _ in before.findings}
        #: What the first diagnosis of a run finds is old, if the run is.
        self._is_old = before is not None and not before.is_diagnosed

    def new(self, card: RunCard) -> Iterator[Alert]:
        if self._began is not None and card.began != self._began:  # another run in the same directory
            self._stalled_at, self._spikes, self._rules, self._is_old = None, 0, set(), False
        self._began = card.began
        if card.step != self._stalled_at and card.has_stalled:
            self._stalled_at = card.step
            often = "" if card.usual is None else f", where one is due every {duration(card.usual)}"
            text = f"{card.name}: no step for {duration(card.age)} since step {card.step}{often}"
            yield Alert("stalled", text, card.name, card.step)
        yield from self._new_spikes(card)
        fresh = [each for each in card.findings if each[1] not in self._rules and each[0] != "info" and each[1] != "spike"]
        self._rules |= {rule for _, rule, _ in fresh}
        if self._is_old and card.is_diagnosed:
            self._is_old = False
            return
        for severity, rule, where in fresh:
            text = f"{card.name}: {severity or 'found'} {placed(rule, where)}"
            yield Alert("finding", text, card.name, card.step, rule, where)

    def _new_spikes(self, card: RunCard) -> Iterator[Alert]:
        count, now = card.spikes - self._spikes, time.monotonic()
        if count > 0 and now - self._last < _QUIET:
            return  # with the next one
        self._spikes = card.spikes
        if count > 0:
            self._last = now
            text = f"{card.name}: {card.last_spike}{f' (and {count - 1} more before)' if count > 1 else ''}"
            yield Alert("spike", text, card.name, card.last_spike_step, "", card.last_spike_where)


class Alarms:
    """Looks at all runs of a board, and reports what is new since it began; ``target`` as in :class:`torch_gradmon.sinks.AlertSink`."""

    def __init__(self, board: RunBoard, target: str | Callable[[Alert], object]) -> None:
        self._board, self._messenger = board, Messenger(target)
        self._runs = {card.name: RunAlarms(card) for card in board.cards()}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="torch_gradmon alarms", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self._messenger.close()

    def _work(self) -> None:
        while not self._end.wait(_LOOK_FOR_ALARMS):
            cards = self._board.cards()
            for card in cards:
                for alert in self._runs.setdefault(card.name, RunAlarms()).new(card):
                    self._messenger.send(alert)
            names = {card.name for card in cards}
            self._runs = {name: run for name, run in self._runs.items() if name in names}

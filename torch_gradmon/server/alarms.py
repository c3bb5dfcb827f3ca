"""Alerts from outside of the trainings: a run that stalls, a new spike, a new finding."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from ..analysis.many_runs import RunCard, has_stalled
from ..core.formatting import placed
from ..runs.liveness import duration
from ..sinks.alerts import Alert, Messenger
from .board import RunBoard

#: Seconds between two looks, and between two alerts about spikes of one run.
_LOOK, _QUIET = 1.0, 60.0


class RunAlarms:
    """What was reported of one run.

    Args:
        before: the row of the run as it was when looking began; None of a run that appeared later, whose spikes and findings are all new.
    """

    def __init__(self, before: RunCard | None = None) -> None:
        self._began: float | None = None if before is None else before.began
        self._stalled_at = before.step if before is not None and has_stalled(before) else None
        self._spikes = 0 if before is None else before.spikes
        self._last = -_QUIET
        self._rules = set() if before is None else {rule for _, rule, _ in before.findings}
        #: What the first diagnosis of a run finds is old, if the run is.
        self._is_old = before is not None and not before.is_diagnosed

    def new(self, card: RunCard) -> Iterator[Alert]:
        if self._began is not None and card.began != self._began:  # another run in the same directory
            self._stalled_at, self._spikes, self._rules, self._is_old = None, 0, set(), False
        self._began = card.began
        yield from self._stalls(card)
        yield from self._new_spikes(card)
        fresh = [each for each in card.findings if each[1] not in self._rules and each[0] != "info" and each[1] != "spike"]
        self._rules |= {rule for _, rule, _ in fresh}
        if self._is_old and card.is_diagnosed:
            self._is_old = False
            return
        for severity, rule, where in fresh:
            text = f"{card.name}: {severity or 'found'} {placed(rule, where)}"
            yield Alert("finding", text, card.name, card.step, rule, where)

    def _stalls(self, card: RunCard) -> Iterator[Alert]:
        if card.step != self._stalled_at and has_stalled(card):
            self._stalled_at = card.step
            often = "" if card.usual is None else f", where one is due every {duration(card.usual)}"
            text = f"{card.name}: no step for {duration(card.age)} since step {card.step}{often}"
            yield Alert("stalled", text, card.name, card.step)

    def _new_spikes(self, card: RunCard) -> Iterator[Alert]:
        count, now = card.spikes - self._spikes, time.monotonic()
        if count > 0 and now - self._last >= _QUIET:
            self._last = now
            text = f"{card.name}: {card.last_spike}{f' (and {count - 1} more before)' if count > 1 else ''}"
            yield Alert("spike", text, card.name, card.last_spike_step, "", card.last_spike_where)
        elif count > 0:
            return  # with the next one
        self._spikes = card.spikes


class Alarms:
    """Looks at all runs of a board, and reports what is new since it began; of runs that appear later, everything.

    Args:
        board: of the runs.
        target: see :class:`torch_gradmon.sinks.AlertSink`.
    """

    def __init__(self, board: RunBoard, target: str | Callable[[Alert], object]) -> None:
        self._board, self._messenger = board, Messenger(target)
        self._runs: dict[str, RunAlarms] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="torch_gradmon alarms", daemon=True)

    def start(self) -> None:
        self._runs = {card.name: RunAlarms(card) for card in self._board.cards()}
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        self._messenger.close()

    def _work(self) -> None:
        while not self._end.wait(_LOOK):
            cards = self._board.cards()
            for card in cards:
                for alert in self._runs.setdefault(card.name, RunAlarms()).new(card):
                    self._messenger.send(alert)
            names = {card.name for card in cards}
            self._runs = {name: run for name, run in self._runs.items() if name in names}

"""Alerts from outside of the trainings: a run that stalls, a new spike, a new finding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from ..analysis.many_runs.card import RunCard
from ..runs.liveness import duration
from ..sinks.alerts import Alert, Messenger
from .board import Board

#: A run has stalled if its last step is older than this number of usual intervals, and than this number of seconds.
TIMES, LEAST = 10.0, 10.0
#: Seconds between two looks.
_LOOK = 1.0


class RunAlarms:
    """What was reported of one run.

    Args:
        before: the row of the run as it was when looking began; None of a run that appeared later, whose spikes and findings are all new.
    """

    def __init__(self, before: RunCard | None = None) -> None:
        self._stalled_at: int | None = None
        self._spikes = 0 if before is None else before.spikes
        self._rules = set() if before is None else {rule for _, rule, _ in before.findings}

    def new(self, card: RunCard) -> Iterator[Alert]:
        """The alerts that its row calls for."""
        if card.step != self._stalled_at and has_stalled(card):
            self._stalled_at = card.step
            often = "" if card.usual is None else f", where one is due every {duration(card.usual)}"
            text = f"{card.name}: no step for {duration(card.age)} since step {card.step}{often}"
            yield Alert("stalled", text, card.name, card.step)
        if card.spikes > self._spikes:
            text = f"{card.name}: {card.spikes - self._spikes} new; the largest spike: {card.worst_spike}"
            yield Alert("spike", text, card.name, card.spike_step, "", card.spike_where)
        self._spikes = card.spikes
        for severity, rule, where in card.findings:
            if rule not in self._rules and severity != "info" and rule != "spike":
                self._rules.add(rule)
                text = f"{card.name}: {severity or 'found'} {rule}{f' in {where}' if where else ''}"
                yield Alert("finding", text, card.name, card.step, rule, where)


class Alarms:
    """Looks at all runs of a board, and reports what is new since it began; of runs that appear later, everything.

    Args:
        board: of the runs.
        target: see :meth:`ModuleMonitor.add_alert`.
    """

    def __init__(self, board: Board, target: str | Callable[[Alert], object]) -> None:
        self._board, self._messenger = board, Messenger(target)
        self._runs: dict[str, RunAlarms] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="torch_gradmon alarms", daemon=True)

    def start(self) -> None:
        """Begin to look, every second."""
        self._runs = {card.name: RunAlarms(card) for card in self._board.cards()}
        self._thread.start()

    def close(self) -> None:
        """End, and let what is under way arrive."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        self._messenger.close()

    def _work(self) -> None:
        while not self._end.wait(_LOOK):
            for card in self._board.cards():
                for alert in self._runs.setdefault(card.name, RunAlarms()).new(card):
                    self._messenger.send(alert)


def has_stalled(card: RunCard) -> bool:
    """Whether no step has come for ten times the usual, of a run that has not ended."""
    return card.state not in ("ended", "empty") and card.usual is not None and card.age > max(TIMES * card.usual, LEAST)

"""Requests for a change of detail, from the program or from a file, and their state in the run directory."""

from __future__ import annotations

import secrets
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from ...core.errors import WarningLog
from ...runs.detail_request import DetailRequest, numbered
from ...step.exchange import EMPTY_SLOT
from ...step.ranks import Ranks
from .request_file import RequestFile


class RunNotes(Protocol):
    """Where facts about the run are noted."""

    @property
    def path(self) -> Path | None:
        """The run directory, if there is one."""

    def annotate(self, **facts: Any) -> None:
        """Add facts about the run."""

    def reopen(self) -> None:
        """Mark the run in the directory as active again."""


class Requests:
    """The requests for one monitor.

    Args:
        notes: the run directory, in which the state of changes is noted.
        ranks: the first one decides for all.
        complaints: receives a warning about each refused request.

    Attributes:
        from_code: the last request from the program itself, without a number yet.
        asked: the request that the ranks have not agreed on yet.
    """

    def __init__(self, notes: RunNotes, ranks: Ranks, complaints: WarningLog) -> None:
        self._notes, self._ranks, self._complaints = notes, ranks, complaints
        self.from_code: deque[DetailRequest] = deque(maxlen=1)
        self.asked: DetailRequest | None = None
        self._number = 0
        self._has_left = False
        self._facts: dict[str, Any] = {"session": secrets.token_hex(8), "listens": False}
        self._file: RequestFile | None = None
        if notes.path is not None:
            self._file = RequestFile(notes.path, self._facts["session"], complaints, lambda: ranks.is_first)
            self._facts["listens"] = ranks.is_first
            notes.annotate(tune=self._facts)

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks."""
        return self._ranks.count > 1

    def look(self) -> bool:
        """Check the file for a new request. Returns whether there is one."""
        change = None if self._file is None else self._file.look()
        if change is not None:
            self._take(change)
        return change is not None

    def receive(self) -> None:
        """Take the request from the program itself, if any."""
        if self.from_code:
            self._take(numbered(self.from_code.pop(), self._number + 1))

    def _take(self, change: DetailRequest) -> None:
        self.asked, self._number = change, max(self._number, change.number)
        self.note(number=self._number, waits=change.facts(), why="")

    def take(self) -> DetailRequest | None:
        """The request that the ranks agree on now."""
        asked, self.asked = self.asked, None
        return asked

    def clear(self) -> None:
        """Forget what was requested."""
        self.from_code.clear()
        self.asked = None

    def broadcast(self) -> tuple[float, ...]:
        """The request as numbers for the other ranks; zeros without one, and on all other ranks."""
        return self.asked.numbers() if self.asked is not None and self._ranks.is_first else EMPTY_SLOT

    def wait_for_exchange(self) -> None:
        """Keep the request for the next exchange on the first rank; drop it on all others."""
        if self._ranks.is_first:
            self.note(why="the first rank sends it to the others in the next monitored step")
        else:
            self.asked = None

    def refuse(self, why: str) -> None:
        """Refuse the request, and record the reason."""
        self._complaints.add("tune:ranks", f"a change of detail is refused: {why}")
        number, self.asked = self._number, None
        self.note(waits=None, why=f"number {number} was refused: {why}")

    def agreed(self, number: int) -> None:
        """Record that all ranks agreed to the request of this number."""
        self._number = max(self._number, number)
        if self.asked is not None and (not self._ranks.is_first or self.asked.number <= number):
            self.asked = None

    # --- the run directory -----------------------------------------------------------------------------------------------------

    def note_in_force(self, change: DetailRequest, since: int, until: int | None, why: str) -> None:
        """Record a change that has its first step."""
        facts = {**change.facts(), "since": since, "until": until}
        self.note(in_force=facts, waits=None if self.asked is None else self.asked.facts(), why=why)

    def leave(self) -> None:
        """Record that the monitor leaves the run."""
        self._has_left = True
        self.note(listens=False, ended=True, waits=None)

    def reopen(self) -> None:
        """Record at the start of a step that the run continues, if the monitor had left it."""
        if self._has_left:
            self._has_left = False
            self._notes.reopen()
            self.note(listens=self._ranks.is_first, ended=None)

    def note(self, **facts: Any) -> None:
        """Note facts that are new."""
        known = {name: value for name, value in {**self._facts, **facts}.items() if value not in (None, "")}
        if known != self._facts:
            self._facts = known
            if self._file is not None:
                self._notes.annotate(tune=known)

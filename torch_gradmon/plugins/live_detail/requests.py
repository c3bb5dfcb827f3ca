"""Requests for a change of detail: from the program or from a file, and what the run directory says of them."""

from __future__ import annotations

import secrets
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from ...core.errors import WarningLog
from ...runs.detail_request import DetailRequest, numbered
from ...step.exchange import SILENCE
from ...step.ranks import Ranks
from .request_file import Mailbox


class RunNotes(Protocol):
    """Where facts about the run are noted."""

    @property
    def directory(self) -> Path | None:
        """The run directory, if there is one."""

    def note(self, **facts: Any) -> None:
        """Add facts about the run."""

    def reopen(self) -> None:
        """Let who looks into the directory know that the run goes on."""


class Requests:
    """What is requested of one monitor.

    Args:
        notes: the run directory, in which the state of changes is noted.
        ranks: the first one speaks for all.
        complaints: where it is reported what cannot be done.

    Attributes:
        from_code: the last request from within the program, which has no number yet.
        asked: the request that waits to be agreed.
    """

    def __init__(self, notes: RunNotes, ranks: Ranks, complaints: WarningLog) -> None:
        self._notes, self._ranks, self._complaints = notes, ranks, complaints
        self.from_code: deque[DetailRequest] = deque(maxlen=1)
        self.asked: DetailRequest | None = None
        self._number = 0
        self._has_left = False
        self._facts: dict[str, Any] = {"session": secrets.token_hex(8), "listens": False}
        self._file: Mailbox | None = None
        if notes.directory is not None:
            self._file = Mailbox(notes.directory, self._facts["session"], complaints, lambda: ranks.is_first)
            self._facts["listens"] = ranks.is_first
            notes.note(tune=self._facts)

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks."""
        return self._ranks.count > 1

    def look(self) -> bool:
        """Look for a new request in the file; whether there is one."""
        change = None if self._file is None else self._file.look()
        if change is not None:
            self._take(change)
        return change is not None

    def receive(self) -> None:
        """Take the request from within the program, if any."""
        if self.from_code:
            self._take(numbered(self.from_code.pop(), self._number + 1))

    def _take(self, change: DetailRequest) -> None:
        self.asked, self._number = change, max(self._number, change.number)
        self.note(number=self._number, waits=change.facts(), why="")

    def broadcast(self) -> tuple[float, ...]:
        """The request as numbers for the other ranks; zeros where there is none, and on all ranks but the first."""
        return self.asked.numbers() if self.asked is not None and self._ranks.is_first else SILENCE

    def wait_for_exchange(self) -> None:
        """The other ranks learn of the request in the next exchange; that of another rank than the first does not count."""
        if self._ranks.is_first:
            self.note(why="the ranks tell each other of it in the next step that is monitored")
        else:
            self.asked = None

    def refuse(self, why: str) -> None:
        """The request cannot be met."""
        self._complaints.add("tune:ranks", f"a change of detail is refused: {why}")
        number, self.asked = self._number, None
        self.note(waits=None, why=f"number {number} was refused: {why}")

    def agreed(self, number: int) -> None:
        """All ranks agreed to the request of this number."""
        self._number = max(self._number, number)
        if self.asked is not None and (not self._ranks.is_first or self.asked.number <= number):
            self.asked = None

    # --- the run directory -----------------------------------------------------------------------------------------------------

    def note_in_force(self, change: DetailRequest, since: int, until: int | None, why: str) -> None:
        """A change has its first step."""
        facts = {**change.facts(), "since": since, "until": until}
        self.note(in_force=facts, waits=None if self.asked is None else self.asked.facts(), why=why)

    def leave(self) -> None:
        """The monitor leaves the run."""
        self._has_left = True
        self.note(listens=False, ended=True, waits=None)

    def reopen(self) -> None:
        """A step has opened; after the monitor left the run it goes on."""
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
                self._notes.note(tune=known)

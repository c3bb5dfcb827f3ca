"""The run directory as a consumer of records, which must not fail."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import WarningLog
from ...core.process import HomeProcess, process_facts
from ...core.records import StepRecord

if TYPE_CHECKING:
    from ...runs.writer import RunWriter

_REPLACED = (
    "the run directory {} has a run with steps up to {}, and this one, which begins with step {}, takes its place; to keep both give "
    "each a run_dir of its own, and to resume pass start_step= or call load_state_dict()"
)
_GONE = "the run directory {} was deleted or moved while this run was recorded there, and its steps{} went with it"
_TAKEN = (
    "the file in the run directory {} is no longer the one that this run is recorded in: it was replaced, and the steps{} are lost. "
    "Nothing more is written there; give each run a run_dir of its own"
)


class RunDirectory:
    """Stores each record at once, and its replacement when a value is added.

    Args:
        path: the run directory; None for none.
        meta: facts about the run.
        complaints: where failures are reported.
        is_muted: whether another rank writes the output of this one.
        tells: whether a line on stderr says at the end what is wrong with the run.

    Attributes:
        keep_alive: the writer, which must stay alive until the last record is written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        meta: Mapping[str, Any],
        complaints: WarningLog,
        is_muted: Callable[[], bool],
        tells: bool = False,
    ) -> None:
        self._writer: RunWriter | None = None
        self._process = HomeProcess()
        self.keep_alive: list[object] = []
        self._path, self._complaints, self._is_muted = path, complaints, is_muted
        self._meta = dict(meta) if path is None else {**meta, "process": process_facts()}
        self._is_taken = False  # the directory, by another writer
        self._has_lost = False  # a step
        self._unwritten = 0  # steps
        self._is_noted = False  # in the file, that the steps after the last one are lost
        self._is_lost = False  # the directory, which is made anew as soon as there is a place for it
        self._has_claimed = False  # the directory, with its first step
        self._tells, self._has_news = tells, False  # since the end was told last
        if path is not None and not is_muted():
            self._opened(path)

    def __del__(self) -> None:
        self._end()
        if self._path is not None and self._is_to_tell():  # at any moment of the script, whose end is soon enough
            from .last_word import say

            atexit.register(say, self._path)

    @property
    def stores(self) -> bool:
        """Whether this rank, or the one that writes its output, has a run directory."""
        return self._path is not None

    @property
    def path(self) -> Path | None:
        """The run directory of this rank, or of the one that writes its output."""
        return None if self._path is None else Path(self._path)

    @property
    def description(self) -> str:
        """The run directory as part of a message; empty without one."""
        return f"the run directory {os.fspath(self._path)!r}" if self._path is not None else ""

    @property
    def has_lost(self) -> bool:
        """Whether a step is not in the run directory, as far as is known."""
        return self._has_lost

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts about the run, with a directory or without."""
        return self._meta

    def annotate(self, **facts: Any) -> None:
        """Add facts about the run."""
        self._meta.update(facts)
        if self._writer is not None and not self._process.is_forked:
            try:
                self._writer.annotate(facts)
            except (OSError, ValueError) as error:
                self._complaints.add("store", f"the run directory {self._path} could not be written", error)

    def rewind(self, step: int) -> None:
        """Drop the steps from ``step`` on, which belong to another branch: the run resumes at ``step``.

        With its first step this monitor becomes the writer of the directory.
        """
        if self._writer is not None and not self._process.is_forked:
            try:
                if not self._has_claimed and self._writer.replaces_all(step):
                    self._complaints.add("replaced", _REPLACED.format(self._path, self._writer.last, step))
                self._claim(self._writer)
                self._writer.rewind(step)
            except (OSError, ValueError) as error:
                self._complaints.add("store", f"the run directory {self._path} could not be written", error)

    def write(self, record: StepRecord, amends: bool = False, backfills: bool = False) -> None:
        """Store ``record``: of a new step, in place of the last one, or of an earlier step."""
        if self._path is None or self._process.is_forked or self._is_muted():
            return
        if self._is_taken:
            self._complaints.counts["store"] += 1
            self._unwritten += not amends
            return
        if self._is_lost and (amends or self._obstacle(self._path)):  # what would be amended is lost
            self._complaints.counts["gone"] += not amends
            self._unwritten += not amends
            return
        self._is_lost = False
        from ...runs.writer import Superseded

        try:
            if not amends and self.is_gone(record.step):
                return
            writer = self._opened(self._path)
            self._claim(writer)
            writer.log(record, update=amends, backfill=backfills)
            self._has_news, self._is_noted = True, False
        except Superseded:
            self._is_taken = self._has_lost = True
            message = (
                f"another monitor writes to the run directory {self._path} by now, so that this one, with step {record.step}, writes "
                "there no more; give each a run_dir of its own"
            )
            self._complaints.add("store", message)
        except (OSError, ValueError) as error:
            self._has_lost = True
            self._unwritten += not amends
            message = (
                f"step {record.step} could not be written to the run directory {self._path}; training continues, and later steps are "
                "written as soon as that succeeds again"
            )
            self._note_loss(error)
            self._complaints.add("store", message, error)

    def _note_loss(self, error: Exception) -> None:
        """Say in the file that steps are lost, as nothing may be said later: a disk without room for a step often has some for this."""
        if (writer := self._writer) is not None and not self._is_noted:
            why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else type(error).__name__
            with contextlib.suppress(OSError, ValueError):
                writer.annotate({"unwritten": self._unwritten, "lost_after": writer.last, "lost_why": why})
                self._is_noted = True

    def is_gone(self, step: int | None = None) -> bool:
        """Whether nothing can be recorded now because someone else took the file away.

        Where it was deleted, it is made anew for ``step`` and later ones, unless that is None. Not with its parents: who deletes a whole
        tree of runs, as of a temporary directory, does not want it back. The remedy is in the warning.
        """
        writer, path = self._writer, self._path
        if writer is None or path is None or self._process.is_forked or (found := writer.presence()) == "there":
            return False
        self._has_lost = True
        span = "" if writer.last is None else f" up to {writer.last}"
        self._close()
        if found == "replaced":
            self._is_taken = True
            self._complaints.add("gone", _TAKEN.format(path, span))
            return True
        self._has_claimed, gone = False, _GONE.format(path, span)
        if step is None:
            self._complaints.add("gone", gone)
            return True
        if obstacle := self._obstacle(path):
            self._is_lost = True
            self._complaints.add("gone", f"{gone}; the steps from {step} on are lost too, until you {obstacle}")
            return True
        self._complaints.add("gone", f"{gone}; it is made anew, for the steps from {step} on")
        return False

    @staticmethod
    def _obstacle(path: str | os.PathLike[str]) -> str:
        """What to do before the directory can be made anew; empty for nothing."""
        parent = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(parent):
            return f"make the directory {parent} again"
        if os.path.exists(path) and not os.path.isdir(path):
            return f"remove the file {os.fspath(path)}, which took its place"
        return ""

    def _claim(self, writer: RunWriter) -> None:
        """Claim the directory once, with the first step: if another monitor claims it later, that one keeps it."""
        if not self._has_claimed:
            writer.claim(self._meta)
            self._has_claimed = True

    def _opened(self, path: str | os.PathLike[str]) -> RunWriter:
        from ...runs.writer import RunWriter

        if self._writer is None:
            self._writer = RunWriter(path, self._meta)
            self.keep_alive.append(self._writer)
        return self._writer

    def reopen(self) -> None:
        """Mark the directory of a closed run as active again, before the first record comes.

        Nothing changes if this monitor no longer writes there, as after another monitor has claimed the directory.
        """
        if self._path is not None and not self._is_taken and not self._is_muted() and not self._process.is_forked:
            with contextlib.suppress(OSError, ValueError):  # the first record reports the failure
                self._opened(self._path).claim(self._meta)

    def close(self, raised: str = "") -> None:
        """Close the file; another record opens it again. What is wrong with the run is told, unless nobody wants to know.

        ``raised`` is the exception that ends the training, as text.
        """
        self._end(raised)
        if self._path is not None and self._is_to_tell():
            from .last_word import say

            say(self._path)

    def _is_to_tell(self) -> bool:
        """Once for the steps so far."""
        told, self._has_news = not self._has_news, False
        return self._tells and not told and not self._process.is_forked

    def _end(self, raised: str = "") -> None:
        """Close the file. Of a monitor that nobody detached no plugin has noted that the run ended."""
        writer, tune = self._writer, self._meta.get("tune", {})
        if writer is not None and not self._process.is_forked:
            if not tune.get("ended"):
                tune = {**{name: fact for name, fact in tune.items() if name not in ("listens", "waits")}, "ended": True}
            with contextlib.suppress(OSError, ValueError):
                # again, where a plugin has noted the end: on a full disk that may be lost
                writer.annotate({"raised": raised, "unwritten": self._unwritten, "tune": tune})
        self._close()

    def _close(self) -> None:
        if (writer := self._writer) is not None and not self._process.is_forked:
            self._writer = None
            self.keep_alive.remove(writer)
            writer.close()

"""Changes to the cadence and preset, requested during a run."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ..core.errors import GradmonWarning, WarningLog
from ..core.records import Metric
from ..runs import detail_request as change
from ..runs.detail_request import DetailRequest
from ..step.active_step import ActiveStep
from ..step.exchange import EMPTY_SLOT, ExchangePolicy
from ..step.planner import OF_MODULES, PRESETS, Planner
from ..step.plugin import Plugin
from ..step.ranks import Ranks
from ..step.summary import Summary

# --- Requests from other processes: a small file in the run directory ---


#: Seconds between two looks at the file.
PERIOD = 1.0


class RequestFile:
    """Checks ``tune.json`` at most once a second, and reads it only if it has changed.

    A check reads the clock, and once a second calls ``os.stat``. An invalid file does not stop training.

    Args:
        session: the identifier of this monitor; requests for an earlier one are ignored.
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


# --- requests ---


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
        ranks: the first one decides for all.

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

    def look(self) -> bool:
        """Check the file for a new request. Returns whether there is one."""
        change = None if self._file is None else self._file.look()
        if change is not None:
            self._take(change)
        return change is not None

    def receive(self) -> None:
        if self.from_code:
            self._take(replace(self.from_code.pop(), number=self._number + 1))

    def _take(self, change: DetailRequest) -> None:
        self.asked, self._number = change, max(self._number, change.number)
        self.note(number=self._number, waits=change.facts(), why="")

    def take(self) -> DetailRequest | None:
        asked, self.asked = self.asked, None
        return asked

    def clear(self) -> None:
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
        self._complaints.add("tune:ranks", f"a change of detail is refused: {why}")
        number, self.asked = self._number, None
        self.note(waits=None, why=f"number {number} was refused: {why}")

    def agreed(self, number: int) -> None:
        self._number = max(self._number, number)
        if self.asked is not None and (not self._ranks.is_first or self.asked.number <= number):
            self.asked = None

    # --- the run directory -----------------------------------------------------------------------------------------------------

    def note_in_force(self, change: DetailRequest, since: int, until: int | None, why: str) -> None:
        facts = {**change.facts(), "since": since, "until": until}
        self.note(in_force=facts, waits=None if self.asked is None else self.asked.facts(), why=why)

    def leave(self) -> None:
        self._has_left = True
        self.note(listens=False, ended=True, waits=None)

    def reopen(self) -> None:
        """Record at the start of a step that the run continues, if the monitor had left it."""
        if self._has_left:
            self._has_left = False
            self._notes.reopen()
            self.note(listens=self._ranks.is_first, ended=None)

    def note(self, **facts: Any) -> None:
        known = {name: value for name, value in {**self._facts, **facts}.items() if value not in (None, "")}
        if known != self._facts:
            self._facts = known
            if self._file is not None:
                self._notes.annotate(tune=known)


# --- Live changes of detail in the training process: requests, when they take effect, and how they end ---


_COMPILED = (
    "something was compiled, which may be the model, so that modules get no hooks in the middle of the run: a change of detail leaves "
    "activations and attention as the script asked for"
)


class LiveDetail(Plugin):
    """Temporarily replaces the cadence and preset of the script.

    Attributes:
        in_force: the change that applies to the open step.
        left: the number of steps for which it applies, including this one; None for no end.
    """

    name = "live_detail"

    def __init__(
        self,
        planner: Planner,
        summary: Summary,
        may_add_hooks: Callable[[], bool],
        notes: RunNotes,
        exchange: ExchangePolicy,
        complaints: WarningLog,
    ) -> None:
        self._planner, self._summary, self._may_add_hooks = planner, summary, may_add_hooks
        self._exchange = exchange
        self._why_missing = ""  # why a part of the preset is not measured
        self._requests = Requests(notes, exchange.exchange.ranks, complaints)
        self._agreed: DetailRequest | None = None  # waits for its first step
        self.in_force: DetailRequest | None = None
        self.left: int | None = None
        self._since: int | None = None  # its first step; None before that began
        self._raised: GradmonWarning | None = None

    # --- requests --------------------------------------------------------------------------------------------------------------

    def request(self, change: DetailRequest) -> None:
        """Request a change from within the program, from any thread, or in a signal handler."""
        self._requests.from_code.append(change)
        self.watches_idle_steps = True  # after the request, see _update_pending

    def _update_pending(self) -> None:
        """Clear ``watches_idle_steps`` when no request is active; a request that comes at this very moment sets it again."""
        self.watches_idle_steps = (self.in_force or self._requests.asked or self._agreed) is not None
        if self._requests.from_code:
            self.watches_idle_steps = True

    def _accept(self) -> None:
        """Agree to the request at once in a single process; have it broadcast, or refuse it, where there are other ranks."""
        requests = self._requests
        requests.receive()
        if requests.asked is None:
            return
        if self._exchange.exchanges_values:
            requests.wait_for_exchange()
        elif self._exchange.exchange.ranks.count > 1:
            requests.refuse("the ranks exchange nothing, so that the other ones cannot follow")
        else:
            self._agreed = requests.take()

    def _take_broadcast(self) -> None:
        received = self._exchange.exchange.take_received()
        if received[0]:
            self._agreed = DetailRequest.of_numbers(received)
            self._requests.agreed(self._agreed.number)

    # --- steps -----------------------------------------------------------------------------------------------------------------

    def before_step(self, step: int) -> None:
        """A step is about to open, which may be the first one under a request that came since the last one closed."""
        self._accept()
        self._change(step)

    def on_step_open(self, step: ActiveStep) -> None:
        """The first step under a change is the one that is noted."""
        self._requests.reopen()
        step.sets_cadence = self.in_force is not None and self.in_force.every is not None
        if self.in_force is not None and self._since is None:
            self._since = step.number
            until = None if self.left is None else step.number + (self.left - 1) * step.stride
            self._requests.note_in_force(self.in_force, step.number, until, self._why_missing)

    def on_step_closing(self, step: ActiveStep) -> None:
        """The ranks are about to exchange: broadcast what is requested."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised
        if self._requests.look():
            self.watches_idle_steps = True
        if self._watches_idle_steps:  # without the call of a property in each step
            self._requests.receive()
            self._exchange.exchange.broadcast(self._requests.broadcast())

    def annotate(self, step: ActiveStep) -> None:
        if self.in_force is not None:
            facts = self.in_force.facts().items()
            step.annotations["tuned"] = {name: value for name, value in facts if name in ("every", "preset", "number")}

    def on_step_closed(self, step: ActiveStep) -> None:
        """Count the step, take what was broadcast in it, and change."""
        has_received = self._exchange.exchange.has_received
        if not (self._watches_idle_steps or has_received):
            return
        if has_received:
            self._take_broadcast()
        if self.left is not None:
            self.left -= 1
        self._accept()
        self._update_pending()
        self._change(step.number + 1)

    def may_miss(self) -> int:
        """All idle steps while no request is known; a look at the file is due after a second, see :class:`IdleStretch`."""
        return 0 if self._watches_idle_steps or self.in_force is not None else sys.maxsize

    def wants(self, step: int, asked: bool) -> bool:
        try:
            if self._requests.look():
                self.watches_idle_steps = True
        except GradmonWarning as error:  # where warnings are errors; raised where it costs no step
            self._raised, self.watches_idle_steps = error, True
        every = None if self.in_force is None else self.in_force.every
        return asked if every is None else step % every == 0

    def foretells(self, step: int, asked: bool, ahead: int | None) -> bool:
        """The same of a later step, as long as the change lasts."""
        is_changed = ahead is not None and (self.left is None or ahead < self.left - self.context.is_step_open)
        return self.wants(step, asked) if is_changed else asked

    # --- changes ---------------------------------------------------------------------------------------------------------------

    def _change(self, step: int) -> None:
        """What was agreed comes into force for ``step``, the next one, or else what the script asked for."""
        is_due = self._agreed is not None and step >= (self._agreed.first or 0)
        if not is_due and self.left != 0:
            return
        try:
            self.context.flush_pending()  # under what it was measured under
        finally:
            was_changed = self.in_force is not None
            new: DetailRequest | None = None
            if is_due:
                new, self._agreed = self._agreed, None
            self._end_change("its steps are over" if new is None else "another one took its place")
            if new is not None and new.is_reset:
                self._requests.note(waits=None, last={**new.facts(), "since": step}, why="")
                new = None
            self.in_force, self.left = new, None if new is None else new.steps
            self._use(None if new is None else new.preset)
            self._update_pending()
            if was_changed != (self.in_force is not None):
                self.context.detail_changed(is_back=was_changed)
            self.context.ask_cadence_again()
            self.context.request_replan(drop_hooks=True)

    def _use(self, preset: str | None) -> None:
        """Measure ``preset`` in place of what the script does not show, or again what the script asked for."""
        self._why_missing = ""
        self.context.set_overlay(self.name, None if preset is None else self._metrics(preset), replaces_hidden=True)
        self._summary.choice.override_keys(None if preset is None else PRESETS[preset].keys)

    def _metrics(self, preset: str) -> list[Metric]:
        """What a preset measures out of sight; in a compiled model the script's own metrics of modules stay as they are."""
        made = [self.context.make_metric(source, name, every) for source, name, every in PRESETS[preset].layer_metrics]
        if self._may_add_hooks():
            return made
        if any(metric.source in OF_MODULES for metric in made):
            self._why_missing = _COMPILED
            self.context.warn("tune:compiled", _COMPILED)
        return [
            *(metric for metric in made if metric.source not in OF_MODULES),
            *(metric for metric in self._planner.registry.unseen if metric.source in OF_MODULES),
        ]

    def _end_change(self, why: str) -> None:
        if self.in_force is not None:
            ended = {**self.in_force.facts(), "since": self._since, "until": self.context.last_step, "ended": why}
            self.in_force = self.left = self._since = None
            self._requests.note(in_force=None, last=ended)

    def on_leave(self, last: int | None) -> None:
        self._requests.clear()
        self._agreed = None
        if self.in_force is not None:
            self._end_change("the run has ended, or its monitor was detached")
            self._use(None)
        self.watches_idle_steps = True  # until a step opens all the same: by hand, or after attach()
        self._requests.leave()

"""A live change of detail on the side of the training: what is asked for, when it comes into force, and how it ends.

A change is asked for by a file in the run directory (``gradmon detail``) or by :meth:`ModuleMonitor.set_detail`. Ranks have to monitor the
same steps wherever they tell each other anything, so there the first rank tells the others in the exchange of a monitored step, and
all change with the next step. Where ranks tell each other nothing, as under DDP with the presets ``cheap`` and ``standard``, the
first rank changes alone. Then it can measure more, but not less, and what it alone monitors is measured and written down, but neither
exchanged nor judged: so all that ranks may ever have to do together stays the same on all of them.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ...core.errors import Complaints
from ...core.metric import Metric
from ...runs.detail_request import Change, numbered
from ...step.exchange import SILENCE
from ...step.exchange_policy import StepExchange
from ...step.planner import OF_MODULES, Planner
from ...step.presets import PRESETS
from ...step.summary import Summary
from .request_file import Mailbox

_COMPILED = (
    "something was compiled, which may be the model, so that modules get no hooks in the middle of the run: a change of detail leaves "
    "activations and attention as the script asked for"
)


class RunNotes(Protocol):
    """Where facts about the run are noted."""

    @property
    def directory(self) -> Path | None:
        """The run directory, if there is one."""

    def note(self, **facts: Any) -> None:
        """Add facts about the run."""

    def reopen(self) -> None:
        """Let who looks into the directory know that the run goes on."""


class Tuning:
    """What of the cadence and of the preset stands for a while in the place of what the script asked for.

    Args:
        planner: is told that the plan changed.
        summary: the whole-model values.
        notes: the run directory, in which the state of changes is noted.
        together: tells the other ranks, and whether there is anybody to tell.
        may_hang: whether modules may get hooks in the middle of a run.
        complaints: where it is said what cannot be done.

    Attributes:
        in_force: the change under which the step in flight is measured.
        left: for how many steps, with this one; None until further notice.
        since: its first step; None before that began.
        is_awake: whether there is anything to be done when a step begins or ends.
    """

    def __init__(
        self,
        planner: Planner,
        summary: Summary,
        notes: RunNotes,
        together: StepExchange,
        may_hang: Callable[[], bool],
        complaints: Complaints,
    ) -> None:
        self._planner, self._summary, self._notes, self._together = planner, summary, notes, together
        self._ranks, self._may_hang, self._complaints = together.exchange.ranks, may_hang, complaints
        self._from_code: deque[Change] = deque(maxlen=1)
        self._asked: Change | None = None  # known to this rank
        self._agreed: Change | None = None  # waits for its first step
        self._is_common = self._was_told = False  # whether all ranks know what is in force, and what is agreed
        self.in_force: Change | None = None
        self.left: int | None = None
        self.since: int | None = None
        self._number = 0
        self.is_awake = False
        self._has_left = False
        self._why = ""  # it ended before its time
        self._without = ""  # what a preset does not measure, and why
        self._facts: dict[str, Any] = {"session": secrets.token_hex(8), "listens": False}
        self._mailbox: Mailbox | None = None
        directory = notes.directory
        if directory is not None:
            self._mailbox = Mailbox(directory, self._facts["session"], complaints, self._speaks)
            self._facts["listens"] = self._speaks()
            notes.note(tune=self._facts)

    def _speaks(self) -> bool:
        """Whether this rank speaks for all."""
        return self._ranks.is_first

    # --- what is asked for -----------------------------------------------------------------------------------------------------

    def ask(self, change: Change) -> None:
        """From within the program, by whatever thread, or a signal handler."""
        self._from_code.append(change)
        self.is_awake = True  # behind it: see _doze

    def _doze(self) -> None:
        """Sleep where nothing is going on, as for most of a training; what is asked for at this very moment wakes it again."""
        self.is_awake = (self.in_force or self._asked or self._agreed) is not None
        if self._from_code:
            self.is_awake = True

    def look(self) -> None:
        """A step ends, and the ranks are about to meet: see what is asked for, and have it told."""
        if self._mailbox is not None and (change := self._mailbox.look()) is not None:
            self._take(change)
        if self.is_awake:
            self._receive()
            says = self._asked is not None and self._speaks()
            self._together.exchange.word = self._asked.numbers() if says and self._asked is not None else SILENCE

    def _receive(self) -> None:
        if self._from_code:
            self._take(numbered(self._from_code.pop(), self._number + 1))

    def _take(self, change: Change) -> None:
        self._asked, self._number, self.is_awake = change, max(self._number, change.number), True
        self._note(number=self._number, waits=change.facts(), why="")

    def _settle(self) -> None:
        """Agree to what is asked for where nobody else has to know."""
        self._receive()
        if self._agreed is not None and not self._was_told and self._together.meets:
            self._asked, self._agreed = (
                self._asked or self._agreed,
                None,
            )  # it waited for its step, and others have to know by now
        if self._asked is None:
            return
        if self._together.meets:
            if self._speaks():
                self._note(why="the ranks tell each other of it in the next step that is monitored")
            else:
                self._asked = None
        elif self._together.is_bound:
            why = "parts of the model lie on other ranks, which cannot be told"
            self._complaints.add("tune:ranks", f"a change of detail is not heeded: {why}")
            self._asked = None
            self._note(waits=None, why=f"number {self._number} was not heeded: {why}")
        else:
            self._agreed, self._was_told, self._asked = self._asked, False, None

    def _hear(self) -> None:
        """Agree to what the first rank has said."""
        exchange = self._together.exchange
        heard, exchange.heard = exchange.heard, SILENCE
        if not heard[0]:
            return
        self._agreed, self._was_told = Change.of_numbers(heard), True
        self._number = max(self._number, self._agreed.number)
        if self._asked is not None and (not self._speaks() or self._asked.number <= self._agreed.number):
            self._asked = None

    # --- steps -----------------------------------------------------------------------------------------------------------------

    def step_ended(self) -> None:
        """Count it, take what was heard in it, and see whether a change of this rank alone has become one of all ranks."""
        if self._together.exchange.heard is not SILENCE:
            self._hear()
        if self.left is not None:
            self.left -= 1
        if self.is_alone and self._together.meets and self.left != 0:
            if self._speaks() and self._asked is None and self._agreed is None and self.in_force is not None:
                self._take(replace(self.in_force, steps=self.left, first=None))
            self.left, self._why = 0, "ranks tell each other values by now, and change together"
        self._settle()
        self._doze()

    def is_due(self, step: int) -> bool:
        """Whether something else is to be measured from ``step`` on, the next one."""
        return self.left == 0 or (self._agreed is not None and step >= (self._agreed.first or 0))

    def asked_between(self) -> None:
        """A step begins, which may be the first of what was asked for since the last one ended."""
        self._settle()

    def change(self, step: int, last: int | None) -> None:
        """What was agreed comes into force for ``step``, the next one, or else what the script asked for; ``last`` is the step before."""
        new: Change | None = None
        if self._agreed is not None and step >= (self._agreed.first or 0):
            new, self._agreed, self._is_common = self._agreed, None, self._was_told
        self._over(self._why or "its steps are over" if new is None else "another one took its place", last)
        if new is not None and new.is_reset:
            self._note(waits=None, last={**new.facts(), "since": step}, why="")
            new = None
        self.in_force, self.left = new, None if new is None else new.steps
        self._measure(None if new is None else new.preset)
        self._doze()

    def _over(self, why: str, last: int | None) -> None:
        if self.in_force is not None:
            ended = {**self.in_force.facts(), "since": self.since, "until": last, "ended": why}
            self.in_force = self.left = self.since = None
            self._why = ""
            self._note(in_force=None, last=ended)

    def step_began(self, step: int, stride: int) -> None:
        """The first step under a change is the one that is noted."""
        if self._has_left:
            self._has_left = False
            self._notes.reopen()
            self._note(listens=self._speaks(), ended=None)
        if self.in_force is not None and self.since is None:
            self.since = step
            until = None if self.left is None else step + (self.left - 1) * stride
            facts = {**self.in_force.facts(), "since": step, "until": until}
            self._note(in_force=facts, waits=None if self._asked is None else self._asked.facts(), why=self._without)

    # --- what it is that changes -----------------------------------------------------------------------------------------------

    def cadence(self, step: int, asked: bool) -> bool:
        """Whether ``step`` is monitored, where the script says ``asked``."""
        every = None if self.in_force is None else self.in_force.every
        return asked if every is None else step % every == 0 or (asked and self.is_alone)

    @property
    def sets_cadence(self) -> bool:
        """Whether the script's own cadence, and its budget, have nothing to say."""
        return self.in_force is not None and self.in_force.every is not None

    @property
    def is_alone(self) -> bool:
        """Whether this is one of several ranks, and the others know nothing of what is in force."""
        return self.in_force is not None and not self._is_common and self._ranks.count > 1

    @property
    def context(self) -> dict[str, Any] | None:
        """What is in force, for the record of a step."""
        if self.in_force is None:
            return None
        return {name: value for name, value in self.in_force.facts().items() if name in ("every", "preset", "number")}

    def _measure(self, preset: str | None) -> None:
        registry, summary = self._planner.registry, self._summary
        self._without = ""
        registry.stand_in(None)
        summary.stand_in(None)
        if preset is not None:
            # what the others do not know of may only be more: detectors have to see the same on all ranks
            kept, keys = (registry.unseen, summary.keys) if self.is_alone else ((), ())
            registry.stand_in((*kept, *self._metrics(preset)), shared=self._is_common)
            summary.stand_in(dict.fromkeys((*keys, *PRESETS[preset].keys)))
        self._planner.changed()

    def _metrics(self, preset: str) -> list[Metric]:
        """What a preset measures out of sight; in a compiled model the script's own metrics of modules stay as they are."""
        registry = self._planner.registry
        made = [registry.make(source, name, every=every, shown=False) for source, name, every in PRESETS[preset].layer_metrics]
        if self._may_hang():
            return made
        if any(metric.source in OF_MODULES for metric in made):
            self._without = _COMPILED
            self._complaints.add("tune:compiled", _COMPILED)
        return [
            *(metric for metric in made if metric.source not in OF_MODULES),
            *(metric for metric in registry.unseen if metric.source in OF_MODULES),
        ]

    # --- the run directory -----------------------------------------------------------------------------------------------------

    def leave(self, last: int | None) -> None:
        """The run ends, or the monitor leaves it: nothing stays in force."""
        self._from_code.clear()
        self._asked = self._agreed = None
        if self.in_force is not None:
            self._over("the run has ended, or its monitor was detached", last)
            self._measure(None)
        self._has_left = self.is_awake = True  # until a step begins all the same: by hand, or after attach()
        self._note(listens=False, ended=True, waits=None)

    def _note(self, **facts: Any) -> None:
        known = {name: value for name, value in {**self._facts, **facts}.items() if value not in (None, "")}
        if known != self._facts:
            self._facts = known
            if self._mailbox is not None:
                self._notes.note(tune=known)

"""More detail for a while: after a spike, or as requested during a run."""

from __future__ import annotations

import secrets
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..capture.hooks import compiled_graphs, is_compiled
from ..core import keys as n
from ..core.errors import GradmonWarning
from ..core.records import Metric
from ..step.active_step import ActiveStep
from ..step.planner import OF_MODULES, PRESETS, ExchangePolicy, Planner
from ..step.plugin import Plugin
from ..step.ranks import EMPTY_SLOT
from ..step.summary import Summary

if TYPE_CHECKING:  # most runs are not changed while they run
    from ..runs.detail_request import DetailRequest, RequestFile
    from .overhead_budget import OverheadBudget

#: The added metrics: one-pass statistics, so the run directory stores them all.
_METRICS = {n.ACTIVATION: ("std", "max", "nonfinite_count"), n.ACTIVATION_GRADIENT: ("norm", "nonfinite_count")}


class PostSpikeDetail(Plugin):
    """Monitors every one of ``steps`` steps after a spike, and measures more of each.

    Ranks that exchange values start together: in the step after the next one, when all of them know of the spike.
    """

    name = "post_spike_detail"

    def __init__(self, planner: Planner, steps: int) -> None:
        self._planner, self._steps = planner, steps
        self._left = 0
        self._has_overlay = self._ends = False
        self._spiked_in: int | None = None
        self._graphs = compiled_graphs()

    def wants(self, step: int, asked: bool, ahead: int | None = 0) -> bool:
        return asked or (ahead is not None and ahead < self._left)

    @property
    def may_miss(self) -> int:  # type: ignore[override]
        return 0 if self._left else sys.maxsize

    @property
    def may_add_hooks(self) -> bool:
        """Whether modules may get hooks in the middle of a run: not if anything was compiled since the monitor exists. It may be the model,
        whose graph would not call the hooks or would be compiled again.
        """
        module = self._planner.module()
        return module is not None and compiled_graphs() <= self._graphs and not is_compiled(module)

    def on_alert(self, step: int) -> None:
        self._spiked_in, self.watches_idle_steps = step, True
        self.context.set_quiet(False)

    def before_step(self) -> None:
        self._turn(ends=False, opens=True)

    def on_step_closing(self, step: ActiveStep) -> None:
        if not step.is_monitored:
            return
        self._ends = self._left == 1 and self._has_overlay
        if self._left:
            self._left -= 1
            self.context.ask_cadence_again()
        if self._ends:
            self._has_overlay = False
            self.context.set_overlay(self.name, None)

    def on_step_closed(self, step: ActiveStep) -> None:
        ends, self._ends = self._ends, False
        if ends or self._spiked_in is not None:
            self._turn(ends)
        self.context.set_quiet(not self._left and self._spiked_in is None)

    def _turn(self, ends: bool, opens: bool = False) -> None:
        spiked, last = self._spiked_in, self.context.last_step
        if self.context.ranks_synchronised and spiked is not None and not (opens and last is not None and spiked < last):
            spiked = None
        if spiked is not None:
            self._spiked_in, self.watches_idle_steps = None, False
            self.context.ask_cadence_again(script_too=True)
            self._left = self._steps
        begins = spiked is not None and bool(self._steps) and not self._has_overlay and self.may_add_hooks
        if begins:
            metrics = [self.context.make_metric(source, name) for source, names in _METRICS.items() for name in names]
            self.context.set_overlay(self.name, metrics)
            self._has_overlay = True
        if begins or ends:
            self.context.request_replan()


# --- requests ---


_COMPILED = (
    "something was compiled, which may be the model, so that modules get no hooks in the middle of the run: a change of detail leaves "
    "activations and attention as the script asked for"
)


class LiveDetail(Plugin):
    """Temporarily replaces the cadence and preset of the script. Of several ranks the first one decides. ``reopen``: marks the run in the
    directory as active again.
    """

    name = "live_detail"

    def __init__(
        self,
        planner: Planner,
        summary: Summary,
        post_spike: PostSpikeDetail,
        budget: OverheadBudget | None,
        exchange: ExchangePolicy,
        reopen: Callable[[], None],
    ) -> None:
        self._planner, self._summary, self._post_spike, self._budget = planner, summary, post_spike, budget
        self._exchange, self._ranks, self._reopen = exchange, exchange.ranks, reopen
        self._why_missing = ""  # why a part of the preset is not measured
        self._from_code: deque[DetailRequest] = deque(maxlen=1)  # the last request of the program itself, without a number yet
        self._asked: DetailRequest | None = None  # the ranks have not agreed on it yet
        self._agreed: DetailRequest | None = None  # waits for its first step
        self.in_force: DetailRequest | None = None  # applies to the open step
        self.left: int | None = None  # the number of steps for which it applies, including this one; None for no end
        self._since: int | None = None  # its first step; None before that began
        self._number = 0  # of the last request
        self._raised: GradmonWarning | None = None
        self._has_left = False
        self._facts: dict[str, Any] = {"session": secrets.token_hex(8), "listens": False}
        self.file: RequestFile | None = None  # where other processes request changes

    def listen(self, directory: Path) -> None:
        """From now on requests of other processes in the run directory are seen."""
        from ..runs.detail_request import RequestFile

        ranks = self._ranks
        self.file = RequestFile(directory, self._facts["session"], self.context.warn, lambda: ranks.is_first)
        self._facts["listens"] = ranks.is_first
        self.context.annotate_run(tune=self._facts)

    # --- requests --------------------------------------------------------------------------------------------------------------

    def request(self, change: DetailRequest) -> None:
        """Request a change from within the program, from any thread, or in a signal handler."""
        self._from_code.append(change)
        self._watch()  # after the request, see _update_pending

    def _watch(self) -> None:
        self.watches_idle_steps = True
        self.context.set_quiet(False)

    def _update_pending(self) -> None:
        """Clear ``watches_idle_steps`` when no request is active; a request that comes at this very moment sets it again."""
        self.watches_idle_steps = (self.in_force or self._asked or self._agreed) is not None
        if self._from_code:
            self._watch()

    def _receive(self) -> None:
        if self._from_code:
            self._ask(replace(self._from_code.pop(), number=self._number + 1))

    def _ask(self, change: DetailRequest) -> None:
        self._asked, self._number = change, max(self._number, change.number)
        self._watch()
        self._note(number=self._number, waits=change.facts(), why="")

    def _accept(self) -> None:
        """Agree to the request at once in a single process; have it broadcast, or refuse it, where there are other ranks."""
        self._receive()
        if self._asked is None:
            return
        if self._exchange.exchanges_values:
            if self._ranks.is_first:
                self._note(why="the first rank sends it to the others in the next monitored step")
            else:
                self._asked = None
        elif self._ranks.count > 1:
            why = "the ranks exchange nothing, so that the other ones cannot follow"
            self.context.warn("tune:ranks", f"a change of detail is refused: {why}")
            self._asked = None
            self._note(waits=None, why=f"number {self._number} was refused: {why}")
        else:
            self._agreed, self._asked = self._asked, None

    def _note(self, **facts: Any) -> None:
        """Note facts in the run directory; None and an empty text remove one."""
        known = {name: value for name, value in {**self._facts, **facts}.items() if value not in (None, "")}
        if known != self._facts:
            self._facts = known
            if self.file is not None:
                self.context.annotate_run(tune=known)

    # --- steps -----------------------------------------------------------------------------------------------------------------

    def before_step(self, step: int) -> None:
        self._accept()
        self._change(step)

    def on_step_open(self, step: ActiveStep) -> None:
        if self._has_left:  # the run continues
            self._has_left = False
            self._reopen()
            self._note(listens=self._ranks.is_first, ended=None)
        change = self.in_force
        step.sets_cadence = change is not None and change.every is not None
        if change is not None and self._since is None:
            self._since = step.number
            until = None if self.left is None else step.number + (self.left - 1) * step.stride
            facts = {**change.facts(), "since": step.number, "until": until}
            self._note(in_force=facts, waits=None if self._asked is None else self._asked.facts(), why=self._why_missing)

    def on_step_closing(self, step: ActiveStep) -> None:
        """The ranks are about to exchange: broadcast what is requested."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised
        if self.watches_idle_steps:
            self._receive()
            asked = self._asked if self._ranks.is_first else None
            self._exchange.sent = EMPTY_SLOT if asked is None else asked.numbers()

    def annotate(self, step: ActiveStep) -> None:
        if self.in_force is not None:
            facts = self.in_force.facts().items()
            step.annotations["tuned"] = {name: value for name, value in facts if name in ("every", "preset", "number")}

    def on_step_closed(self, step: ActiveStep) -> None:
        received = self._exchange.received
        if not self.watches_idle_steps and received is EMPTY_SLOT:
            if self._ranks.count == 1:  # else what the first one broadcasts may come in any step
                self.context.set_quiet(True)
            return
        self._exchange.received = EMPTY_SLOT
        if received[0]:
            from ..runs.detail_request import DetailRequest

            self._agreed = DetailRequest.of_numbers(received)
            self._number = max(self._number, self._agreed.number)
            if self._asked is not None and (not self._ranks.is_first or self._asked.number <= self._agreed.number):
                self._asked = None
        if self.left is not None:
            self.left -= 1
        self._accept()
        self._update_pending()
        self._change(step.number + 1)

    @property
    def may_miss(self) -> int:  # type: ignore[override]
        """All idle steps while no request is known; a look at the file is due after a second, see :class:`StepProgram`."""
        return 0 if self.watches_idle_steps or self.in_force is not None else sys.maxsize

    def look(self) -> None:
        """Look for a request of another process, if a look is due."""
        if self.file is None or time.monotonic() < self.file.due:
            return
        try:
            if (found := self.file.look()) is not None:
                self._ask(found)
        except GradmonWarning as error:  # where warnings are errors; raised where it costs no step
            self._raised = error
            self._watch()

    def wants(self, step: int, asked: bool, ahead: int | None = 0) -> bool:
        if self.in_force is None or self.in_force.every is None or ahead is None:
            return asked
        begun = self.context.is_step_open and step != self.context.step  # another one is open, the first of those that are left
        return step % self.in_force.every == 0 if self.left is None or ahead < self.left - begun else asked

    # --- changes ---------------------------------------------------------------------------------------------------------------

    def _change(self, step: int) -> None:
        """What was agreed comes into force for ``step``, the next one, or else what the script asked for."""
        is_due = self._agreed is not None and step >= (self._agreed.first or 0)
        if not is_due and self.left != 0:
            return
        try:
            self.context.flush_pending()  # under what it was measured under
        finally:
            was_changed, new = self.in_force is not None, self._agreed if is_due else None
            self._end_change("its steps are over" if new is None else "another one took its place")
            if new is not None:
                self._agreed = None
                if new.is_reset:
                    self._note(waits=None, last={**new.facts(), "since": step}, why="")
                else:
                    self.in_force, self.left = new, new.steps
            self._use(None if self.in_force is None else self.in_force.preset)
            self._update_pending()
            if self._budget is not None and was_changed != (self.in_force is not None):
                self._budget.on_detail_changed(is_back=was_changed)
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
        if self._post_spike.may_add_hooks:
            return made
        if any(metric.source in OF_MODULES for metric in made):
            self._why_missing = _COMPILED
            self.context.warn("tune:compiled", _COMPILED)
        return [
            *(metric for metric in made if metric.source not in OF_MODULES),
            *(metric for metric in self._planner.registry.unseen if metric.source in OF_MODULES),
        ]

    def _end_change(self, why: str) -> None:
        before, since = self.in_force, self._since
        self.in_force = self.left = self._since = None
        if before is not None:
            self._note(in_force=None, last={**before.facts(), "since": since, "until": self.context.last_step, "ended": why})

    def on_detach(self) -> None:
        self._from_code.clear()
        self._asked = self._agreed = None
        if self.in_force is not None:
            self._end_change("the run has ended, or its monitor was detached")
            self._use(None)
        self._watch()  # until a step opens all the same: by hand, or after attach()
        self._has_left = True
        self._note(listens=False, ended=True, waits=None)

    end_run = on_detach

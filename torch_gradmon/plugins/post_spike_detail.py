"""More detail after a spike: for some steps, module outputs and their gradients are measured too."""

from __future__ import annotations

import sys

from ..capture.compiled import is_compiled
from ..capture.hooks import compiled_graphs
from ..core import keys as n
from ..step.active_step import ActiveStep
from ..step.planner import Planner
from ..step.plugin import Plugin

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

    def wants(self, step: int, asked: bool) -> bool:
        return asked or self._left > 0

    def foretells(self, step: int, asked: bool, ahead: int | None) -> bool:
        return asked or (ahead is not None and ahead < self._left)

    def may_miss(self) -> int:
        return 0 if self._left else sys.maxsize

    @property
    def may_add_hooks(self) -> bool:
        """Whether modules may get hooks in the middle of a run.

        They may not if anything was compiled since the monitor exists. It may be the model, whose graph would not call the hooks
        or would be compiled again.
        """
        module = self._planner.module
        return module is not None and compiled_graphs() <= self._graphs and not is_compiled(module)

    def on_alert(self, step: int) -> None:
        self._spiked_in, self.watches_idle_steps = step, True

    def on_sealed(self, step: int) -> None:
        """Start with the step that opens, if the last record had a spike."""
        self._turn(ends=False, opens=True)

    def on_step_closing(self, step: ActiveStep) -> None:
        """Count a monitored step before its values are known."""
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
        self._turn(ends)

    def _turn(self, ends: bool, opens: bool = False) -> None:
        spiked, last = self._spiked_in, self.context.last_step
        if spiked is None and not ends:
            return
        if self.context.ranks_synchronised and spiked is not None and not (opens and last is not None and spiked < last):
            spiked = None
        if spiked is not None:
            self._spiked_in, self.watches_idle_steps = None, False
            self.context.ask_cadence_again(script_too=True)
        if (spiked is not None and self._begin()) or ends:
            self.context.request_replan()

    def _begin(self) -> bool:
        """Monitor the next steps. Returns whether this needs hooks; False if modules may not get any."""
        self._left = self._steps
        if not self._steps or self._has_overlay or not self.may_add_hooks:
            return False
        metrics = [self.context.make_metric(source, name) for source, names in _METRICS.items() for name in names]
        self.context.set_overlay(self.name, metrics)
        self._has_overlay = True
        return True

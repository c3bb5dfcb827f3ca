"""Questions about a run: which steps are monitored, what the last step gave, how many steps there were."""

from __future__ import annotations

import torch

from ...core.fence import fenced
from ...core.loop_mistakes import LoopFinding
from ...core.records import StepRecord
from ...core.torch_modes import outside_dispatch_modes
from ...plugins.spike_policy.policy import Counts
from ..runtime import Runtime

_GONE = "the attached optimizers are gone; call monitor.detach(), then monitor.attach() with the new ones"
_UNATTACHED = (
    "the parameters have changed since the attached optimizer stepped last: another optimizer steps them, or the loop itself; call "
    "monitor.detach(), then monitor.attach() with the optimizer whose step() the loop calls"
)
_CAPTURED = "the loop was captured into a graph, whose replays call no hooks; call optimizer.step() outside of the graph"
#: Plugins that find something while the training runs.
_FINDERS = ("loop_audit", "replica_check", "setup_check", "data_check", "foresight")


class Queries:
    """Answers for one runtime.

    Args:
        runtime: answers the queries. No other object holds it for longer than a call.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self.fence = runtime, runtime.fence

    def would_monitor(self, step: int) -> bool:
        """Whether ``step`` is monitored by the cadence, or as one of the steps after a spike or under a live change."""
        clock, cadence, active = (
            self._runtime.state.clock,
            self._runtime.lifecycle.planning.cadence,
            self._runtime.lifecycle.active,
        )
        if clock.step is not None and step <= clock.step:
            is_open = self._runtime.state.is_open and step == clock.step and active is not None and active.is_monitored
            is_known = self._runtime.lifecycle.queue.newest(step) is not None or step in self._runtime.pipeline.history
            return is_open or is_known or cadence.foretells(step, None)
        ahead = step - clock.next_step if clock.step is None else (step - clock.step - 1) // clock.stride
        return cadence.foretells(step, ahead)

    def findings(self) -> list[LoopFinding]:
        """What the plugins have found so far."""
        plugins = (self._runtime.plugin(name) for name in _FINDERS)
        return [finding for plugin in plugins if plugin is not None for finding in plugin.facts()]

    @property
    def is_listening(self) -> bool:
        """Whether a value from inside of a forward counts."""
        return self._runtime.lifecycle.values.is_listening(self._may_be_forward)

    def _may_be_forward(self) -> bool:
        """Whether, though no step is open, this may be the forward of the next one: no hook saw the last one's, or this is the first,
        or only its backward pass shows it.
        """
        state = self._runtime.state
        may_be = state.patterns.hides_forward or state.patterns.is_undecided or state.clock.ended is None
        leads = self._runtime.loop is not None and not state.is_manual and torch.is_grad_enabled()
        return may_be and leads and self._runtime.lifecycle.planning.would_measure(state.clock.next_step)

    @property
    def stale_reason(self) -> str:
        """Why values of the last step would be stale; empty where they are not."""
        if self.fence.is_captured:
            return _CAPTURED
        if self._runtime.loop is None or self._runtime.state.is_manual:
            return ""
        if self._runtime.loop.is_orphaned:
            return _GONE
        in_step = self._runtime.state.is_open and not self._runtime.state.progress.has_stepped
        with outside_dispatch_modes():
            is_stale = any(self._runtime.lifecycle.plugins.call("is_stale", in_step))
        return _UNATTACHED if is_stale else ""

    def counts(self) -> Counts:
        """Of the steps so far, as far as their values have come."""
        summary, policy, attempts = (
            self._runtime.factory.summary,
            self._runtime.plugin("spike_policy"),
            self._runtime.state.clock.attempts,
        )
        skipped, rollbacks = (0, 0) if policy is None else (policy.skipped, policy.rollbacks)
        applied, overflowed = attempts - summary.not_applied, summary.not_applied - skipped - summary.interrupted
        return Counts(attempts, applied, skipped, overflowed, summary.nonfinite, rollbacks, summary.interrupted)

    def settle_now(self) -> StepRecord | None:
        """The record of the last step, None where it was not monitored. Waits for the device."""
        self._flush_fenced()  # does nothing inside a fenced call, such as on_spike
        return None if self.stale_reason else self._runtime.pipeline.last

    @fenced
    def judge_now(self) -> None:
        """Make the record of the last step, and judge already now what was logged since."""
        self._runtime.cycle.release()
        self._runtime.lifecycle.flush_pending()
        self._runtime.pipeline.detect_late()

    @fenced
    def _flush_fenced(self) -> None:
        self._runtime.cycle.release()
        self._runtime.lifecycle.flush_pending()

"""The audit of a training loop: passes the events of hooks to the checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer

from ...core.errors import WarningLog
from ...core.loop_mistakes import MISTAKES, SETUP_MISTAKES, LoopFinding
from ...step.model_index import PLAIN_GRADIENTS
from ...step.planner import Planner
from ...step.plugin import Plugin
from ..tallies import Tallies
from .ownership import OwnershipChecks
from .probe_hooks import ProbeHooks
from .probed_optimizer import PATIENCE, ProbedOptimizer
from .sampling import Rest

#: Steps of others after which an optimizer that has never stepped is told of: a part that begins later does so sooner as a rule.
_MANY = 100


class LoopAudit(Plugin):
    """Observes a loop; it measures nothing and changes nothing.

    Args:
        planner: knows the model.
        complaints: receives a warning about each certain mistake.
        note: writes facts about the run to the run directory.
    """

    name = "loop_audit"
    stops_on_failure = True

    def __init__(self, planner: Planner, complaints: WarningLog, note: Callable[..., None]) -> None:
        self._planner = planner
        self._tallies = Tallies(complaints, self._step, note, {**MISTAKES, **SETUP_MISTAKES})
        self._hooks: ProbeHooks | None = None
        self._ownership: OwnershipChecks | None = None
        self._rest = Rest()
        self._is_paused = False
        self._steps = 0  # since the audit began, without those that a scaler has prevented
        self._forwards = self._most_forwards = 0  # since the last step of any optimizer, and the most between two

    def _step(self) -> int:
        return self.context.step or 0

    def facts(self) -> list[LoopFinding]:
        """The mistakes that were seen often enough."""
        return self._tallies.facts()

    def sees_alternation(self) -> bool:
        """Whether the optimizers have gradients of different numbers of backward passes since their last steps."""
        if self._hooks is None or len(self._hooks.optimizers) < 2:
            return False
        probes = [probed.probe for probed in self._hooks.optimizers.values()]
        return len({probe.interval.fired for probe in probes if probe is not None}) > 1

    def is_stale(self, in_step: bool) -> bool:
        """Whether the model has been trained since the last step of an attached optimizer, whose values would look current.

        Args:
            in_step: whether a step is open in which no optimizer has stepped.
        """
        return self._hooks is not None and any(probed.is_stale(in_step) for probed in self._hooks.probed)

    def on_leave(self, last: int | None) -> None:
        """Write the facts to the run directory, if they are new."""
        self._tallies.write_facts()

    # --- life cycle ----------------------------------------------------------------------------------------------------------

    def on_attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Begin to audit a loop. Its mistakes show in ``.grad``, so none where an engine has gradients elsewhere."""
        self.on_detach()
        if self._planner.source is not PLAIN_GRADIENTS:
            return
        self._ownership = OwnershipChecks(self._planner, self._tallies, optimizers)
        self._steps = 0
        self._tallies.retract("unattached-optimizer")  # others are attached now
        self._tallies.write_facts(begins=True)
        self._hooks = ProbeHooks(self._planner, self._tallies, self.context.call, module, optimizers)
        self._hooks.pause(self._is_paused)

    def on_pause(self, is_paused: bool) -> None:
        """Pause or resume: events are part of training only outside a pause."""
        self._is_paused = is_paused
        if self._hooks is not None:
            self._hooks.pause(is_paused)

    def on_detach(self) -> None:
        """Remove all hooks, and keep only the facts."""
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks, self._ownership, self._rest = None, None, Rest()

    def on_optimizers_lost(self) -> None:
        """Record that all optimizers were garbage-collected; the loop has warned about it."""
        self._tallies.seen("unattached-optimizer", warns=False)

    def may_miss(self) -> int:
        """The steps of a pause, until the next check of all parameters."""
        hooks, ownership = self._hooks, self._ownership
        if hooks is None or ownership is None or not (self._rest.is_on and hooks.is_current and self._tallies.is_empty):
            return 0
        return max(0, min(self._rest.left, ownership.next_step - self._steps) - 1)

    def on_missed(self, steps: int) -> None:
        """Count the steps of a pause."""
        self._steps += steps
        self._rest.missed(steps)

    # --- forward and backward --------------------------------------------------------------------------------------------------

    def on_forward(self) -> None:
        """Count a training forward of the model."""
        self._forwards += 1
        hooks = self._hooks
        if hooks is None:
            return
        if self._rest.is_on and self._forwards > self._most_forwards + PATIENCE:
            self._rest = Rest()  # no optimizer steps any more
            hooks.register()
        elif not hooks.is_current:
            hooks.register(self._rest.is_on)

    def on_backward_ended(self) -> None:
        """Replace a probe that took part in no backward pass, at the end of one in a monitored step."""
        if self._hooks is not None:
            self._hooks.backward_ended()

    # --- steps -----------------------------------------------------------------------------------------------------------------

    def on_optimizer_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Judge the gradients before an optimizer steps or calls its closure."""
        hooks, ownership = self._hooks, self._ownership
        if hooks is None or ownership is None or (probed := hooks.optimizers.get(id(optimizer))) is None:
            return
        self._steps += 1
        if not self._rest.is_on:
            hooks.step_began(probed, optimizer, self._forwards, has_closure)
        is_due = self._steps >= ownership.next_step or ownership.version != self._planner.version
        if is_due and ownership.step_began(self._steps):
            hooks.exchange.update()
        if is_due and self._steps >= _MANY * (len(hooks.optimizers) - 1) > 0:
            self._judge_resting(hooks)

    def _judge_resting(self, hooks: ProbeHooks) -> None:
        index = self._planner.inventory
        for probed in hooks.optimizers.values() if index is not None else ():
            if index is not None and probed.rests():
                steps = {"steps of the others": float(self._steps)}
                self._tallies.seen("optimizer-never-steps", probed.key, probed.names(index), steps)

    def on_optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Begin the next interval, and decide whether the next step is audited."""
        hooks, ownership = self._hooks, self._ownership
        if hooks is None or ownership is None or (probed := hooks.optimizers.get(id(optimizer))) is None:
            return
        if ownership.is_comparing:
            ownership.step_ended()
        if not probed.has_stepped:
            self._tallies.retract("optimizer-never-steps", probed.key)  # it only began late
        # With several optimizers the gradients of one are evidence about the others. In a loop without visible forwards only the
        # probe's hook shows backward passes without steps. Such loops never count as clean, nor do those with open questions.
        writes = probed.checks.writes
        is_clean = self._tallies.is_empty and self._forwards > 0 and len(hooks.optimizers) == 1 and not hooks.exchange.has_ranks
        is_clean = is_clean and probed.probe is not None and not (writes.is_unclear or writes.is_doubtful)
        if not (self._rest.is_on and is_clean) or probed.unattached.passes:
            self._interval_ended(hooks, probed, has_stepped=True)
        self._most_forwards, self._forwards = max(self._most_forwards, self._forwards), 0
        if self._rest.step_ended(is_clean):
            hooks.restart(probed)
        # nor will a forward register them where the parts of the model are called alone
        no_forward = not self._most_forwards and probed.stepped_in == -1
        if not hooks.is_current and (probed.checks.needs_values or no_forward):
            hooks.register(self._rest.is_on)

    def on_optimizer_overflowed(self, optimizer: Optimizer) -> None:
        """Begin the next interval after the scaler prevented the optimizer's step."""
        if self._hooks is None:
            return
        self._hooks.step_prevented()
        if (probed := self._hooks.optimizers.get(id(optimizer))) is not None:
            self._interval_ended(self._hooks, probed, has_stepped=False)
            self._most_forwards, self._forwards = max(self._most_forwards, self._forwards), 0

    def _interval_ended(self, hooks: ProbeHooks, probed: ProbedOptimizer, has_stepped: bool) -> None:
        for other in hooks.probed:
            if other is probed or other.shares_parameters(probed):
                other.unattached.step_ended()
                if not self._tallies.is_empty:
                    self._tallies.retract("unattached-optimizer", other.key)
        if not self._rest.is_on:
            probed.step_ended(has_stepped, len(hooks.optimizers) == 1)

    # --- scaler ----------------------------------------------------------------------------------------------------------------

    def on_unscaling(self, optimizer: Optimizer) -> None:
        """Judge the gradients before the scaler unscales them."""
        if self._hooks is not None and (probed := self._hooks.optimizers.get(id(optimizer))) is not None:
            probed.unscaling(optimizer)

    def on_unscaled(self, optimizer: Optimizer) -> None:
        """Record that the optimizer's gradients are unscaled."""
        if self._hooks is not None and (probed := self._hooks.optimizers.get(id(optimizer))) is not None:
            probed.scaler.unscaled()

    def on_loss_scaled(self) -> None:
        """Record that the scaler has scaled a loss."""
        for probed in () if self._hooks is None else self._hooks.optimizers.values():
            probed.scaler.loss_scaled()

    def on_scaler_updated(self) -> None:
        """End the scaler's attempt."""
        for probed in () if self._hooks is None else self._hooks.optimizers.values():
            probed.scaler.end_attempt()

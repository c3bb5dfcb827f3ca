"""Hooks on the probes, and what they observe during backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...capture.hooks import Handles, Hook
from ...step.planner import Planner
from ..tallies import Tallies
from .gradient_exchange import GradientExchange
from .probe import Probe
from .probed_optimizer import ProbedOptimizer
from .unattached_updates import UnusedGradients

#: The most optimizers that get a probe. More are usually those of single parameters, which step within the backward pass.
_OPTIMIZERS = 3


class ProbeHooks:
    """Chooses the probes of one loop and has hooks on them.

    Args:
        planner: knows the model.
        tallies: receive the findings.
        call: calls a function within the monitor's fence.
        module: the watched model.
        optimizers: the attached optimizers.
    """

    def __init__(
        self, planner: Planner, tallies: Tallies, call: Callable[..., Any], module: nn.Module, optimizers: Sequence[Optimizer]
    ) -> None:
        self._planner, self._tallies, self._call = planner, tallies, call
        self.optimizers = {
            id(optimizer): ProbedOptimizer(optimizer, tallies, is_alone=len(optimizers) == 1) for optimizer in optimizers
        }
        #: those that may have a probe
        self.probed = list(self.optimizers.values())[:_OPTIMIZERS]
        self.exchange = GradientExchange(module, call)
        self.is_paused = False  # whether events are no part of training at the moment
        self._handles, self._unused = Handles(), UnusedGradients()
        self._clock = 0  # counts the steps of all optimizers, also prevented ones, while there are hooks
        for probed in self.probed:
            probed.choose_probe(planner.now())
        self.register()

    def pause(self, is_paused: bool) -> None:
        """Begin or end a part of the loop that is no training."""
        self.is_paused = is_paused

    def restart(self, probed: ProbedOptimizer) -> None:
        """Drop the probe's history. The next forward adds or removes the hooks."""
        self.is_current = False
        if probed.probe is not None:
            probed.probe.forget()

    def register(self, is_resting: bool = False) -> None:
        """Register one hook on each probe, a second one while values of its gradient are needed, and none with ``is_resting``."""
        self.is_current = True  # False where other hooks are needed, which cannot be registered within one of these
        self._handles.remove()
        for key, probed in self.optimizers.items():
            if probed.probe is not None and not probed.probe.is_offloaded and not is_resting:
                self._handles.on_accumulate(probed.probe.place, Hook(self._accumulated_hook, key, probed.probe))
                if probed.checks.needs_values:
                    self._handles.on_gradient(probed.probe.place, Hook(self._incoming_hook, key, probed.probe))

    def remove(self) -> None:
        """Remove all hooks."""
        self._handles.remove()

    # --- backward passes -------------------------------------------------------------------------------------------------------

    def _accumulated_hook(self, key: int, probe: Probe, parameter: Tensor) -> None:
        # as compiled autograd does; or another probe has taken its place, whose hook is yet to come
        if not torch.compiler.is_dynamo_compiling() and probe is self.optimizers[key].probe:
            self._call(self._accumulated, self.optimizers[key], parameter)

    def _accumulated(self, probed: ProbedOptimizer, parameter: Tensor) -> None:
        probe = probed.probe
        if probe is None:
            return
        if self.is_paused:
            probe.interval.pause()
            return
        probe.accumulated(parameter, self._clock)
        if probed.stepped_in != torch._C._current_graph_task_id():
            self._backward_ended(probed)
        interval, writes = probe.interval, probed.checks.writes
        if probed.checks.losses.is_looking:
            probed.checks.losses.accumulated(interval, probed.owned)
        if not self._tallies.is_empty:
            probed.checks.accumulated(interval)
        if interval.late >= 0:
            probed.checks.dropped_after_step(probe)
        if probed.scaler.is_unscaled:
            probed.scaler.accumulated_unscaled()
        if interval.writes and writes.begin():
            self.is_current = False
        if writes.is_unclear:
            writes.keep(probe)
        if self.exchange.is_active or probe.is_sharded:
            self.exchange.accumulated(probe)
        if not self._clock and self._unused.are_certain(parameter, probe, writes.clears):
            self._tallies.seen("never-stepped", probed.key, evidence={"backward passes": float(interval.fired)})

    def _backward_ended(self, probed: ProbedOptimizer) -> None:
        for other in self.probed:
            if other.is_unknown:  # within a closure it is the attached optimizer that moves the parameters
                return
        if probed.unattached.backward_ended():
            passes = {"backward passes": float(probed.unattached.passes)}
            self._tallies.seen("unattached-optimizer", probed.key, evidence=passes)

    def backward_ended(self) -> None:
        """Replace a probe that took part in no backward pass, at the end of one in a monitored step."""
        for probed in self.probed:
            if probed.probe is not None and not probed.probe.has_fired and not self.is_paused:
                self._backward_ended(probed)
                if probed.missed_backward():
                    self._replace(probed)

    def _incoming_hook(self, key: int, probe: Probe, gradient: Tensor | None) -> None:
        if probe is self.optimizers[key].probe:
            self._call(self._incoming, self.optimizers[key], gradient)

    def _incoming(self, probed: ProbedOptimizer, gradient: Tensor | None) -> None:
        probe, writes = probed.probe, probed.checks.writes
        if probe is not None and (parameter := probe.place()) is not None:
            writes.read_written(probe, parameter, gradient)
            writes.read_carried(probe, parameter, gradient)
            self.is_current &= probed.checks.needs_values

    # --- steps -----------------------------------------------------------------------------------------------------------------

    def step_began(self, probed: ProbedOptimizer, optimizer: Optimizer, forwards: int, has_closure: bool) -> None:
        """Judge an optimizer's step, and replace the probe if it has shown nothing."""
        self._clock += 1
        if self._clock == 1:
            self._tallies.retract("never-stepped")
        needed = probed.checks.needs_values
        if probed.step_began(optimizer, forwards, len(self.optimizers) == 1, has_closure or self.is_paused):
            self._replace(probed)
            return
        if probed.probe is not None and probed.probe.interval.carried:
            probed.checks.writes.suspect_carried()
        self.is_current &= needed or not probed.checks.needs_values

    def _replace(self, probed: ProbedOptimizer) -> None:
        probed.choose_probe(self._planner.now(), with_gradient=True)
        self.is_current = False

    def step_prevented(self) -> None:
        """Count a step that the scaler has prevented."""
        self._clock += 1

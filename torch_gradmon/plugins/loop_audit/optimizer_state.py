"""One optimizer under the audit: the findings about each of its steps."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...core.loop_mistakes import MISTAKES
from ...step.parameter_refs import Place
from .elsewhere import Elsewhere
from .gradient_writes import Writes
from .probe import Probe
from .scaled_clip import ScaledClip
from .tallies import Tallies

#: The number of writes of one or two clips by norm or value; more writes have another cause.
_CLIPS = 4


class Watched:
    """The audit's state of one optimizer.

    Args:
        optimizer: held weakly.
        tallies: receive the findings.
    """

    def __init__(self, optimizer: Optimizer, tallies: Tallies) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.key = id(optimizer)
        self.probe: Probe | None = None
        self.writes = Writes()
        self.elsewhere = Elsewhere()
        self.stepped_in = -1  # the backward pass within which it has stepped last
        self.silent = 0  # backward passes that the probe took no part in, where it never did
        self.owned: frozenset[int] = frozenset()
        self.places: list[Place] = []  # of some of its parameters, the probe's first
        self.absent = 0
        self.had_gradients = self.is_unknown = False
        self._tallies = tallies
        self._scaled_clip = ScaledClip()
        self._before: Tensor | None = None
        self._twice = self._unscaled = self._scaled_since = self._mixed = False

    def _tell(self, rule: str, is_so: bool, probe: Probe, **evidence: float) -> None:
        if is_so:
            self._tallies.seen(rule, self.key, (probe.name,), {name: float(value) for name, value in evidence.items()})
        else:
            self._tallies.missed(rule, self.key)

    # --- backward --------------------------------------------------------------------------------------------------------------

    @property
    def is_unscaled(self) -> bool:
        """Whether the scaler has unscaled its gradients in this attempt."""
        return self._unscaled

    def accumulated(self, probe: Probe) -> None:
        """Evaluate the probe after an accumulation that may be a finding."""
        if probe.fired == 1 and probe.late >= 0 and (probe.late or not self._tallies.is_empty):
            dropped, probe.dropped = probe.dropped, None
            is_clip = dropped is not None and probe.late <= _CLIPS and self.writes.is_late_clip(dropped)
            self._tell("clip-after-step", is_clip, probe)
        if self._unscaled and self._scaled_since:
            self._mixed = True

    # --- scaler ----------------------------------------------------------------------------------------------------------------

    def unscaling(self, parameter: Tensor, probe: Probe, optimizer: Optimizer) -> None:
        """Evaluate the probe before the scaler unscales the optimizer's gradients."""
        if probe.doubtful or not probe.fired or parameter.grad is not probe.gradient:
            return
        probe.look(parameter)
        if not probe.touched:
            self._tallies.missed("clipped-while-scaled", self.key)
        elif self._scaled_clip.was_written(optimizer):
            self._tell("clipped-while-scaled", True, probe)

    def unscaled(self) -> None:
        """Record that the gradients are unscaled."""
        self._unscaled, self._scaled_since = True, False

    def scaled(self) -> None:
        """Record that a loss was scaled."""
        self._scaled_since = True

    # --- step ------------------------------------------------------------------------------------------------------------------

    def step_with_gradient(self, probe: Probe, gradient: Tensor, forward_since: bool) -> None:
        """Evaluate the probe, which has ``gradient``, before the optimizer's step.

        Args:
            probe: has observed the gradient.
            gradient: the gradient at the last observation.
            forward_since: whether there was a training forward since the last step of any optimizer.
        """
        self.absent, self.had_gradients = 0, True
        if self._tallies.is_empty and probe.fired and not (probe.carried or probe.drops or probe.writes or probe.synced > 1):
            self._twice = False  # the usual case: no finding so far, and none now
            return
        self._tallies.missed("step-without-gradients", self.key)
        if probe.synced > 1 and not probe.drops:
            self._tell("sync-every-micro-batch", True, probe, **{"backward passes": probe.synced})
        if probe.fired:
            self._tallies.missed("dead-hooks", self.key)
        elif probe.was_converted() and not probe.is_paused:
            self._tell("dead-hooks", True, probe)
        if probe.doubtful or gradient is not probe.gradient:
            return
        if not probe.fired:
            if probe.after_step and gradient._version == probe.version and not forward_since:
                # writes through .data change no version, so values have to confirm it
                self._tell("stepped-twice", self._before is None or torch.equal(self._before, gradient), probe)
                self._twice = True
            return
        if not self._twice:
            self._tallies.missed("stepped-twice", self.key)
        self._twice = False
        is_told = (
            self.writes.stays or self._tallies.count("missing-zero-grad", self.key) < MISTAKES["missing-zero-grad"].repeats - 1
        )
        self._tell("missing-zero-grad", probe.carried and is_told, probe)
        cleared = probe.drops + (probe.writes if self.writes.clears else 0)
        # a single drop in each step may be deliberate, to inspect a gradient
        self._tell("micro-batch-discarded", cleared >= 2, probe, discarded=cleared)
        if probe.writes and self.writes.clips:
            self._tell("clip-per-micro-batch", True, probe, **{"times in a step": probe.writes})

    def step_without_gradient(self, probe: Probe, optimizer: Optimizer) -> bool:
        """Evaluate a probe without a gradient before the optimizer's step. Returns whether other parameters have one."""
        if any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]):
            self.absent += 1
            return True
        if probe.fired and not probe.doubtful:
            self._tell("step-without-gradients", True, probe)
        return False

    def over(self) -> None:
        """Finish the evaluation after the optimizer's step, or after the scaler prevented it."""
        if self.probe is not None:
            if self._mixed:
                self._tell("backward-after-unscale", True, self.probe)
            elif self._unscaled:
                self._tallies.missed("backward-after-unscale", self.key)
            self.probe.stepped(None if self.is_unknown else self.probe.place())
            self._remember(self.probe.gradient)
        self.is_unknown = False
        if self._scaled_since or self._unscaled:
            self.attempt_over()

    def _remember(self, gradient: Tensor | None) -> None:
        """Keep the gradient's values while a second step on the same gradient is suspected but not certain."""
        self._before = None
        if gradient is None or self._tallies.is_empty:
            return
        if self._tallies.count("stepped-twice", self.key) > 0 and not self._tallies.is_fact("stepped-twice", self.key):
            self._before = gradient.clone()

    def attempt_over(self) -> None:
        """Forget the scaler's calls of this attempt."""
        self._unscaled = self._scaled_since = self._mixed = False

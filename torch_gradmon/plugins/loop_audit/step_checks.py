"""The findings about each step of an optimizer, from what its probe has observed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...capture.loss_graph import losses_going_backward, reaches_input
from ...core.loop_mistakes import MISTAKES
from ..tallies import Tallies
from .gradient_writes import GradientWrites
from .losses import LossChecks
from .probe import Interval, Probe

#: Steps of torch's own optimizers that no backward pass preceded, before they count: they change nothing for certain, but a loop may
#: pretrain another part of the model, or wait for data. Where there was a forward, one counts as several.
_FUTILE, _WITH_FORWARD = 100, 10
#: Such steps, from the first one on, of a model that is never called: it is another one that trains.
_ELSEWHERE = 10
#: The number of writes of one or two clips by norm or value; more writes have another cause.
_CLIPS = 4


class StepChecks:
    """Judges the steps of one optimizer.

    Args:
        tallies: receive the findings.
        key: the optimizer's key there.

    Attributes:
        writes: the loop's writes to its gradients.
        losses: those that go backward to its parameters.
    """

    def __init__(self, tallies: Tallies, key: int) -> None:
        self.writes, self.losses = GradientWrites(), LossChecks(tallies, key)
        self._tallies, self._key = tallies, key
        self._before: Tensor | None = None
        self._is_repeated = False  # the last step had the gradient of the one before
        self._futile = 0  # steps in a row without any gradient, though the model was called
        self._with = 0  # steps with gradients, once there were some without
        self._is_elsewhere = True  # there was no gradient and no call of the model so far
        self._attacks = False  # passes that are cleared are for the gradient of an input

    def dropped_after_step(self, probe: Probe) -> None:
        """Judge the writes to a gradient between its step and its drop."""
        interval = probe.interval
        if interval.fired == 1 and (interval.late or not self._tallies.is_empty):
            dropped = interval.dropped
            is_clip = dropped is not None and interval.late <= _CLIPS and self.writes.is_late_clip(dropped)
            self._tallies.check("clip-after-step", self._key, is_clip, probe.name)

    @property
    def needs_values(self) -> bool:
        """Whether the values of gradients have to be read."""
        return self.writes.needs_values

    def step_with_gradient(self, probe: Probe, gradient: Tensor, optimizer: Optimizer, forwards: int, is_alone: bool) -> None:
        """Judge the probe, whose parameter has ``gradient``, before the optimizer's step.

        Args:
            probe: of its optimizer.
            gradient: of the probe.
            optimizer: that is about to step.
            forwards: number of training forwards since the last step of any optimizer.
            is_alone: no other optimizer is attached, whose forwards they may be.
        """
        tallies, key, seen = self._tallies, self._key, probe.interval
        self._is_called()
        self._futile = 0
        if not tallies.is_empty and (count := tallies.count("step-without-gradients", key)):
            self._with += 1
            if self._with > count:  # the steps before pretrained another part, or waited for data
                tallies.retract("step-without-gradients", key)
        if seen.fired and (seen.fired != forwards or not self.losses.is_idle):
            self.losses.step_began(forwards, seen.fired, is_alone, probe.name)
        if tallies.is_empty and seen.fired and not (seen.carried or seen.drops or seen.writes or seen.synced > 1):
            self._is_repeated = False  # the usual case: no finding so far, and none now
            return
        tallies.missed("step-without-gradients", key)
        if seen.synced > 1 and not seen.drops:
            tallies.check("sync-every-micro-batch", key, True, probe.name, **{"backward passes": seen.synced})
        if seen.fired:
            tallies.missed("dead-hooks", key)
        elif probe.was_converted() and not seen.is_paused:
            tallies.check("dead-hooks", key, True, probe.name)
        if seen.doubtful or gradient is not probe.gradient:
            return
        if seen.fired:
            self._check_accumulations(probe.name, seen)
        elif seen.after_step and gradient._version == probe.version and not forwards:
            # writes through .data change no version, so values have to confirm it
            is_same = self._before is None or torch.equal(self._before, gradient)
            tallies.check("stepped-twice", key, is_same, probe.name)
            self._is_repeated = True

    def _check_accumulations(self, name: str, seen: Interval) -> None:
        tallies, key, writes = self._tallies, self._key, self.writes
        if not self._is_repeated:
            tallies.missed("stepped-twice", key)
        self._is_repeated = False
        # the last count takes a confirmation by values
        is_confirmed = writes.stays or tallies.count("missing-zero-grad", key) < MISTAKES["missing-zero-grad"].repeats - 1
        tallies.check("missing-zero-grad", key, seen.carried and is_confirmed, name)
        cleared = seen.cleared(writes.clears)
        # a single drop in each step may be deliberate, to inspect a gradient
        tallies.check("micro-batch-discarded", key, cleared >= 2 and not self._attacks, name, discarded=cleared)
        if seen.writes and writes.clips:
            tallies.check("clip-per-micro-batch", key, True, name, **{"times in a step": seen.writes})

    def accumulated(self, interval: Interval) -> None:
        """Look for inputs with a gradient behind the running backward pass, if it is uncertain whether passes are cleared by mistake."""
        tallies, rule, key = self._tallies, "micro-batch-discarded", self._key
        is_cleared = interval.drops or interval.writes
        if is_cleared and not self._attacks and tallies.count(rule, key) and not tallies.is_fact(rule, key):
            self._attacks = reaches_input(losses_going_backward())

    def step_without_gradient(self, probe: Probe, optimizer: Optimizer, forwards: int, is_alone: bool) -> bool:
        """Judge a probe without a gradient before the optimizer's step. Returns whether other parameters have one.

        ``forwards``, ``is_alone``: as above; it may be the turn of another optimizer.
        """
        if any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]):
            self._is_called()
            self._futile = 0
            return True
        if forwards or probe.has_fired:
            self._is_called()
        if is_alone and type(optimizer).__module__.startswith("torch.optim."):
            self._futile += _WITH_FORWARD if forwards else 1
            if self._is_elsewhere and self._futile == _ELSEWHERE:
                self._tallies.seen("another-model-trained", self._key, evidence={"steps": float(_ELSEWHERE)})
        if (probe.interval.fired or self._futile >= _FUTILE) and not probe.interval.doubtful:
            self._tallies.check("step-without-gradients", self._key, True, probe.name)
        return False

    def _is_called(self) -> None:
        """The model is part of the training after all."""
        if self._is_elsewhere:
            self._is_elsewhere = False
            self._tallies.retract("another-model-trained", self._key)

    def step_ended(self, gradient: Tensor | None) -> None:
        """Keep the gradient's values while a second step on the same gradient is suspected but not certain."""
        self._before = None
        if gradient is None or self._tallies.is_empty:
            return
        if self._tallies.count("stepped-twice", self._key) > 0 and not self._tallies.is_fact("stepped-twice", self._key):
            self._before = gradient.clone()

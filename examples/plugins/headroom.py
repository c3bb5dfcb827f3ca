"""How far the learning rate is from the one at which the loss rises: a plugin to copy beside your script.

It has some steps monitored, does something of its own around the optimizer's step, and adds a value to the record. docs/guide/headroom.md
says what the value means.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_gradmon.plugins import ActiveStep, Key, Plugin

#: The search ends when the step is known to this factor; outside of these bounds it is not looked for.
_EXACT = 2**0.25
_LEAST, _MOST = 2.0**-10, 2.0**10


@dataclass(frozen=True)
class CriticalStep:
    """What a search has found.

    Attributes:
        low: the largest step at which the loss did not rise; 0 if it rose at each.
        high: the smallest one at which it rose; infinite if it rose at none.
        evaluations: of the loss, with that of no step.
    """

    low: float
    high: float
    evaluations: int

    @property
    def size(self) -> float:
        """The best guess: the geometric mean of both bounds, or the one that is known."""
        return math.sqrt(self.low * self.high) if self.low > 0 and self.high < math.inf else self.low or self.high


def critical_step(loss: Callable[[float], float], guess: float = 1.0, evaluations: int = 8) -> CriticalStep:
    """Look for the smallest multiple of a step at which the loss rises, by doubling or halving and then by halving the gap on a log scale.

    This is the critical learning rate of Kalra and others (2026, arXiv 2601.16979) over the learning rate: the smallest one that makes the
    loss rise in the next step. A loss that falls and rises several times has several such steps, and one of them is found.

    Args:
        loss: after this multiple of the step; NaN counts as risen.
        guess: the multiple to begin with.
        evaluations: the most of them.
    """
    begin, count = loss(0.0), 1
    low, high, step = 0.0, math.inf, min(max(guess, _LEAST), _MOST)
    while count < evaluations and not high <= low * _EXACT:
        if loss(step) <= begin:
            low = step
        else:
            high = step
        count += 1
        step = math.sqrt(low * high) if low > 0 and high < math.inf else 2 * low if low else high / 2
        if not _LEAST <= step <= _MOST:
            break
    return CriticalStep(low, high, count)


_KEY = Key("gradmon", "", "lr_over_critical")


class Headroom(Plugin):
    """Measures the learning rate over the critical one, from which on the loss would rise: ``gradmon/lr_over_critical``, below 1 while
    there is head-room. The quantity is that of Kalra and others (2026, arXiv 2601.16979), whose critical sharpness is 2 over the critical
    learning rate; here along the step that the optimizers take, of all parameters together.

    In some steps the loss of the batch is computed after multiples of that step, without gradients, and compared with the one before it.
    Parameters, buffers and torch's random generators are restored bit for bit; each evaluation draws the same random numbers. What else a
    forward changes, such as a counter in Python or numpy's generator, is not restored.

    Memory in these steps: two copies of the trained parameters and one of the buffers. Time: ``evaluations`` forwards, and each waits for
    the device. Steps that a scaler or a policy skips are left out, and those with a closure. With several ranks, all have to use it: they
    take the mean of their losses.

    Args:
        loss: computes the loss of the current batch as the loop does, with its autocast; called without gradients, right after the step.
        every: measured on steps divisible by it; None for only those that :meth:`ask` asks for.
        evaluations: the most forwards of one search, 3 at least; 8 find the critical rate to a fifth or so.

    Attributes:
        last: what was found last, in multiples of the learning rate; None before the first time.

    Raises:
        ValueError: ``every`` or ``evaluations`` is too small.
    """

    name = "headroom"

    def __init__(self, loss: Callable[[], Tensor], every: int | None = 50, evaluations: int = 8) -> None:
        if not callable(loss):
            raise ValueError(f"loss has to be a function that computes the loss of the current batch, got {loss!r}")
        if (every is not None and every < 1) or evaluations < 3:
            raise ValueError(f"every has to be 1 at least and evaluations 3, got every={every!r}, evaluations={evaluations!r}")
        self._loss, self._every, self._evaluations = loss, every, evaluations
        self.last: CriticalStep | None = None
        self._before: dict[Tensor, Tensor] = {}
        self._is_asked = self._is_due = False
        self._asked_step: int | None = None  # the step that was asked for, until its optimizers have stepped
        self._ratio: float | None = None

    def ask(self) -> None:
        """Measure the step that opens next as well; a step with a closure, or one that is skipped, has no value. With several
        ranks, all have to ask before the same step.
        """
        self._is_asked = True
        if hasattr(self, "context"):
            self.context.ask_cadence_again()

    def wants(self, step: int, asked: bool, ahead: int | None = 0) -> bool:
        """The steps that it measures in are monitored."""
        return asked or (self._is_asked and ahead == 0) or step == self._asked_step or self._is_regular(step)

    def _is_regular(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0

    def on_detach(self) -> None:
        """Hold nothing of the model."""
        self._before, self._is_due = {}, False

    def on_step_open(self, step: ActiveStep) -> None:
        """Decide whether this step is measured; it may be that of a step that was asked for, and is forgotten."""
        self._before, self._ratio = {}, None
        if self._is_asked:
            self._is_asked, self._asked_step = False, step.number
        self._is_due = step.number == self._asked_step or self._is_regular(step.number)

    def on_optimizer_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Copy what the step will change."""
        if self._is_due and not has_closure:
            trained = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            self._before.update((p, p.detach().clone()) for p in trained if p not in self._before)

    def after_attempt(self, step: ActiveStep, applied: bool) -> None:
        """Search along the step that was taken."""
        before, self._before, self._is_due, self._asked_step = self._before, {}, False, None
        if before and applied:
            guess = self.last.size if self.last is not None else 1.0
            with self._restoring(before) as loss_after:
                self.last = critical_step(loss_after, guess, self._evaluations)
            self._ratio = 1 / self.last.size

    def annotate(self, step: ActiveStep) -> None:
        """Add what was found to the record."""
        if self._ratio is not None:
            step.values[_KEY], self._ratio = self._ratio, None

    @contextlib.contextmanager
    def _restoring(self, before: dict[Tensor, Tensor]) -> Iterator[Callable[[float], float]]:
        """Gives the loss after multiples of the step, and restores everything afterwards."""
        module = self.context.module
        buffers = [] if module is None else list(module.buffers())
        kept = [(tensor, tensor.detach().clone()) for tensor in (*before, *buffers)]
        states = _generators({tensor.device for tensor in before})

        def loss_after(multiple: float) -> float:
            for parameter, after in kept[: len(before)]:
                wide = torch.promote_types(after.dtype, torch.float32)
                begin = before[parameter].to(wide)
                parameter.copy_(begin + multiple * (after.to(wide) - begin))
            _set_generators(states)
            found = self._loss().detach().float()
            for buffer, value in kept[len(before) :]:
                buffer.copy_(value)
            return float(_mean_of_ranks(found))

        with torch.no_grad():
            try:
                yield loss_after
            finally:
                for tensor, value in kept:
                    tensor.copy_(value)
                _set_generators(states)


def _generators(devices: set[torch.device]) -> dict[torch.device, Tensor]:
    """The states of torch's random generators of the CPU and of these devices."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    for device in devices - states.keys():
        functions = torch.get_device_module(device)
        states[device] = functions.get_rng_state() if device.type == "mps" else functions.get_rng_state(device)
    return states


def _set_generators(states: dict[torch.device, Tensor]) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        elif device.type == "mps":
            torch.mps.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def _mean_of_ranks(loss: Tensor) -> Tensor:
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        loss = loss.clone()
        torch.distributed.all_reduce(loss)
        loss /= torch.distributed.get_world_size()
    return loss

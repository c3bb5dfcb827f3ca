"""Takes the truth from a loop that says what it does: plain hooks and copies, nothing of torch_gradmon."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from .loop import Loop
from .optimizers import BY_CLOSURE, inner
from .recorded_modules import RecordedModules, copied, divided
from .truth import OF_BACKWARD, Record, Tensors, Truth

#: For how many steps a live change holds.
TUNED_FOR = 2


class Recorder(RecordedModules):
    """Records a run."""

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()
        self._early: dict[str, list[float]] = {}
        self._latest: Tensors = {}
        self._unscaled: set[int] = set()
        self._is_attached = True
        self._tuned, self._tuned_for = "", 0
        self._is_stepping = self._has_raised = False
        self._since = 0  # number of the first step of the monitor that there is

    def built(self, loop: Loop) -> None:
        self.loop, model, record = loop, loop.model, self.record
        self.next = loop.p.start_step
        record.names = {name: q.dim() for name, q in model.named_parameters()}
        record.modules = {name or "[root module]": type(m).__name__ for name, m in model.named_modules()}
        record.frozen_for_good = {name for name, q in model.named_parameters() if not q.requires_grad}
        record.reference = {name: copied(q) for name, q in model.named_parameters()}
        place = {id(q): name for name, q in model.named_parameters()}
        self._owned = [[(place[id(q)], q) for g in o.param_groups for q in g["params"]] for o in loop.optimizers]
        taken = {name for owned in self._owned for name, _ in owned}
        self._owned.append([(name, q) for name, q in model.named_parameters() if name not in taken])
        record.owners = [{name for name, _ in owned} for owned in self._owned[:-1]]
        self.hang(model, copy.deepcopy(model) if {"difference", "coordinates"} & {*loop.p.metrics} else None)

    # --- which step it is ------------------------------------------------------------------------------------------------------

    def ensure(self) -> Truth | None:
        """The step in flight; None where the monitor is away."""
        if self.open is None and self._is_attached and not self.loop.p.hand:
            self._begin()
        return self.open

    def _begin(self) -> None:
        self.open = Truth(self.next, logged=self._early, iteration=self.loop.number)
        self._early, self.next = {}, self.next + 1
        if self._tuned_for:
            self.open.tuned, self._tuned_for = self._tuned, self._tuned_for - 1

    def iteration(self, number: int) -> None:
        if self.loop.p.hand:
            self._close()
            self._begin()

    def forward(self, trains: bool) -> Any:
        if self.loop.p.hand and self.open is not None and not self.open.stepped:
            trains |= self.loop.model.training  # in a step that is begun by hand the mode alone decides
        if trains and self._has_raised and not self._is_stepping and not self.loop.p.hand:
            self._close()
        return super().forward(trains)

    def step_over(self) -> None:
        self._unscaled.clear()
        self._close()

    def _close(self) -> None:
        if self.open is not None and (self.open.stepped or self.loop.p.hand):
            if not self.open.stepped:
                self.open.before = self._latest
            elif len(self._owned) - 2 not in self.open.stepped:  # cut before the last optimizer has stepped
                of_nobody = {name for name, _ in self._owned[-1]}
                self.open.before.update({name: gradient for name, gradient in self._latest.items() if name in of_nobody})
            self.record.steps[self.open.number] = self.open
        elif self.open is not None:  # what no optimizer has stepped is no step
            self.next = self.open.number
        self.open, self._latest, self._has_raised = None, {}, False

    def over(self) -> None:
        if self._has_raised or self.loop.p.hand:  # by hand the caller says what a step is
            self._close()
        self.record.unfinished = self.open

    def _last(self) -> int | None:
        return max((number for number in self.record.steps if number >= self._since), default=None)

    def poll(self) -> None:
        last = self._last()
        logged = {} if last is None else {key: list(values) for key, values in self.record.steps[last].logged.items()}
        self.record.polls.append((last, logged))

    def log(self, key: str, value: Any) -> None:
        if not self._is_attached:
            return
        if self.open is not None:
            target = self.open.logged
        elif (last := self._last()) is not None:
            target = self.record.steps[last].logged
        else:
            target = self._early
        target.setdefault(key, []).append(float(value))

    def act(self, what: str) -> None:
        if what.startswith("detail_"):
            self._tuned, self._tuned_for = what.removeprefix("detail_"), TUNED_FOR
        else:
            self._close()
            self._is_attached = what != "leave"
            self._since = self.next if what == "resume" else self._since

    def save(self, model: nn.Module) -> None:
        """What records cannot be saved."""

    # --- gradients -------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        truth = self.ensure()
        self.in_backward, self.has_arrived = True, False
        began = {} if truth is None else truth.measured()
        try:
            yield
        except BaseException:
            if truth is not None and self.has_arrived and self.loop.p.attached:
                truth.drop(truth.kept)
                self._latest = {}
            elif truth is not None:  # its forward is known as one of a loss that is not used
                truth.drop(began, OF_BACKWARD)
            raise
        finally:
            self.in_backward = False
        if truth is not None:
            truth.kept = truth.measured()
        if self.loop.p.players != "in_backward":
            self._latest = self._gradients(None)
        if self.open is not None:
            self.open.edited = False

    def scale_of(self, part: int) -> float:
        """What the gradients of an optimizer are multiplied by at this moment; the last part is that of no optimizer."""
        return 1.0 if self.loop.scaler is None or part in self._unscaled else self.loop.scaler.get_scale()

    def _gradients(self, part: int | None, scale: float | None = None) -> Tensors:
        """Copies of all gradients as they are, divided by what they are still multiplied by."""
        found = {}
        for number, owned in enumerate(self._owned):
            if part is None or part == number:
                by = self.scale_of(number) if scale is None else scale
                found.update({name: divided(q.grad, by) for name, q in owned if q.grad is not None})
        return found

    def edited(self) -> None:
        if self.open is not None:
            self.open.edited = True

    def unscaled(self, index: int) -> None:
        self._unscaled.add(index)

    # --- steps -----------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stepping(self, index: int) -> Iterator[None]:
        if self._has_raised and not self.loop.p.hand:
            self._close()
        truth, optimizer = self.ensure(), self.loop.optimizers[index]
        if truth is None:
            yield
            return
        if not truth.parameters:
            truth.parameters = {name: copied(q) for name, q in self.loop.model.named_parameters()}
            truth.frozen = {name for name, q in self.loop.model.named_parameters() if not q.requires_grad}
        before = {name: copied(q) for name, q in self._owned[index]}
        scales: list[float] = []
        refused = False

        def last(stepping: Any, args: Any, kwargs: Any) -> None:
            """Behind every hook of the loop's own."""
            nonlocal refused
            found_inf, scale = getattr(stepping, "found_inf", None), getattr(stepping, "grad_scale", None)
            refused = found_inf is not None and bool(found_inf > 0)
            scales.append(1.0 if scale is None else float(scale))
            if self.loop.p.optimizer not in BY_CLOSURE:
                self._take(truth, index, scales[-1])

        handle = inner(optimizer).register_step_pre_hook(last)
        self._is_stepping = True
        try:
            yield
        except BaseException:  # an attempt as well, which is over when the next forward begins
            truth.applied, self._has_raised = False, True
            truth.stepped.append(index)
            truth.before = dict(self._latest)
            raise
        finally:
            handle.remove()
            self._is_stepping = False
        if not scales:  # the scaler did not let it step
            refused = True
            self._take(truth, index, 1.0)
        truth.stepped.append(index)
        truth.applied &= not refused
        if not refused:
            truth.base.update(before)
            truth.updated.update({name: copied(q) for name, q in self._owned[index]})
        for name, q in self._owned[index] if scales else ():
            state = getattr(optimizer, "optimizer", optimizer).state.get(q, {})  # what is loaded into a wrapper stays there
            kept = {key: copied(value) for key, value in state.items() if isinstance(value, Tensor)}
            truth.states[name] = {**kept, "param": copied(q), "grad": None if q.grad is None else copied(q.grad)}

    def closure(self, index: int, closure: Callable[[], Tensor]) -> Tensor:
        loss = closure()
        if (truth := self.ensure()) is not None:
            self._take(truth, index, 1.0)
        return loss

    def _take(self, truth: Truth, index: int, scale: float) -> None:
        """The gradients that this optimizer uses, and what they were at the end of the last backward pass; with those of the last
        optimizer come those of nobody.
        """
        last = len(self._owned) - 1
        for part in (index, last) if index == last - 1 else (index,):
            names = {name for name, _ in self._owned[part]}
            used = self._gradients(part, scale if part == index else None)
            if self.in_backward:
                self._latest |= used
            for source, now in ((truth.used, used), (truth.before, self._latest)):
                for name in names:
                    source.pop(name, None)
                source.update({name: gradient for name, gradient in now.items() if name in names})

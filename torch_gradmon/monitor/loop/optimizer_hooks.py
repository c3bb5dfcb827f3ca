"""Hooks on optimizers: they report steps and closures, and remove gradients for skipped steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core.fence import Fence
from .gradient_hold import GradientHolds
from .idle_stretch import IdleStretch
from .listener import LoopDriver
from .step_hooks import StepHooks
from .wrappers import WrapperCalls


class OptimizerHooks:
    """Reports the steps of optimizers.

    Args:
        driver: receives the reports. Only the optimizers' hooks keep it alive.
        fence: guards each report.
        optimizers: in the order in which they step.
        wrappers: around the optimizers, each with the one inside, whose steps are part of theirs.
        stretch: idle steps that are only counted.
        container: of models that were put together for the monitor, kept alive by the optimizers' hooks, too.

    Attributes:
        may_skip: steps may be skipped. If not, skipping costs nothing.
        in_closure: a closure is running.
        steps: the hooks on their steps.
    """

    def __init__(
        self,
        driver: LoopDriver,
        fence: Fence,
        optimizers: Iterable[Optimizer],
        wrappers: Iterable[tuple[Any, Optimizer]],
        stretch: IdleStretch,
        container: nn.Module | None = None,
    ) -> None:
        self._driver, self._fence = weakref.ref(driver), fence
        wake = weakref.WeakMethod(stretch.stop)  # else the loss of an optimizer would show only after the stretch
        self._references = [weakref.ref(optimizer, lambda _: (stop := wake()) and stop()) for optimizer in optimizers]
        self._stretch, self._depth = stretch, stretch.depth
        self.may_skip = self.in_closure = self._is_odd = False
        self.holds = GradientHolds(fence.complaints)
        self.wrappers = WrapperCalls(wrappers, self._wrapper_began, self._wrapper_ended)
        self.steps = StepHooks((driver, container), self.alive(), self._before_hook, self._ended_hook, stretch)

    def allow_skips(self, are_allowed: bool) -> None:
        """Whether steps may be skipped from now on."""
        self.may_skip = are_allowed

    def alive(self) -> list[Optimizer]:
        """The optimizers that still exist."""
        return [optimizer for reference in self._references if (optimizer := reference()) is not None]

    @property
    def are_plain(self) -> bool:
        """Whether a single optimizer calls each hook once a step so far, without wrapper, closure, or check for infinite gradients."""
        return len(self._references) == 1 and not (self._is_odd or self.wrappers.exist)

    def is_stepping(self, optimizer: Optimizer | None) -> bool:
        """Whether the optimizer is in its step."""
        return self._depth.get(id(optimizer), 0) > 0

    def remove(self) -> None:
        """Remove all hooks; a second call does nothing."""
        self.heal()
        self.steps.remove()
        self.wrappers.remove()

    def heal(self) -> None:
        """Forget a step in which the optimizer raised: its depth and its removed gradients."""
        self._depth.clear()
        if self.holds.any:
            self.holds.drop()

    # --- before the step -----------------------------------------------------------------------------------------------------

    def _before_hook(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._stretch.left and self._stretch.step_began(optimizer, args, kwargs):
            return None
        return self._fence.run(self._step_began, optimizer, args, kwargs)

    def _step_began(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        driver = self._driver()
        depth = self._depth[id(optimizer)] = self._depth.get(id(optimizer), 0) + 1
        self._is_odd |= depth > 1
        if driver is None or depth > 1:  # a subclass whose step calls super().step fires the hooks twice
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        # a subclass may take something else there
        has_closure = callable(closure)
        self._is_odd |= has_closure
        if driver.step_began(optimizer, has_closure, torch._C._current_graph_task_id() != -1):
            self.holds.hold(optimizer)
        elif self.may_skip and has_closure:
            self.holds.note_versions(optimizer)
        if closure is None or not has_closure:
            return None
        wrapped = self._followed(closure, optimizer)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _followed(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        def followed() -> Any:
            self.in_closure = True
            try:
                loss = closure()
            except BaseException as error:
                self.heal()  # no forward or backward pass comes before the next step, which would be taken for a part of this one
                self._fence.run(self._closure_raised, optimizer, type(error).__name__)
                raise
            finally:
                self.in_closure = False
            self._fence.run(self._closure_ended, optimizer)
            return loss

        return followed

    def _closure_raised(self, optimizer: Optimizer, error: str) -> None:
        if (driver := self._driver()) is not None:
            driver.closure_raised(optimizer, error)

    def _closure_ended(self, optimizer: Optimizer) -> None:
        if (driver := self._driver()) is not None and driver.closure_ended(optimizer):
            self.holds.hold(optimizer)

    # --- after the step ------------------------------------------------------------------------------------------------------

    def _ended_hook(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._fence.run(self._step_ended, optimizer)

    def _step_ended(self, optimizer: Optimizer) -> None:
        depth = self._depth[id(optimizer)] = max(0, self._depth.get(id(optimizer), 1) - 1)
        if depth == 0 and not self.wrappers.goes_on(optimizer):
            self._step_over(optimizer)

    def _step_over(self, optimizer: Optimizer) -> None:
        driver = self._driver()
        if self.holds.any:
            self.holds.restore(optimizer, is_wrapped=bool(self.wrappers.around(optimizer)))
        if driver is not None:
            found_inf = getattr(optimizer, "found_inf", None)
            self._is_odd |= found_inf is not None
            is_backward_running = torch._C._current_graph_task_id() != -1
            driver.step_ended(optimizer, found_inf if isinstance(found_inf, Tensor) else None, is_backward_running)

    def _wrapper_began(self, optimizer: Optimizer) -> None:
        self._fence.run(self._outer_began, optimizer)

    def _outer_began(self, optimizer: Optimizer) -> None:
        if (driver := self._driver()) is not None:
            driver.wrapper_began(optimizer)

    def _wrapper_ended(self, optimizer: Optimizer, has_stepped: bool) -> None:
        self._fence.run(self._outer_ended, optimizer, has_stepped)

    def _outer_ended(self, optimizer: Optimizer, has_stepped: bool) -> None:
        if has_stepped:
            self._step_over(optimizer)
        elif (driver := self._driver()) is not None:
            driver.wrapper_ended(optimizer)

"""Hooks on optimizers: they report steps and closures, and remove gradients for skipped steps."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...capture.hooks import Handles
from ...core.fence import Fence
from .gradient_hold import GradientHolds
from .listener import LoopDriver
from .wrappers import WrapperCalls


def is_backward_running() -> bool:
    """Whether a backward pass is running."""
    return torch._C._current_graph_task_id() != -1


def _put_first(optimizer: Optimizer) -> None:
    """Move the post-step hooks of monitors before those of others, in their order.

    Then other hooks find the gradients restored, and their writes do not count as updates. For hooks before the step see
    :meth:`OptimizerHooks._step_called`.
    """
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        known = getattr(optimizer, hooks, None)
        if isinstance(known, OrderedDict):
            for name in [name for name, hook in reversed(known.items()) if hasattr(hook, "keeps_alive")]:
                known.move_to_end(name, last=False)


class OptimizerHooks:
    """Reports the steps of optimizers.

    Args:
        driver: receives the reports. Only the optimizers' hooks keep it alive.
        fence: guards each report.
        optimizers: in the order in which they step.
        wrappers: around the optimizers, each with the one inside, whose steps are part of theirs.

    Attributes:
        may_skip: steps may be skipped. If not, skipping costs nothing.
        in_closure: a closure is running.
        is_shielded: a compiler is loaded, and does not trace the hooks.
        called: ids of optimizers that have stepped. A wrapper around one may have omitted its step.
        stepped_within: ids of the parameters of optimizers that have stepped within a backward pass.
        before_step: called with the optimizer before its step is reported.
        await_backward: requests a report when the running backward pass ends.
    """

    def __init__(
        self,
        driver: LoopDriver,
        fence: Fence,
        optimizers: Iterable[Optimizer],
        wrappers: Iterable[tuple[Any, Optimizer]],
    ) -> None:
        self._driver, self._fence = weakref.ref(driver), fence
        self._references = [weakref.ref(optimizer) for optimizer in optimizers]
        self._handles = Handles()
        self._depth: dict[int, int] = {}
        self._around_last: dict[int, Callable[..., Any]] = {}  # the wrapper of the last hook before each optimizer's step
        self._targets: dict[str, Callable[..., Any]] = {"sees": self._step_hook}
        self.is_shielded = self.may_skip = self.in_closure = False
        self.holds = GradientHolds(fence.complaints)
        self.wrappers = WrapperCalls(wrappers, self._wrapper_began, self._wrapper_ended)
        self.called: set[int] = set()
        self.stepped_within: set[int] = set()
        self.before_step: Callable[[Optimizer], object] = lambda _: None
        self.await_backward: Callable[[], object] = lambda: None
        for optimizer in self.alive():
            # the only strong reference to the driver: a monitor without other references lives as long as its optimizer
            self._handles.of_optimizer(optimizer.register_step_pre_hook(self._strongly(driver, "began", self._step_called)))
            self._handles.of_optimizer(optimizer.register_step_post_hook(self._strongly(driver, "ended", self._ended_hook)))
            _put_first(optimizer)
        self.shield()

    def alive(self) -> list[Optimizer]:
        """The optimizers that still exist."""
        return [optimizer for reference in self._references if (optimizer := reference()) is not None]

    def is_stepping(self, optimizer: Optimizer | None) -> bool:
        """Whether the optimizer is in its step."""
        return self._depth.get(id(optimizer), 0) > 0

    def _strongly(self, driver: LoopDriver, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        self._targets[name] = method
        targets = self._targets

        def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return targets[name](optimizer, args, kwargs)

        hook.keeps_alive = driver  # type: ignore[attr-defined]
        return hook

    def shield(self) -> None:
        """Prevent a compiled ``optimizer.step`` from tracing its hooks, if a compiler is loaded: importing one takes a second."""
        if not self.is_shielded and (compiler := sys.modules.get("torch._dynamo")) is not None:
            self.is_shielded = True
            for name, method in self._targets.items():
                self._targets[name] = compiler.disable(method)

    def remove(self) -> None:
        """Remove all hooks; a second call does nothing."""
        self.heal()
        self._handles.remove()
        self._around_last = {}
        self.wrappers.remove()

    def heal(self) -> None:
        """Forget a step in which the optimizer raised: its depth and its removed gradients."""
        self._depth.clear()
        if self.holds.any:
            self.holds.drop()

    # --- before the step -----------------------------------------------------------------------------------------------------

    def _step_called(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrap the last hook before the step for this call: it may clip, so the gradients are final only when it returns.

        Other hooks keep their positions: one that removes itself must stay last in the dict, which is being iterated over.
        """
        known = getattr(optimizer, "_optimizer_step_pre_hooks", None)
        name = next(reversed(known)) if isinstance(known, OrderedDict) and known else None
        if not isinstance(known, OrderedDict) or name is None or hasattr(known[name], "keeps_alive"):
            return self._fence.run(self._step_began, optimizer, args, kwargs)
        hook = known[name]

        def and_ours(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if name in known:
                known[name] = hook
            result = hook(optimizer, args, kwargs)
            if self._around_last.get(id(optimizer)) is not and_ours:
                return result  # a leftover of a step in which an earlier hook raised
            del self._around_last[id(optimizer)]
            given = result if isinstance(result, tuple) and len(result) == 2 else (args, kwargs)
            ours = self._targets["sees"](optimizer, *given)  # this function is part of the graph of a compiled step
            return result if ours is None else ours

        known[name] = self._around_last[id(optimizer)] = and_ours
        return None

    def _step_hook(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._fence.run(self._step_began, optimizer, args, kwargs)

    def _step_began(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        driver = self._driver()
        depth = self._depth[id(optimizer)] = self._depth.get(id(optimizer), 0) + 1
        if driver is None or depth > 1:  # a subclass whose step calls super().step fires the hooks twice
            return None
        self.called.add(id(optimizer))
        within = is_backward_running()
        if within and not torch.compiler.is_compiling():
            self.stepped_within.update(id(p) for group in optimizer.param_groups for p in group["params"])
            self.await_backward()
        self.before_step(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        # a subclass may take something else there
        has_closure = callable(closure)
        if driver.step_began(optimizer, has_closure, within):
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
            except BaseException:
                self.heal()  # no forward or backward pass comes before the next step, which would be taken for a part of this one
                self._fence.run(self._closure_raised, optimizer)
                raise
            finally:
                self.in_closure = False
            self._fence.run(self._closure_ended, optimizer)
            return loss

        return followed

    def _closure_raised(self, optimizer: Optimizer) -> None:
        if (driver := self._driver()) is not None:
            driver.closure_raised(optimizer)

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
            driver.step_ended(optimizer, found_inf if isinstance(found_inf, Tensor) else None, is_backward_running())

    def _wrapper_began(self, optimizer: Optimizer) -> None:
        self._fence.run(self._outer_began, optimizer)

    def _outer_began(self, optimizer: Optimizer) -> None:
        self.called.add(id(optimizer))
        if (driver := self._driver()) is not None:
            driver.wrapper_began(optimizer)

    def _wrapper_ended(self, optimizer: Optimizer, has_stepped: bool) -> None:
        self._fence.run(self._outer_ended, optimizer, has_stepped)

    def _outer_ended(self, optimizer: Optimizer, has_stepped: bool) -> None:
        if has_stepped:
            self._step_over(optimizer)
        elif (driver := self._driver()) is not None:
            driver.wrapper_ended(optimizer)

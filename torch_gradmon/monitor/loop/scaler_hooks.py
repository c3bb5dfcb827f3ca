"""Wrappers around the methods of a GradScaler: no optimizer hook fires when it skips a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...capture.gradients import GradScale, calling_scaler, scale_of
from ...capture.hooks import WrappedMethod
from ...core.fence import Fence
from ...core.validation import inside
from .listener import LoopDriver
from .optimizer_hooks import OptimizerHooks


class ScalerHooks:
    """Reports what the scaler does, and knows which gradients it has scaled.

    Args:
        driver: receives the reports; held weakly.
        fence: guards each report.
        optimizers: hooks on the optimizers.
        scaler: the GradScaler; None where none is known.

    Attributes:
        in_step: the scaler's ``step`` is running.
    """

    def __init__(self, driver: LoopDriver, fence: Fence, optimizers: OptimizerHooks, scaler: torch.amp.GradScaler | None) -> None:
        self._driver, self._fence = weakref.ref(driver), fence
        self._optimizers = optimizers
        self._scales = GradScale(optimizers.wrappers.around)
        self._wrapped: list[WrappedMethod] = []
        self._called: set[int] = set()  # ids of optimizers that have stepped; a wrapper around one may have omitted its step
        self.in_step = False
        if scaler is not None:
            self._adopt(scaler)

    def _adopt(self, scaler: torch.amp.GradScaler) -> None:
        self._scales.adopt(scaler)
        around = {"step": self._step, "update": self._update, "scale": self._scale, "unscale_": self._unscale}
        self._wrapped += [WrappedMethod(scaler, name, method) for name, method in around.items()]

    @property
    def is_known(self) -> bool:
        """Whether there is a scaler, as far as is known."""
        return self._scales.scaler is not None

    @property
    def scale(self) -> Tensor | None:
        """The scaler's scale, on its device."""
        return scale_of(self._scales.scaler)

    def remove(self) -> None:
        """Remove the wrappers; a second call does nothing."""
        for wrapped in reversed(self._wrapped):
            wrapped.remove()
        self._wrapped = []

    def inverse_scale(self, optimizer: Optimizer | None) -> Tensor | None:
        """The factor that unscales the gradients of ``optimizer``, as a device tensor; None if they are unscaled."""
        return self._scales.inverse(optimizer, stepping=self._optimizers.is_stepping(optimizer))

    def wrapper_began(self, optimizer: Optimizer) -> None:
        """A wrapper around the optimizer is about to step."""
        self._called.add(id(optimizer))

    def step_began(self, optimizer: Optimizer, takes_values: bool) -> None:
        """The optimizer is about to step, and only now its scaler is certain.

        An unknown scaler matters where the step ``takes_values``, and the search costs more than all else in a step that does not.
        """
        self._called.add(id(optimizer))
        if not takes_values and self._scales.scaler is None:
            return
        reason = self._scales.mistake(optimizer, calling := calling_scaler())
        if reason is not None:
            if self._scales.scaler is None and calling is not None:
                self._adopt(calling)
            if (driver := self._driver()) is not None:
                driver.scale_mistaken(reason, calling)

    def _inside(self, optimizer: Any) -> Any:
        known = self._optimizers.wrappers.inside(optimizer)
        return inside(optimizer) if known is optimizer else known

    def _step(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # what is stepped may be of any kind; only those that were attached are followed
        stepped = self._inside(optimizer)
        inner = next((each for each in self._optimizers.alive() if each is stepped), None)
        self._called.discard(id(inner))
        self.in_step = inner is not None
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            self.in_step = False
        if inner is not None and id(inner) not in self._called:
            self._report("step_overflowed", inner)
        return result

    def _scale(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._report("loss_scaled")
        return original(*args, **kwargs)

    def _unscale(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self._report("unscaling", self._inside(optimizer))
        original(optimizer, *args, **kwargs)
        self._report("unscaled", self._inside(optimizer))

    def _update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        driver, scaler = self._driver(), self._scales.scaler
        # a scale that the loop itself sets remains
        is_held, overrules = driver.holds_scaler() if driver is not None and not args and not kwargs else (False, False)
        before = ScalerAsItWas(scaler) if is_held and scaler is not None else None
        original(*args, **kwargs)
        if before is not None:
            before.put_back(overrules)
        self._report("scaler_updated")

    def _report(self, event: str, *args: object) -> None:
        if (driver := self._driver()) is not None:
            self._fence.run(getattr(driver, event), *args)


class ScalerAsItWas:
    """Restores scale and growth of a GradScaler after an ``update()`` that counted a skipped step as a good one.

    If the scaler found infinite gradients, its update remains. The device decides this, without synchronising.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._kept = [
            (name, tensor.clone()) for name in ("_scale", "_growth_tracker") if (tensor := _of(scaler, name)) is not None
        ]
        states = getattr(scaler, "_per_optimizer_states", {}).values()
        found = [tensor for state in states for tensor in state.get("found_inf_per_device", {}).values()]
        self._found_inf = torch.stack([tensor.to(found[0].device).max() for tensor in found]).max() if found else None

    def put_back(self, overruled: bool) -> None:
        """Undo the update. ``overruled``: even if it found infinite gradients, since other ranks found none."""
        for name, before in self._kept:
            now = _of(self._scaler, name)
            if now is not None:
                refused = None if self._found_inf is None or overruled else self._found_inf.to(now.device) > 0
                now.copy_(before if refused is None else torch.where(refused, now, before))


def _of(scaler: torch.amp.GradScaler, name: str) -> Tensor | None:
    found = getattr(scaler, name, None)
    return found if isinstance(found, Tensor) else None

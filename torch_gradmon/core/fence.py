"""The fence around all code that runs inside a training step."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .errors import GradmonWarning, TrainingStopped, WarningLog
from .torch_modes import capture_check, outside_dispatch_modes

_has_grad, _set_grad = torch.is_grad_enabled, torch._C._set_grad_enabled
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack

_CAPTURED = (
    "a graph is captured (as a CUDA graph is): nothing in it is measured, since its replays call no hooks. What runs outside of it is: "
    "gradients, parameters and updates where the loop calls optimizer.step(), and gradients before the clip by monitor.clip_grad_norm_"
)


def is_disabled() -> bool:
    """Whether ``GRADMON_DISABLE`` is set in the environment, which makes new monitors inert."""
    return os.environ.get("GRADMON_DISABLE", "") not in ("", "0")


class Fence:
    """Runs monitoring code, unless it is ``inert``, so that it can neither fail nor affect training, and measures its time."""

    def __init__(self, complaints: WarningLog, inert: bool) -> None:
        self.complaints, self.inert = complaints, inert
        self.is_inside = False  # the time of what happens now is that of a running method
        self.had_grad = False  # grad mode was on in the caller of the running method
        self.is_captured = False  # the loop was last seen while a graph was captured, whose replays call nothing
        self.deferred: Callable[[], None] | None = None  # for the next call, which does it first
        self._captures = capture_check()
        self._lock = threading.RLock()  # with several GPUs, hooks fire on one of autograd's threads for each
        self.seconds = self._counted = 0.0  # of its own until the running call, and at the last :meth:`cost`
        self._since = self._entered = time.perf_counter()

    def run(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call ``method``; a failure becomes a warning. A nested call does nothing, nor does one while a graph is captured."""
        if self.inert:
            return None
        if self._captures is not None and self._captures():
            # a copy to the host, or a question about one, would spoil the graph; and rows would have no values before a replay
            self.is_captured = True
            self.complaints.add("graph", _CAPTURED)
            return None
        with self._lock:
            if self.is_inside:
                return None
            self._entered = time.perf_counter()
            modes = outside_dispatch_modes() if _function_modes() or _dispatch_modes() else None
            if modes is not None:
                modes.__enter__()
            self.is_inside, self.had_grad = True, (grad := _has_grad())
            if grad:
                _set_grad(False)
            try:
                deferred, self.deferred = self.deferred, None
                if deferred is not None:
                    deferred()
                return method(*args)
            except (TrainingStopped, GradmonWarning):  # the second if warnings are errors
                raise
            except Exception as error:
                name = method.__name__
                self.complaints.add(f"internal:{name}", f"{name} failed, some values are lost; training continues", error)
                return None
            finally:
                _set_grad(grad)
                if modes is not None:
                    modes.__exit__(None, None, None)
                self.is_inside = False
                self.seconds += time.perf_counter() - self._entered

    def spent(self) -> float:
        return self.seconds + (time.perf_counter() - self._entered if self.is_inside else 0.0)

    def exclude_time(self, seconds: float) -> None:
        self._entered += seconds

    def cost(self) -> float:
        """Time spent inside, as a share of the time since the last call."""
        now = time.perf_counter()
        if self.is_inside:  # the part of the running call until now
            self.seconds += now - self._entered
            self._entered = now
        share = (self.seconds - self._counted) / max(now - self._since, 1e-9)
        self._counted, self._since = self.seconds, now
        return share


F = TypeVar("F", bound=Callable[..., Any])


def fenced(method: F) -> F:
    @functools.wraps(method)
    def call(self: Any, *args: Any) -> Any:
        return self.fence.run(method, self, *args)

    return call  # type: ignore[return-value]

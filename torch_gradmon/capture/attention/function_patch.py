"""Observe all calls of a torch function during a forward pass, from any caller in one thread, without changing them."""

from __future__ import annotations

import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: The module that calls a model compiled by ``torch.compile``.
COMPILER = "torch._dynamo.eval_frame"
#: The module that calls a model again after ``torch.jit.trace``, to check the trace.
TRACER = "torch.jit._trace"
#: Number of frames between a module's hook and such a caller.
_DEPTH = 12


class FunctionPatch:
    """Replaces a function in every module that has it among its globals, such as by ``from ... import``.

    A mode that overrides torch's functions would see calls by other ways too, but it makes torch take other code paths, as in an encoder
    in evaluation mode, and stops the compiler. A replacement left behind by an interrupt only passes calls on.

    Args:
        home: the module that defines the function.
        name: its name there.
        saw: called with the arguments and the result of each call; a bound method does not keep its object alive.
    """

    def __init__(self, home: types.ModuleType, name: str, saw: Callable[[tuple[Any, ...], Mapping[str, Any], Any], None]) -> None:
        self._home, self._name = home, name
        self._saw = weakref.WeakMethod(saw) if isinstance(saw, types.MethodType) else lambda: saw
        self._places: list[tuple[dict[str, Any], str]] = []
        self._patched: _PatchedFunction | None = None
        self._searched = 0

    def enter(self) -> None:
        """Replace the function until :meth:`leave`, and observe the calls of this thread."""
        self.leave()
        original = _active(getattr(self._home, self._name))
        if self._patched is None or original is not self._patched.original or self._searched != len(sys.modules):
            self._searched = len(sys.modules)
            self._places = _places_of(original)
            self._patched = _PatchedFunction(original, self._saw)
        self._patched.thread = threading.get_ident()
        self._put(self._patched.function, instead_of=original)

    def leave(self) -> None:
        """Restore the function, unless it was replaced again meanwhile. Idempotent."""
        patched = self._patched
        if patched is not None and patched.thread is not None:
            patched.thread = None
            self._put(_active(patched.original), instead_of=patched.function)

    def _put(self, function: Any, instead_of: Any) -> None:
        for scope, name in self._places:
            if scope.get(name) is instead_of:
                scope[name] = function


class _PatchedFunction:
    """Permanent forwarding wrapper; safe to keep after the patch is removed.

    It is a function, because the compiler cannot look through a callable object.

    Attributes:
        thread: whose calls are observed; None once the patch is removed.
    """

    def __init__(self, original: Any, listener: Callable[[], Callable[..., None] | None]) -> None:
        self.original = original
        self.thread: int | None = None

        def function(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not torch.compiler.is_compiling() and self.thread == threading.get_ident() and (saw := listener()) is not None:
                saw(args, kwargs, result)
            return result

        function.gradmon_patch = self  # type: ignore[attr-defined]
        self.function = function


def _active(function: Any) -> Any:
    """``function`` without inactive patches around it."""
    while (patched := getattr(function, "gradmon_patch", None)) is not None and patched.thread is None:
        function = patched.original
    return function


def _places_of(function: Any) -> list[tuple[dict[str, Any], str]]:
    # not in torch's C++ modules, which pass their functions to modes that override functions
    modules = [m for name, m in list(sys.modules.items()) if isinstance(m, types.ModuleType) and not name.startswith("torch._C")]
    scopes = [vars(module) for module in modules]
    return [(scope, name) for scope in scopes for name, value in list(scope.items()) if value is function]


def is_called_by(caller: str) -> bool:
    """Whether the Python module ``caller`` is among the callers of the module whose hook is running, a few frames up at most."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == caller:
            return True
        frame = frame.f_back
    return False

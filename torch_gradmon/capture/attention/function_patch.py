"""See the calls of a function of torch for the time of a forward, whoever makes them, and change none."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: Calls the model that ``torch.compile`` was given.
COMPILER = "torch._dynamo.eval_frame"
#: Calls the model that ``torch.jit.trace`` was given once more, to see whether the trace is right.
TRACER = "torch.jit._trace"
#: Frames between a hook on a module and such a caller.
_DEPTH = 12


class FunctionPatch:
    """Stands in for a function in every module that has it among its globals, such as by ``from ... import``.

    A mode that overrides torch's functions would see calls by other ways too, but its mere presence makes torch take other paths,
    as in an encoder in evaluation mode, and stops the compiler. Left behind by an interrupt, the stand-in only passes calls on.

    Args:
        home: where the function is at home.
        name: its name there.
        saw: called with the arguments and the result of each call; a method does not keep its object alive.
    """

    def __init__(self, home: types.ModuleType, name: str, saw: Callable[[tuple[Any, ...], Mapping[str, Any], Any], None]) -> None:
        self._home, self._name = home, name
        self._saw = weakref.WeakMethod(saw) if isinstance(saw, types.MethodType) else lambda: saw
        self._places: list[tuple[dict[str, Any], str]] = []
        self._stand_in: _PatchedFunction | None = None
        self._searched = 0

    def enter(self) -> None:
        """Take the function's place, until :meth:`leave`."""
        self.leave()
        original = _needed(getattr(self._home, self._name))
        if self._stand_in is None or original is not self._stand_in.original or self._searched != len(sys.modules):
            self._searched = len(sys.modules)
            self._places = _places_of(original)
            self._stand_in = _PatchedFunction(original, self._saw)
        self._stand_in.is_in = True
        self._put(self._stand_in.function, instead_of=original)

    def leave(self) -> None:
        """Give the place back, where nobody has taken it since; calling it again does nothing."""
        stand_in = self._stand_in
        if stand_in is not None and stand_in.is_in:
            stand_in.is_in = False
            self._put(_needed(stand_in.original), instead_of=stand_in.function)

    def _put(self, function: Any, instead_of: Any) -> None:
        for scope, name in self._places:
            if scope.get(name) is instead_of:
                scope[name] = function


class _PatchedFunction:
    """Calls one function for ever, so that whoever keeps it calls the right one.

    The compiler reads through a function, and not through an object that can be called.
    """

    def __init__(self, original: Any, listener: Callable[[], Callable[..., None] | None]) -> None:
        self.original, self.is_in = original, False

        def function(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not torch.compiler.is_compiling() and self.is_in and (saw := listener()) is not None:
                saw(args, kwargs, result)
            return result

        function.stand_in = self  # type: ignore[attr-defined]
        self.function = function


def _needed(function: Any) -> Any:
    """What a stand-in that nobody needs any more stands for."""
    while (stand_in := getattr(function, "stand_in", None)) is not None and not stand_in.is_in:
        function = stand_in.original
    return function


def _places_of(function: Any) -> list[tuple[dict[str, Any], str]]:
    # not in torch's C++ parts, which hand what stands there to modes that override functions
    modules = [m for name, m in list(sys.modules.items()) if isinstance(m, types.ModuleType) and not name.startswith("torch._C")]
    scopes = [vars(module) for module in modules]
    return [(scope, name) for scope in scopes for name, value in list(scope.items()) if value is function]


def is_called_by(caller: str) -> bool:
    """Whether the module whose hook is running was called by the Python module of that name, or a few calls further out."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == caller:
            return True
        frame = frame.f_back
    return False

"""See the calls of a function of torch for the time of a forward, whoever makes them, and change none."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: Frames between a hook on a module and the compiler that calls the module.
_DEPTH = 12


class Spy:
    """Stands in for a function in every module that has it among its globals, such as by ``from ... import``.

    A mode that overrides torch's functions would see calls by other ways too, but its mere presence makes torch take other paths,
    as in an encoder in evaluation mode, and stops the compiler. Left behind by an interrupt, the stand-in only passes calls on.

    Args:
        home: where the function is at home.
        name: its name there.
        saw: called with the arguments and the result of each call.
    """

    def __init__(self, home: types.ModuleType, name: str, saw: Callable[[tuple[Any, ...], Mapping[str, Any], Any], None]) -> None:
        self._home, self._name = home, name
        self._places: list[tuple[dict[str, Any], str]] = []
        self._original: Any = None
        self._searched = 0
        self._is_in = False

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._is_in:
                return self._original(*args, **kwargs)
            result = self._original(*args, **kwargs)
            saw(args, kwargs, result)
            return result

        self._stand_in = stand_in

    def enter(self) -> None:
        """Take the function's place, until :meth:`leave`."""
        self.leave()
        original = getattr(self._home, self._name)
        if original is not self._original or self._searched != len(sys.modules):
            self._original, self._searched = original, len(sys.modules)
            self._places = list(_places_of(original))
        self._is_in = True
        for scope, name in self._places:
            if scope.get(name) is original:
                scope[name] = self._stand_in

    def leave(self) -> None:
        """Give the place back, where nobody has taken it since; calling it again does nothing."""
        if self._is_in:
            self._is_in = False
            for scope, name in self._places:
                if scope.get(name) is self._stand_in:
                    scope[name] = self._original


def _places_of(function: Any) -> list[tuple[dict[str, Any], str]]:
    # not in torch's C++ parts, which hand what stands there to modes that override functions
    modules = [m for name, m in list(sys.modules.items()) if isinstance(m, types.ModuleType) and not name.startswith("torch._C")]
    scopes = [vars(module) for module in modules]
    return [(scope, name) for scope in scopes for name, value in list(scope.items()) if value is function]


def is_called_by_compiler() -> bool:
    """Whether the module whose hook is running was called through ``torch.compile``."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            return True
        frame = frame.f_back
    return False

"""Observe all calls of a torch function during a forward pass, from any caller in one thread, without changing them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F

#: The module that calls a model compiled by ``torch.compile``.
COMPILER = "torch._dynamo.eval_frame"
#: The module that calls a model again after ``torch.jit.trace``, to check the trace.
TRACER = "torch.jit._trace"
#: Number of frames between a module's hook and such a caller.
_DEPTH = 12

_Saw = Callable[[tuple[Any, ...], Mapping[str, Any], Any], None]


class FunctionPatch:
    """Replaces a function in every module that has it among its globals, such as by ``from ... import``, while anybody observes it.

    A global of a module belongs to the process, so there is one patch of a function for all monitors and threads; two that replaced each
    other's replacement would pile up. Each observer hears of the calls of its own thread only.

    A mode that overrides torch's functions would see calls by other ways too, but it makes torch take other code paths, as in an encoder
    in evaluation mode, and stops the compiler. A replacement left behind by an interrupt only passes calls on.

    Args:
        home: the module that defines the function.
        name: its name there.
    """

    def __init__(self, home: types.ModuleType, name: str) -> None:
        self._home, self._name = home, name
        # the thread of each; changed by single operations, since an observer may go when garbage is collected, at any point
        self._observers: dict[CallObserver, int] = {}
        self._lock, self._is_forked = threading.RLock(), False
        self._places: list[tuple[dict[str, Any], str]] = []
        self._searched = 0
        self._last: Callable[[], _Observed | None] = lambda: None
        self._scripted: list[_Observed] = []  # those that torch.jit knows by their ids, kept for good
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def add(self, observer: CallObserver) -> _Observed:
        """Report calls of this thread to ``observer`` until :meth:`discard`. Returns the replacement, which it has to keep."""
        self._observers[observer] = threading.get_ident()
        with self._no_compilation(), self._lock:
            return self._install()

    def discard(self, observer: CallObserver) -> None:
        """Report no more calls to ``observer``, and restore the function after the last one. Idempotent."""
        if self._observers.pop(observer, None) is not None and not self._observers:
            with self._no_compilation(), self._lock:
                self._restore()

    def called(self, function: _Observed, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """``function`` was called by this thread."""
        if self._observers and function is self._last():  # and not another one, which is called by what somebody has put over it
            thread = threading.get_ident()
            for observer, of_thread in list(self._observers.items()):
                if of_thread == thread:
                    observer.saw(args, kwargs, result)

    def _install(self) -> _Observed:
        current, last = getattr(self._home, self._name), self._last()
        if isinstance(current, _Observed):
            function = current
        else:
            known = (each for each in (last, *self._scripted) if each is not None and each.original is current)
            function = next(known, None) or self._replacement(current)
        if function is not last or self._searched != len(sys.modules):
            self._searched = len(sys.modules)
            self._places = _places_of(function.original)
            self._last = weakref.ref(function)
        for scope, name in self._places:
            if scope.get(name) is function.original:
                scope[name] = function
        return function

    def _replacement(self, original: Any) -> _Observed:
        function = _Observed(original, self)
        with contextlib.suppress(ImportError, AttributeError):  # a private API
            from torch.jit._builtins import _find_builtin, _register_builtin

            operation = _find_builtin(original)  # type: ignore[no-untyped-call]
            if operation is not None:  # another thread may compile a model by torch.jit.script now
                self._scripted.append(function)
                _register_builtin(function, operation)
        return function

    def _restore(self) -> None:
        """Restore the function, unless it was replaced by others meanwhile, or somebody observes it again."""
        for scope, name in () if self._observers else self._places:
            if isinstance(function := scope.get(name), _Observed):
                scope[name] = function.original

    def _forked(self) -> None:
        # other threads, and so those who may hold a lock, do not exist in this process
        self._lock, self._is_forked, own = threading.RLock(), True, threading.get_ident()
        for observer, thread in list(self._observers.items()):
            if thread != own:
                self.discard(observer)

    def _no_compilation(self) -> AbstractContextManager[object]:
        """Wait for the compiler in another thread: it fails if a function that it has read is another one when it guards against that."""
        lock: AbstractContextManager[object] | None = getattr(
            sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None
        )
        return contextlib.nullcontext() if lock is None or self._is_forked else lock


class CallObserver:
    """Observes the calls that one thread makes, between :meth:`enter` and :meth:`leave`.

    Args:
        patch: of the function.
        saw: called with the arguments and the result of each call; a bound method does not keep its object alive.
    """

    def __init__(self, patch: FunctionPatch, saw: _Saw) -> None:
        self._patch = patch
        self._saw = weakref.WeakMethod(saw) if isinstance(saw, types.MethodType) else lambda: saw
        self._kept: _Observed | None = None  # so that code compiled with it stays valid in the next forward

    def enter(self) -> None:
        """Observe the calls of this thread until :meth:`leave`."""
        self._kept = self._patch.add(self)

    def leave(self) -> None:
        """Observe no more. Idempotent; in any thread."""
        self._patch.discard(self)

    def saw(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """This thread has called the function."""
        if (saw := self._saw()) is not None:
            saw(args, kwargs, result)


class _Observed:
    """Passes calls on to ``original``, and reports them to ``patch``. Safe to keep after the patch is removed: a model may have found it in
    a forward. Pickles and copies of it are ``original``, which pickle would refuse for a function. As torch's own function, and other than
    a Python function, it is no method where a class has it as an attribute.
    """

    def __init__(self, original: Any, patch: FunctionPatch) -> None:
        self.original, self._patch = original, patch
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):  # which the compiler and users read from functions
            if hasattr(original, name):
                setattr(self, name, getattr(original, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.original(*args, **kwargs)
        if not torch.compiler.is_dynamo_compiling():
            self._patch.called(self, args, kwargs, result)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return typing.cast, (None, self.original)  # which returns its second argument


def _places_of(function: Any) -> list[tuple[dict[str, Any], str]]:
    """Where ``function`` is, or any replacement."""
    # not in torch's C++ modules, which pass their functions to modes that override functions
    # a copy at once: a collection of garbage, or another thread, may import while a list is made
    modules = [m for name, m in sys.modules.copy().items() if isinstance(m, types.ModuleType) and not name.startswith("torch._C")]
    scopes = [vars(module) for module in modules]
    return [
        (scope, name) for scope in scopes for name, value in scope.copy().items() if value is function or type(value) is _Observed
    ]


#: Of the only function that is observed.
ATTENTION_PATCH = FunctionPatch(F, "scaled_dot_product_attention")


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

"""Hooks that can be hung on a model without changing what it is.

A hook never keeps its owner alive, so a model can be collected as before: a parameter's hook dict lives in C++, where the
garbage collector cannot follow a cycle. What is copied or pickled of a module has none of these hooks (:mod:`torch_gradmon.core.pickling`),
so that EMA copies do not feed the monitor, and a saved module loads where torch_gradmon is not installed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from ..core import pickling as saving
from ..core.pickling import BareState
from ..core.torch_modes import is_traced
from ..step.parameter_refs import Place


def compiled_graphs() -> int:
    """How many graphs ``torch.compile`` has made in this process. That it is imported says nothing: every optimizer does that."""
    utils = sys.modules.get("torch._dynamo.utils")
    graphs: int = 0 if utils is None else utils.counters["stats"]["unique_graphs"]
    return graphs


def takes_hooks(module: nn.Module) -> bool:
    """Whether hooks of Python can be hung on ``module``; a module of TorchScript refuses them."""
    return not isinstance(module, torch.jit.ScriptModule)


class Hook:
    """Calls ``method`` of an object that it holds weakly, with ``extra`` arguments first."""

    __torch_unserializable__ = True  # a tensor that is pickled with it leaves it behind, and torch need not warn of that

    def __init__(self, method: Callable[..., Any], *extra: object) -> None:
        self._method = weakref.WeakMethod(method)
        self._extra = extra
        self.__name__ = "torch_gradmon_hook"  # what inspects hooks expects of a function

    def __call__(self, *args: object) -> Any:
        """Call the method, if its object still lives."""
        method = self._method()
        return None if method is None else method(*self._extra, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        # for whoever copies hooks one by one: sys.audit takes any arguments and returns None, and every Python has it
        return functools.partial, (sys.audit, "torch_gradmon.inert_hook")


class Traceable(Protocol):
    """What a hook does where ``torch.compile`` traces it."""

    def trace(self, output: Any) -> None:
        """Become part of the graph."""


class ModuleHook(Hook):
    """A hook on a module's forward. It vanishes where ``torch.export`` or ``make_fx`` trace it, and where ``torch.compile`` does, unless
    it has a ``tap``.
    """

    def __init__(self, method: Callable[..., Any], *extra: object, tap: Traceable | None = None) -> None:
        super().__init__(method, *extra)
        self._tap = tap

    def __call__(self, *args: object) -> Any:
        """Call the method, unless this is being traced."""
        if torch.compiler.is_compiling():
            if self._tap is not None and not torch.compiler.is_exporting():
                self._tap.trace(args[-1])
            return None
        if torch._C._get_tracing_state() is not None or is_traced():  # the former of torch.jit.trace
            return None
        method = self._method()  # as above; every step of a training comes through here
        return None if method is None else method(*self._extra, *args)


def _untraced_by_itself(method: Callable[..., Any]) -> None:
    """Let the compiler leave calls of ``method`` alone, and all that it calls, where they are not part of a larger graph.

    A compiled model's root calls its own hooks outside of its graph, but with the compiler listening.
    """
    with contextlib.suppress(ImportError, AttributeError):  # private; without it such hooks are graphs of their own
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        set_code_exec_strategy(method.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


_untraced_by_itself(ModuleHook.__call__)


class Handles:
    """Removes hooks, and leaves the hook dicts of parameters as they were found."""

    def __init__(self) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._bare: list[tuple[Place, str]] = []

    def __bool__(self) -> bool:
        return bool(self._handles)

    def add(self, handle: torch.utils.hooks.RemovableHandle) -> None:
        """Take charge of ``handle`` of a hook on a tensor, of which torch itself saves none."""
        self._handles.append(handle)

    def of_module(self, handle: torch.utils.hooks.RemovableHandle) -> None:
        """Take charge of ``handle`` of a hook on a module, which is left out of what is saved of it."""
        self._handles.append(handle)
        saving.leave_out(handle, scripted=False)

    def of_optimizer(self, handle: torch.utils.hooks.RemovableHandle) -> None:
        """Take charge of ``handle`` of a hook on an optimizer, which is left out of what is saved of it."""
        self._handles.append(handle)
        saving.leave_out(handle)

    def on_accumulate(self, place: Place, hook: Hook, first: bool = False) -> None:
        """Hang ``hook`` behind the accumulation of the gradient of the parameter there; ``first`` of all hooks there, none of
        which may be running.
        """
        if (parameter := place()) is not None:
            self._on_tensor(place, "_post_accumulate_grad_hooks", parameter.register_post_accumulate_grad_hook, hook)
            hooks: Any = parameter._post_accumulate_grad_hooks
            if first and len(hooks) > 1:
                *others, own = hooks.items()
                hooks.clear()  # torch goes by the order in which they were put there, which move_to_end() leaves alone
                hooks.update([own, *others])

    def on_gradient(self, place: Place, hook: Hook) -> None:
        """Hang ``hook`` on the gradient that each backward pass brings for the parameter there."""
        if (parameter := place()) is not None:
            self._on_tensor(place, "_backward_hooks", parameter.register_hook, hook)

    def _on_tensor(self, place: Place, attribute: str, register: Callable[..., Any], hook: Hook) -> None:
        parameter = place()
        if parameter is None:
            return
        if getattr(parameter, attribute) is None:
            self._bare.append((place, attribute))
        with _thawed(parameter):
            self.add(register(hook))

    def remove(self) -> None:
        """Remove all hooks; calling it again does nothing."""
        for handle in self._handles:
            saving.remove(handle)
        for place, attribute in self._bare:
            parameter = place()
            if parameter is not None and not getattr(parameter, attribute):
                setattr(parameter, attribute, None)
        self._handles, self._bare = [], []


@contextlib.contextmanager
def _thawed(parameter: torch.nn.Parameter) -> Iterator[None]:
    """A frozen parameter takes no hook, though it keeps those that it has."""
    is_frozen = not parameter.requires_grad
    if is_frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        if is_frozen:
            parameter.requires_grad_(False)


class WrappedMethod:
    """Stands in for a bound method on one instance; a copied or pickled instance has the method of its class.

    Args:
        owner: the instance, held weakly.
        name: of the method.
        around: called with the original method, then the arguments.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner = weakref.ref(owner)
        self._name = name
        self._around: Callable[..., Any] | None = around
        self._previous = owner.__dict__.get(name)
        setattr(owner, name, self)
        if not isinstance(owner.__dict__.get("__getstate__"), BareState):
            owner.__getstate__ = BareState(owner, _unwrapped)

    def _original(self) -> Callable[..., Any]:
        if self._previous is not None:
            return self._previous  # type: ignore[no-any-return]
        owner = self._owner()
        if owner is None:
            raise ReferenceError(f"the object whose {self._name}() was called is gone")
        return getattr(type(owner), self._name).__get__(owner)  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original, or what was put around it."""
        if self._around is None:
            return self._original()(*args, **kwargs)
        return self._around(self._original(), *args, **kwargs)

    def remove(self) -> None:
        """Put back what was there; where somebody wrapped over it since, stay and pass calls through."""
        self._around = None
        owner = self._owner()
        if owner is not None and owner.__dict__.get(self._name) is self:
            previous = self._previous
            while isinstance(previous, WrappedMethod) and previous._around is None:
                previous = previous._previous  # it was removed while this one stood over it
            if previous is None:
                del owner.__dict__[self._name]
            else:
                setattr(owner, self._name, previous)
        if owner is not None and not any(isinstance(value, WrappedMethod) for value in vars(owner).values()):
            vars(owner).pop("__getstate__", None)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner(), self._name)  # as Python does it with a bound method that somebody keeps


def _unwrapped(value: Any) -> Any:
    while isinstance(value, WrappedMethod):
        value = value._previous
    return value

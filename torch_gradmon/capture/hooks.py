"""Hooks that leave a model unchanged otherwise.

A hook never keeps its owner alive, so a model can be collected as before: a parameter's hook dict is in C++, where the garbage collector
cannot follow a cycle. Copies and pickles of a module have none of these hooks (:mod:`torch_gradmon.core.torch_modes`): EMA copies do not
feed the monitor, and a saved module loads without torch_gradmon.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableSet
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..core import torch_modes
from ..core.torch_modes import BareState, capture_check, ending, is_exporting, is_traced
from ..step.model_index import Place, wrapped_in

#: The module that calls a model compiled by ``torch.compile``.
COMPILER = "torch._dynamo.eval_frame"
#: The module that calls a model again after ``torch.jit.trace``, to check the trace.
TRACER = "torch.jit._trace"
#: Number of frames between a module's hook and such a caller.
_DEPTH = 12


def is_called_by(caller: str) -> bool:
    """Whether the Python module ``caller`` is among the callers of the module whose hook is running, a few frames up at most."""
    above = itertools.islice(traceback.walk_stack(sys._getframe(1)), _DEPTH)
    return any(frame.f_globals.get("__name__") == caller for frame, _ in above)


def compiled_graphs() -> int:
    """Number of graphs that ``torch.compile`` has made in this process. Its mere import is no sign: every optimizer imports it."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else utils.counters["stats"]["unique_graphs"]


def takes_hooks(module: nn.Module) -> bool:
    """Whether ``module`` accepts Python hooks; a module of TorchScript does not."""
    return not isinstance(module, torch.jit.ScriptModule)


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside wrappers such as DDP and ``torch.compile``."""
    *_, inner = wrapped_by(module)
    return inner


def wrapped_by(module: nn.Module) -> Iterator[nn.Module]:
    """The module and all modules that it wraps, outermost first."""
    yield module
    while (inner := wrapped_in(module)) is not None:
        yield (module := inner)


def is_compiled(module: nn.Module) -> bool:
    return any(True for _ in compiled_parts(module))


def compiled_parts(module: nn.Module) -> Iterator[nn.Module]:
    return (part for part in module.modules() if "_orig_mod" in part._modules or part._compiled_call_impl is not None)


class Hook:
    """Calls ``method`` of a weakly held object, with ``extra`` as first arguments."""

    __torch_unserializable__ = True  # a pickled tensor leaves the hook behind, and torch does not warn

    def __init__(self, method: Callable[..., Any], *extra: object) -> None:
        self._owner, self._function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]
        self._extra = extra
        self.__name__ = "torch_gradmon_hook"  # code that inspects hooks expects a name

    def __call__(self, *args: object) -> Any:
        # compiled autograd, which would trace what comes, and whose engine takes no callbacks
        if torch.compiler.is_dynamo_compiling():
            return None
        # all gradients of a Jacobian at once, as in torch.autograd.grad(is_grads_batched=True), without readable values
        if args and isinstance(args[-1], torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(args[-1]):
            return None
        owner = self._owner()
        return None if owner is None else self._function(owner, *self._extra, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        # for code that copies hooks one by one: sys.audit accepts any arguments, returns None, and always exists
        return functools.partial, (sys.audit, "torch_gradmon.inert_hook")


class ModuleHook(Hook):
    """A hook on a module's forward. It disappears where ``torch.export`` or ``make_fx`` trace it, and under ``torch.compile``, where
    ``tap`` makes the ``trace`` of an output part of the graph.
    """

    def __init__(self, method: Callable[..., Any], *extra: object, tap: Any = None) -> None:
        super().__init__(method, *extra)
        self._tap = tap

    def __call__(self, *args: object) -> Any:
        # not torch.compiler.is_compiling(), which is True in all threads while one of them compiles
        if torch.compiler.is_dynamo_compiling():
            if self._tap is not None and not is_exporting():
                self._tap.trace(args[-1])
            return None
        # the former under torch.jit.trace, the latter under torch.export
        if torch._C._get_tracing_state() is not None or (torch._C._len_torch_dispatch_stack() and is_traced()):
            return None
        owner = self._owner()  # repeated from the base class for speed
        return None if owner is None else self._function(owner, *self._extra, *args)


def untraced_by_itself(method: Callable[..., Any]) -> None:
    """Let the compiler skip calls of ``method``, and all that it calls, outside of a larger graph.

    A compiled model's root calls its own hooks outside of its graph, but with the compiler active.
    """
    with contextlib.suppress(ImportError, AttributeError):  # a private API; without it such hooks become graphs of their own
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        set_code_exec_strategy(method.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


untraced_by_itself(ModuleHook.__call__)


class Handles:
    """Owns hooks, and restores the hook dicts of parameters on removal."""

    def __init__(self) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._hooked: list[tuple[Place, str]] = []
        self._aside: list[tuple[dict[int, Any], int, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._handles)

    def add(self, handle: torch.utils.hooks.RemovableHandle) -> None:
        """Own the ``handle`` of a hook on a tensor; torch itself never saves these."""
        self._handles.append(handle)

    def of_module(self, handle: torch.utils.hooks.RemovableHandle) -> None:
        """Own the ``handle`` of a hook on a module, which is left out of its saved state."""
        self._handles.append(handle)
        torch_modes.leave_out(handle, scripted=False)
        hooks: Any = handle.hooks_dict_ref()
        if [*dict.keys(hooks)] != [*hooks]:  # the compiler of older releases finds a hook by its place in the order of insertion,
            _replace(hooks, [*hooks.items()])  # which prepend=True does not change

    def on_calls(self, module: nn.Module, method: Callable[..., Any], name: str, first: bool = False) -> None:
        """Call ``method`` when a call of ``module`` begins and when it ends: with whether it begins, ``name``, the module, its positional
        arguments, and its keyword arguments or output. ``first``: before all hooks that see the beginning.
        """
        began, ended = ModuleHook(method, True, name), ModuleHook(method, False, name)
        self.of_module(module.register_forward_pre_hook(began, prepend=first, with_kwargs=True))
        self.of_module(module.register_forward_hook(ended))

    def of_optimizer(self, handle: torch.utils.hooks.RemovableHandle) -> None:
        """Own the ``handle`` of a hook on an optimizer, which is left out of its saved state."""
        self._handles.append(handle)
        torch_modes.leave_out(handle)

    def on_accumulate(self, place: Place, hook: Hook, first: bool = False) -> None:
        """Register ``hook`` after the accumulation of the parameter's gradient. ``first``: before all such hooks; none may be running."""
        if (parameter := place()) is not None:
            self._on_tensor(place, parameter, "_post_accumulate_grad_hooks", parameter.register_post_accumulate_grad_hook, hook)
            hooks: Any = parameter._post_accumulate_grad_hooks
            if first and len(hooks) > 1:
                *others, own = hooks.items()
                _replace(hooks, [own, *others])  # torch uses the order of insertion, which move_to_end() does not change

    def on_gradient(self, place: Place, hook: Hook) -> None:
        if (parameter := place()) is not None:
            self._on_tensor(place, parameter, "_backward_hooks", parameter.register_hook, hook)

    def _on_tensor(
        self, place: Place, parameter: torch.nn.Parameter, attribute: str, register: Callable[..., Any], hook: Hook
    ) -> None:
        self._hooked.append((place, attribute))
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen one accepts no hook, though it keeps those that it has
        try:
            self.add(register(hook))
        finally:
            parameter.requires_grad_(is_trained)

    def set_aside(self) -> None:
        """Take the hooks on modules out until :meth:`restore`; they keep their identity, on which compiled code has guards."""
        for handle in self._handles:
            hooks: Any = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                self._aside.append((hooks, handle.id, hooks.pop(handle.id)))

    def restore(self) -> None:
        for hooks, key, hook in self._aside:
            hooks[key] = hook
        self._aside.clear()

    def remove(self) -> None:
        self._aside.clear()
        for handle in self._handles:
            torch_modes.remove(handle)
        for place, attribute in self._hooked:
            parameter = place()
            hooks = None if parameter is None else getattr(parameter, attribute)
            if hooks is not None and not hooks:  # an empty dict would be looked at in every backward pass
                setattr(parameter, attribute, None)
        self._handles, self._hooked = [], []


class WrappedMethod:
    """Replaces a bound method on one instance, held weakly, by ``around``, which gets the original method first; a copied or pickled
    instance has the method of its class.
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
        if self._around is None:
            return self._original()(*args, **kwargs)
        return self._around(self._original(), *args, **kwargs)

    def remove(self) -> None:
        """Restore the previous method; if it was wrapped again since, stay and pass calls through."""
        self._around = None
        owner = self._owner()
        if owner is not None and owner.__dict__.get(self._name) is self:
            previous = self._previous
            while isinstance(previous, WrappedMethod) and previous._around is None:
                previous = previous._previous  # a wrapper that was removed while this one was around it
            if previous is None:
                del owner.__dict__[self._name]
            else:
                setattr(owner, self._name, previous)
        if owner is not None and not any(isinstance(value, WrappedMethod) for value in vars(owner).values()):
            vars(owner).pop("__getstate__", None)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner(), self._name)  # as for any bound method


def _unwrapped(value: Any) -> Any:
    while isinstance(value, WrappedMethod):
        value = value._previous
    return value


def _replace(hooks: Any, items: list[tuple[int, Any]]) -> None:
    hooks.clear()
    hooks.update(items)


# --- The tensors inside inputs and outputs of modules, each with its path ---

#: Levels of nested containers that are searched.
DEPTH = 4


def tensors_of(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Each tensor inside ``value`` with its path: ``path[0]`` for sequences and integer keys, ``path.key`` for others and dataclasses."""
    if isinstance(value, Tensor):
        yield path, value
    elif depth < DEPTH:
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield from tensors_of(item, f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}", depth + 1)
        elif isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                yield from tensors_of(item, f"{path}[{index}]", depth + 1)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                yield from tensors_of(getattr(value, field.name, None), f"{path}.{field.name}", depth + 1)


def copied(value: Any) -> Any:
    """``value`` with lists, tuples, dicts and tensors copied recursively. Does not synchronise."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, (list, tuple)) else value


# --- Which calls of a model and its parts are training: not those of evaluation, recomputation or a pause ---


class LoopLinks(NamedTuple):
    """What the hooks on modules ask of the loop, and what they tell it."""

    inverse_scale: Callable[[], Tensor | None]  # returns the factor for gradients
    awaited: MutableSet[int]  # backward passes that have reached a parameter, until they end
    root_called: Callable[[nn.Module], object] = lambda _: None  # before anything else
    part_called: Callable[[nn.Module], object] = lambda _: None  # with a part of the model that runs while no step is open


class PassTracker:
    """The state of the running forward.

    Inside a backward pass a forward is a recomputation; grad mode does not show it, since checkpointing switches it.

    A part that is called without the root, while no step is open, either begins a step or is tried between two; only the backward pass
    shows which. Until the root was trained, each such call begins a step; from then on none does, and each does again once ``backward()``
    has reached the inputs or outputs of such a call.
    """

    _last_called: ClassVar[object] = None  # the sign of the tracker whose root was called last, in any thread

    def __init__(self) -> None:
        self.handled = id(sys.exc_info()[1])  # the exception that the script handled when it called the root
        self._sign = PassTracker._last_called = object()
        self.links = LoopLinks(lambda: None, set())
        self.root_trains: bool | None = None  # whether the running forward of the root is training; None while none is running
        self.forward_seen = False  # the root was ever called
        self.is_paused = False  # nothing is measured; :attr:`paused` knows more
        self.awaits_part = False  # watch parts, because none was seen to be trained before the root so far
        self.missed = False  # parts turned out to have been called for a step before it began
        # calls in evaluation mode are training, because such a call began the step or the loop trains so
        self.counts_eval = False
        self.is_tentative = False  # no backward pass has confirmed that so far
        self.by_hand = False  # the loop has begun the step explicitly, so training mode alone decides, as in torch-module-monitor
        self.is_open = True  # values count; False in a step without measurements
        self.builds_graph = True  # the root was called with gradients
        self._root_trained = self._parts_lead = False
        self.captures = capture_check()

    @property
    def paused(self) -> bool:
        """Nothing is measured at the moment: a reference runs, or a graph is captured, whose values come with its replays."""
        return self.is_paused or (self.captures is not None and self.captures())

    # --- steps -----------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    # --- the root --------------------------------------------------------------------------------------------------------------

    def root_began(self, module: nn.Module) -> bool:
        """Start a forward of the root. Returns whether it is training."""
        self.handled, PassTracker._last_called = id(sys.exc_info()[1]), self._sign
        self.builds_graph = torch.is_grad_enabled()
        self.root_trains = self.trains(module)
        self.forward_seen = True
        return self.root_trains

    def trains(self, module: nn.Module) -> bool:
        if torch.is_grad_enabled():
            return module.training or self.counts_eval
        return self.by_hand and module.training and not is_called_by(TRACER)

    def training_began(self, end_is_seen: bool) -> None:
        """The root's training forward began, which its own hook may have missed; ``end_is_seen``: a hook will see its end."""
        self.handled, PassTracker._last_called = id(sys.exc_info()[1]), self._sign
        self.forward_seen = True
        if not self.counts_eval:
            self._root_trained, self.awaits_part = True, False
        if end_is_seen:
            self.root_trains = True

    def ending(self) -> str:
        """The exception that ends the training now, as text; empty without one."""
        return ending(self.handled, is_last=PassTracker._last_called is self._sign)

    @property
    def in_training(self) -> bool:
        """False inside an evaluation pass and inside a recomputation, which happens while a backward pass runs."""
        return self.root_trains is not False and torch._C._current_graph_task_id() == -1

    def in_forward(self) -> bool:
        """Whether the root's training forward is running, and it is no recomputation."""
        return self.root_trains is True and torch._C._current_graph_task_id() == -1 and not self.paused

    # --- parts that are called directly ----------------------------------------------------------------------------------------

    def part_began(self) -> bool:
        """Whether a call of a part, made while no monitored step is open, begins a step if it is training."""
        # not after a step that is not monitored has begun
        self.awaits_part = (self.awaits_part or self.is_open) and not self._parts_lead
        return self._parts_lead or not self._root_trained

    def watch_part(self, module: nn.Module, value: Any, missed: bool) -> None:
        """Watch whether ``backward()`` reaches this part's inputs or outputs; ``missed``: the part did not begin the step."""
        counts = module.training or self.counts_eval
        if self.paused or not self.awaits_part or not counts or not self.in_training:
            return
        tensor = next((t for _, t in tensors_of(value, "") if t.requires_grad and t.grad_fn is not None), None)
        if tensor is not None:  # the hook is freed with the graph
            tensor.register_hook(Hook(self._reached, missed))  # type: ignore[no-untyped-call]

    def _reached(self, missed: bool, gradient: Tensor | None) -> None:
        # autograd.grad, which only inspects a model, does not count
        if gradient is not None and torch.autograd.Variable._execution_engine.is_checkpoint_valid():
            self._parts_lead = True
            self.missed |= missed and self.is_open

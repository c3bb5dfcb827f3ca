"""Parameters that a model uses but does not have: of modules in plain lists and dicts, and tensors that are no ``nn.Parameter``."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...core.torch_modes import SharedContext

#: Containers within containers that are looked into.
_DEPTH = 2
#: Objects of a container that are looked at.
_MOST = 1000
#: Forwards in turn that make layers: a lazy one is made once.
_IN_TURN = 3


class HiddenParameters:
    """Those of one model, held weakly.

    Args:
        module: the watched model.
    """

    def __init__(self, module: nn.Module) -> None:
        registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())} | {
            id(each) for each in module.modules()
        }
        self._found: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # and how often each was written to
        self._results: dict[str, weakref.ref[Tensor]] = {}  # of operations, before the training begins
        for name, each in module.named_modules():
            for attribute, value in list(vars(each).items()):
                if not attribute.startswith(("_parameters", "_buffers", "_modules")):
                    path = f"{name}.{attribute}" if name else attribute
                    for place, tensor in _tensors_in(path, value, registered, _DEPTH):
                        if tensor.is_leaf:
                            self._found.setdefault(place, (weakref.ref(tensor), _writes(tensor)))
                        else:
                            self._results.setdefault(place, weakref.ref(tensor))

    def with_gradients(self, owned: Collection[int]) -> list[str]:
        """Places of those that have a gradient now, and that nothing trains, as the critic that a list keeps out of a generator has an
        optimizer of its own. ``owned``: ids of the tensors that optimizers have, which do not count.
        """
        tensors = ((place, reference(), writes) for place, (reference, writes) in self._found.items())
        return [
            place
            for place, tensor, writes in tensors
            if tensor is not None and tensor.grad is not None and id(tensor) not in owned and _writes(tensor) == writes
        ]

    def results(self, module: nn.Module) -> list[str]:
        """Places of tensors that were computed with a graph before the training began, and are still there, as ``nn.Parameter(...).to()``
        is: no optimizer can have them. ``module``: the model.
        """
        kept = ((place, reference()) for place, reference in self._results.items())
        now = {id(value) for each in module.modules() for value in vars(each).values()}
        return [place for place, tensor in kept if tensor is not None and id(tensor) in now]


def _writes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _tensors_in(path: str, value: Any, registered: Collection[int], depth: int) -> Iterator[tuple[str, Tensor]]:
    if id(value) in registered:
        return
    if isinstance(value, nn.Module):
        for name, parameter in value.named_parameters():
            if id(parameter) not in registered and parameter.requires_grad:
                yield f"{path}.{name}", parameter
    elif isinstance(value, Tensor):
        if torch.is_floating_point(value) and value.requires_grad:
            yield path, value
    elif depth and isinstance(value, Mapping):
        for key, each in list(value.items())[:_MOST]:
            yield from _tensors_in(f"{path}[{key!r}]", each, registered, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for number, each in enumerate(value[:_MOST]):
            yield from _tensors_in(f"{path}[{number}]", each, registered, depth - 1)


#: Running forwards: the thread of each, the modules that were there before, and the parameters of others.
_running: dict[object, tuple[int, set[int], list[int]]] = {}


def _registered(owner: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if torch.compiler.is_dynamo_compiling() or parameter is None or not parameter.requires_grad:
        return
    own = threading.get_ident()
    for thread, known, made in list(_running.values()):
        if thread == own and id(owner) not in known:  # another thread may build a model of its own
            made.append(id(parameter))


@contextlib.contextmanager
def _hook_on_all_modules() -> Iterator[None]:
    """Torch iterates over the dict of such hooks without a lock, so a change of it would raise in another thread that makes a module just
    then. Instead a copy of the dict takes its place.
    """
    home = nn.modules.module
    before = home._global_parameter_registration_hooks
    hooks = OrderedDict(before)
    own = RemovableHandle(hooks).id
    known = {*hooks, own}
    hooks[own] = _registered
    home._global_parameter_registration_hooks = hooks
    try:
        yield
    finally:
        if home._global_parameter_registration_hooks is hooks and hooks.keys() == known:
            home._global_parameter_registration_hooks = before
        else:  # others have registered hooks meanwhile, and know this dict
            del hooks[own]


_ON_ALL_MODULES = SharedContext(_hook_on_all_modules)


def _left(token: object) -> None:
    del _running[token]
    _ON_ALL_MODULES.__exit__()


class MadeInForward:
    """Looks for layers that a forward makes: parameters that are registered while it runs, by modules that the model does not have yet.
    The hook on all modules is taken away with this object, if a forward that raises is the last one.
    """

    def __init__(self) -> None:
        self._remove: weakref.finalize[Any, MadeInForward] | None = None
        self._made: list[int] = []
        self._in_turn = 0

    def begin(self, module: nn.Module) -> None:
        """A forward of ``module`` begins."""
        self.end()
        token = object()
        _running[token] = threading.get_ident(), {id(each) for each in module.modules()}, self._made
        _ON_ALL_MODULES.__enter__()
        self._remove = weakref.finalize(self, _left, token)

    def end(self) -> float:
        """The forward is over. How many it made, if the last ones all made some; else 0."""
        if self._remove is None:
            return 0.0
        self._remove()
        self._remove, made = None, len(self._made)
        self._made.clear()
        self._in_turn = self._in_turn + 1 if made else 0
        return float(made) if self._in_turn >= _IN_TURN else 0.0

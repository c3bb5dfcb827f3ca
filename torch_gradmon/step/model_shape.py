"""Whether a model still has the parameters and modules that it had when it was indexed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, methodcaller

from torch import Tensor, nn

from .parameter_refs import ParameterRefs
from .ranks import is_dtensor, is_sharded

_CHILDREN, _PARAMETERS = attrgetter("_modules"), attrgetter("_parameters")
_KEYS, _VALUES = methodcaller("keys"), methodcaller("values")


class ModelShape:
    """The children and parameters of each module, by identity.

    Args:
        modules: all modules of the model.
        refs: its parameters under ``fully_shard``.
    """

    def __init__(self, modules: Sequence[nn.Module], refs: ParameterRefs) -> None:
        self._refs, places = refs, refs.places.keys()
        self._modules = [weakref.ref(module) for module in modules]
        self._slots = [{k: v for k, v in _slots(m) if (id(m), k) not in places} for m in modules]
        self._known = _identities(modules)
        # during a pass, plain parameters replace sharded ones that a parent module keeps elsewhere
        self._replaced_in_pass = {
            (id(m), name): parameter.shape
            for m in modules
            for name, parameter in m._parameters.items()
            if parameter is not None and (id(m), name) not in places and is_sharded(parameter)
        }
        self._sharded_names = {id(m): {name for owner, name in places if owner == id(m)} for m in modules} if places else {}

    def is_current(self) -> bool:
        """False once a parameter or module was added, removed or replaced, or a parameter was frozen or thawed."""
        if not self._refs.is_current():
            return False
        modules: list[nn.Module] = []
        for reference in self._modules:
            if (module := reference()) is None:
                return False
            modules.append(module)
        if self._known == _identities(modules):
            return True  # as nearly always, and without a call for each module or parameter
        for module, slots in zip(modules, self._slots, strict=True):
            sharded = self._sharded_names.get(id(module), ())
            if len(module._parameters) + len(module._modules) != len(slots) + len(sharded):
                return False
            for name, child in module._modules.items():
                if slots.get(name) != id(child):
                    return False
            for name, parameter in module._parameters.items():
                if name in sharded or (parameter is not None and not isinstance(parameter, nn.Parameter)):
                    continue  # torch.func.functional_call puts plain tensors there during a call
                expected = slots.get(name)
                actual = None if parameter is None else (id(parameter), parameter.requires_grad)
                if expected != actual and not self._is_replacement(parameter, id(module), name):
                    return False
        return True

    def _is_replacement(self, parameter: Tensor | None, owner: int, name: str) -> bool:
        shape = self._replaced_in_pass.get((owner, name))
        return parameter is not None and not is_dtensor(parameter) and parameter.shape == shape


def _identities(modules: Sequence[nn.Module]) -> tuple[list[object], ...]:
    """Names and identities of the children and parameters of all ``modules``, how many each has, and which parameters are trained."""
    children, parameters = [*map(_CHILDREN, modules)], [*map(_PARAMETERS, modules)]
    values = [*chain.from_iterable(map(_VALUES, parameters))]
    return (
        [*map(len, children), *map(len, parameters)],
        [*chain.from_iterable(map(_KEYS, [*children, *parameters]))],
        [*map(id, chain.from_iterable(map(_VALUES, children))), *map(id, values)],
        [value is not None and value.requires_grad for value in values],
    )


def _slots(module: nn.Module) -> Iterator[tuple[str, object]]:
    for name, child in module._modules.items():
        yield name, id(child)
    for name, parameter in module._parameters.items():
        yield name, None if parameter is None else (id(parameter), parameter.requires_grad)

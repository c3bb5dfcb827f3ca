"""The parameters and modules of a watched model under their canonical names, without keeping the model alive."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.keys import ROOT, WRAPPERS, canonical_name, canonical_names
from .parameter_refs import ParameterRefs, Place
from .ranks import is_dtensor, is_sharded


class ModelIndex:
    """Names and weak references, taken at one moment; :meth:`is_current` tells cheaply whether they still hold.

    A tied parameter stands once, under its first name; ``aliases`` keeps the others.

    Args:
        module: the watched model.
        excluded: no metric applies to a module or parameter in whose canonical name this pattern is found. Whole-model values
            take all parameters all the same.
        format_name: a last say of the user over each canonical name.
        distinct: a parameter that this finds is another one on each rank, and their elements are taken together.

    Raises:
        ValueError: ``format_name`` gives one name to two parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        excluded: re.Pattern[str] | None = None,
        format_name: Callable[[str], str] | None = None,
        distinct: re.Pattern[str] | None = None,
    ) -> None:
        self._shelf = ParameterRefs(module)
        raw = {name: (parameter, place) for name, parameter, place in self._shelf.parameters(module)}
        short = canonical_names(raw)
        rename = format_name or (lambda name: name)
        self.names: list[str] = []
        self.parameters: dict[str, dict[str, Any]] = {}  # shape and dtype by name, for the run directory
        self.references: list[Place] = []
        self.trainable: set[str] = set()
        self.doubtful: set[str] = set()  # of these, the ones that are frozen for now, perhaps for a part of each step only
        self.matrices: dict[str, int] = {}  # of two or more dimensions, with the fan in
        self.spread: set[str] = set()  # parameters of which each rank has a part
        self.on_mesh = False  # whether any parameter lies on a mesh of ranks
        self.excluded: set[str] = set()
        self.aliases: dict[str, list[str]] = {}
        name_of: dict[int, str] = {}
        for raw_name, (parameter, place) in raw.items():
            name = name_of[id(parameter)] = rename(short[raw_name])
            self.names.append(name)
            self.parameters[name] = {"shape": list(parameter.shape), "dtype": str(parameter.dtype)}
            self.references.append(place)
            if parameter.requires_grad:
                self.trainable.add(name)
            if parameter.dim() >= 2:
                self.matrices[name] = _fan_in(module, raw_name, parameter)
            self.on_mesh |= is_dtensor(parameter)
            if is_sharded(parameter) or (distinct is not None and distinct.search(name)):
                self.spread.add(name)
            if excluded is not None and excluded.search(short[raw_name]):
                self.excluded.add(name)
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(f"format_module_name_fn gives the name {twice!r} to more than one parameter; names must differ")
        for raw_name, parameter, _ in self._shelf.parameters(module, remove_duplicate=False):
            if (
                raw_name not in raw and id(parameter) in name_of
            ):  # torch itself leaves out modules that say they are equal to others
                self.aliases.setdefault(name_of[id(parameter)], []).append(canonical_name(raw_name))
        modules = dict(module.named_modules())
        short = canonical_names(name for name in modules if not _is_wrapped(name, modules))
        self.modules: dict[str, weakref.ref[nn.Module]] = {}
        for raw_name, name in short.items():
            child = modules[raw_name]
            if excluded is None or name == ROOT or not excluded.search(name):
                self.modules[rename(name)] = weakref.ref(child)
        self.kinds = {rename(name): kind_of(modules[raw]) for raw, name in short.items()}
        # what is_current compares: for each module its children and its parameters, by identity
        places = self._shelf.places.keys()
        self._shape = [(weakref.ref(m), {k: v for k, v in _slots(m) if (id(m), k) not in places}) for m in modules.values()]
        # for the time of a pass plain parameters stand in for spread ones that a module above keeps, out of our sight
        self._stood_in_for = {
            (id(m), name): parameter.shape
            for m in modules.values()
            for name, parameter in m._parameters.items()
            if parameter is not None and (id(m), name) not in places and is_sharded(parameter)
        }
        self._shelved = {id(m): {name for owner, name in places if owner == id(m)} for m in modules.values()} if places else {}

    @property
    def facts(self) -> dict[str, Any]:
        """What a run directory keeps of the model: its parameters and modules in their order, and more of each."""
        return {"parameters": self.parameters, "aliases": self.aliases, "matrices": self.matrices, "kinds": self.kinds}

    def succeed(self, before: ModelIndex) -> None:
        """What was trainable ``before`` and is frozen now may be thawed again within the step, as where two optimizers step by turns
        and each freezes what the other one trains; whether it was trained is seen by its gradient.
        """
        self.doubtful = (before.trainable - self.trainable).intersection(self.names)
        self.trainable |= self.doubtful

    def is_current(self) -> bool:
        """False once a parameter or module was added, removed or replaced, or a parameter froze or thawed."""
        if not self._shelf.is_current():
            return False
        for reference, slots in self._shape:
            module = reference()
            if module is None:
                return False
            shelved = self._shelved.get(id(module), ())
            if len(module._parameters) + len(module._modules) != len(slots) + len(shelved):
                return False
            for name, child in module._modules.items():
                if slots.get(name) != id(child):
                    return False
            for name, parameter in module._parameters.items():
                if name in shelved or (parameter is not None and not isinstance(parameter, nn.Parameter)):
                    continue  # torch.func.functional_call puts plain tensors there for the time of a call
                expected = slots.get(name)
                actual = None if parameter is None else (id(parameter), parameter.requires_grad)
                if expected != actual and not self._stands_in(parameter, id(module), name):
                    return False
        return True

    def _stands_in(self, parameter: Tensor | None, owner: int, name: str) -> bool:
        shape = self._stood_in_for.get((owner, name))
        return parameter is not None and not is_dtensor(parameter) and parameter.shape == shape

    def positions(self, parameters: Iterable[Tensor]) -> list[int]:
        """Positions in :attr:`names` of those of ``parameters`` that belong to the model, ascending."""
        wanted = {id(parameter) for parameter in parameters}
        return [position for position, reference in enumerate(self.references) if id(reference()) in wanted]


#: Modules whose weights have the inputs of one output behind the first dimension.
_LINEAR = (nn.Linear, nn.Bilinear, nn.RNNBase, nn.MultiheadAttention, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _fan_in(module: nn.Module, name: str, parameter: Tensor) -> int:
    """How many products an output is the sum of; 0 for a parameter that is no factor, such as an embedding, or of which that is unknown."""
    owner = module
    for part in name.split(".")[:-1]:  # a module of TorchScript has no get_submodule()
        owner = owner._modules[part]  # type: ignore[assignment]
    # by its shape: to look into one that is spread over ranks, they would have to talk
    return math.prod(parameter.shape[1:]) if isinstance(owner, _LINEAR) else 0


def _is_wrapped(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether the module is all that a wrapper such as DDP or a compiled module holds, which then stands for it."""
    return bool(name) and wrapped_in(modules[name.rpartition(".")[0]]) is modules[name]


def kind_of(module: nn.Module) -> str:
    """The class of ``module``, for one of TorchScript the one that it was made from."""
    return str(module.original_name) if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def wrapped_in(module: nn.Module) -> nn.Module | None:
    """What a wrapper such as DDP or a compiled module holds, where that is all; None for any other module."""
    if len(module._modules) != 1 or module._parameters:
        return None
    ((name, inner),) = module._modules.items()
    return inner if name in WRAPPERS else None


def _slots(module: nn.Module) -> Iterator[tuple[str, object]]:
    for name, child in module._modules.items():
        yield name, id(child)
    for name, parameter in module._parameters.items():
        yield name, None if parameter is None else (id(parameter), parameter.requires_grad)

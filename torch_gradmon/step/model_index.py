"""The parameters and modules of a watched model under their canonical names, without keeping the model alive."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from ..core.keys import ROOT, WRAPPERS, canonical_name, canonical_names
from .gradient_source import PLAIN_GRADIENTS, GradientSource
from .model_shape import ModelShape
from .parameter_refs import ParameterRefs, Place
from .ranks import is_dtensor, is_sharded

if TYPE_CHECKING:
    from .whole_model import WholeModel


class TrainableNames:
    """Which parameters are trained.

    Attributes:
        names: those that require a gradient, or are doubtful.
        doubtful: those that are frozen now, perhaps only for a part of each step.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names, self.doubtful = set(names), set[str]()

    def inherit_from(self, before: TrainableNames, known: Collection[str]) -> None:
        """Inherit from the index before; ``known``: all parameters that there are now.

        A parameter that was trainable then and is frozen now may be thawed again within the step, as with alternating optimizers that
        freeze each other's parameters. Its gradient shows whether it was trained.
        """
        self.doubtful = (before.names - self.names).intersection(known)
        self.names |= self.doubtful

    def trained(self, thawed: Collection[str]) -> set[str]:
        """The parameters that were trained in a step in which these were ``thawed``."""
        return self.names - self.doubtful.difference(thawed)

    def is_frozen(self, name: str) -> bool:
        """Whether a parameter is frozen now."""
        return name not in self.names or name in self.doubtful


class ModelIndex:
    """Names and weak references of one moment; :meth:`is_current` checks cheaply whether they are still valid.

    A tied parameter appears once, under its first name; ``aliases`` has the others.

    Args:
        module: the watched model.
        excluded: metrics skip modules and parameters whose canonical name matches this pattern. Whole-model values use all parameters.
        format_name: the user's change of each canonical name.
        distinct: a matching parameter differs between ranks, and its elements on all ranks are counted.
        source: where gradients are.
        whole: the model that ``module`` is a part of, where other ranks have the others.

    Raises:
        ValueError: ``format_name`` gives one name to two parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        excluded: re.Pattern[str] | None = None,
        format_name: Callable[[str], str] | None = None,
        distinct: re.Pattern[str] | None = None,
        source: GradientSource = PLAIN_GRADIENTS,
        whole: WholeModel | None = None,
    ) -> None:
        self.source = source
        self.foreign: set[str] = set()  # parameters that only other ranks have
        refs = ParameterRefs(module)
        raw = {name: (parameter, place) for name, parameter, place in refs.parameters(module)}
        short = canonical_names(raw)
        of_user = format_name or (lambda name: name)

        def in_whole(name: str) -> str:
            return name if whole is None else whole.name_of(module, name)

        def is_excluded(name: str) -> bool:
            return excluded is not None and excluded.search(name) is not None

        self.names: list[str] = []
        self.parameters: dict[str, dict[str, Any]] = {}  # shape and dtype by name, for the run directory
        self.references: list[Place] = []
        self.matrices: dict[str, int] = {}  # of two or more dimensions, with their fan-in
        self.kernels: set[str] = set()  # of convolutions, with three dimensions, which elsewhere are a stack of matrices
        self.spread: set[str] = set()  # sharded or rank-specific parameters
        self.on_mesh = False  # whether any parameter is a DTensor
        self.excluded: set[str] = set()
        self.aliases: dict[str, list[str]] = {}
        name_of: dict[int, str] = {}
        for raw_name, (parameter, place) in raw.items():
            name = name_of[id(parameter)] = of_user(in_whole(short[raw_name]))
            self.names.append(name)
            shape = source.shape(parameter)
            self.parameters[name] = {"shape": list(shape), "dtype": str(parameter.dtype)}
            self.references.append(place)
            if len(shape) >= 2:
                owners = _owners(module, raw_name)
                self.matrices[name] = _fan_in(owners[-1], shape)
                if len(shape) == 3 and _convolves(owners):
                    self.kernels.add(name)
            self.on_mesh |= is_dtensor(parameter)
            is_part = source is not PLAIN_GRADIENTS and source.is_part(parameter)
            if is_part or is_sharded(parameter) or (distinct is not None and distinct.search(name)):
                self.spread.add(name)
            if is_excluded(in_whole(short[raw_name])):
                self.excluded.add(name)
        self.homes: list[int] = []  # with other parts elsewhere: the first rank that has each parameter
        # then also the parameters of each of the optimizers' groups, and the settings of all of them
        self.groups: list[frozenset[str]] | None = None
        self.cards: list[dict[str, Any]] | None = None
        self.trainable = TrainableNames(name_of[id(parameter)] for parameter, _ in raw.values() if parameter.requires_grad)
        if whole is not None:
            self._widen(whole, of_user, is_excluded)
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(f"format_module_name_fn gives the name {twice!r} to more than one parameter; names must differ")
        for raw_name, parameter, _ in refs.parameters(module, remove_duplicate=False):
            # torch leaves out modules that compare equal to others
            known, alias = name_of.get(id(parameter)), in_whole(canonical_name(raw_name))
            if raw_name not in raw and known not in (None, alias):
                self.aliases.setdefault(known, []).append(alias)
        modules = dict(module.named_modules())
        short = canonical_names(name for name in modules if not _is_wrapped(name, modules))
        self.modules: dict[str, Callable[[], nn.Module | None]] = {}
        for raw_name, name in short.items():
            if name == ROOT or not is_excluded(in_whole(name)):
                self.modules[of_user(in_whole(name))] = weakref.ref(modules[raw_name])
        own = {of_user(in_whole(name)): kind_of(modules[raw]) for raw, name in short.items()}
        others = {} if whole is None else {of_user(name): (kind, is_excluded(name)) for name, kind in whole.kinds.items()}
        self.kinds = {**{name: kind for name, (kind, _) in others.items()}, **own}
        self.modules.update((name, _nowhere) for name, (_, is_out) in others.items() if not (is_out or name in own))
        self._shape = ModelShape(list(modules.values()), refs)

    def _widen(self, whole: WholeModel, of_user: Callable[[str], str], is_excluded: Callable[[str], bool]) -> None:
        """Take up the parameters of other ranks."""
        places, known = dict(zip(self.names, self.references, strict=True)), self.parameters
        facts = {of_user(name): fact for name, fact in whole.facts.items()}
        homes = {of_user(name): rank for name, rank in whole.homes.items()}
        self.names = list(facts)  # without one that has come since on this rank: all ranks exchange the same rows
        self.references = [places.get(name, _nowhere) for name in self.names]
        self.homes = [homes[name] for name in self.names]
        self.parameters = {
            name: known[name] if name in known else {"shape": list(facts[name].shape), "dtype": facts[name].dtype}
            for name in self.names
        }
        self.matrices = {
            name: self.matrices[name] if name in self.matrices else facts[name].fan_in
            for name in self.names
            if name in self.matrices or (name not in places and facts[name].fan_in >= 0)
        }
        self.foreign = set(self.names) - places.keys()
        self.spread = set(self.names)
        self.excluded = {of_user(name) for name in whole.facts if is_excluded(name)}
        self.groups = [frozenset(map(of_user, names)) for names in whole.groups()]
        self.cards = [{**card, "parameters": list(map(of_user, card["parameters"]))} for card in whole.cards]
        # as it was when ranks met: what one of them freezes or thaws later is not known to the others
        self.trainable = TrainableNames(name for name in self.names if facts[name].is_trained)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the model for the run directory: its parameters and modules in order, with details."""
        return {"parameters": self.parameters, "aliases": self.aliases, "matrices": self.matrices, "kinds": self.kinds}

    def is_current(self) -> bool:
        """False once a parameter or module was added, removed or replaced, or a parameter was frozen or thawed."""
        return self._shape.is_current()

    def positions(self, parameters: Iterable[Tensor]) -> list[int]:
        """Positions in :attr:`names` of the model's parameters that these ``parameters`` of optimizers stand for, ascending."""
        wanted = {id(parameter) for parameter in parameters}
        return [position for position, reference in enumerate(self.references) if id(self._stepped(reference)) in wanted]

    def places(self) -> dict[int, int]:
        """The position of each parameter, by the id of the tensor that optimizers have in its place."""
        return {id(self._stepped(reference)): position for position, reference in enumerate(self.references)}

    def _stepped(self, reference: Place) -> Tensor | None:
        parameter = reference()
        return parameter if parameter is None or self.source is PLAIN_GRADIENTS else self.source.stepped(parameter)


def _nowhere() -> None:
    """The place of a parameter or module that only other ranks have."""


#: Modules whose weights have the inputs of one output after the first dimension.
_LINEAR = (nn.Linear, nn.Bilinear, nn.RNNBase, nn.MultiheadAttention, nn.Conv1d, nn.Conv2d, nn.Conv3d)

#: The classes of convolutions that are none of torch's, such as ``CausalConv1d`` and ``ShortConvolution``.
_NAMED_CONVOLUTION = re.compile(r"conv(olution)?(transpose)?(\dd)?$", re.IGNORECASE)


def _owners(module: nn.Module, name: str) -> list[nn.Module]:
    """The modules on the way to a parameter, the innermost last."""
    owners = [module]
    for part in name.split(".")[:-1]:  # a module of TorchScript has no get_submodule()
        owners.append(owners[-1]._modules[part])  # type: ignore[arg-type]
    return owners


def _convolves(owners: Sequence[nn.Module]) -> bool:
    """Whether the parameter of these modules is the kernel of a convolution, such as a reparametrised one: torch's, or one by its name."""
    owner = next((each for each in reversed(owners) if not isinstance(each, (ParametrizationList, nn.ModuleDict))), owners[0])
    return isinstance(owner, _ConvNd) or _NAMED_CONVOLUTION.search(kind_of(owner)) is not None


def _fan_in(owner: nn.Module, shape: Sequence[int]) -> int:
    """Number of products in the sum of one output; 0 if unknown, and for parameters that are not factors, such as an embedding."""
    # from its shape: reading a sharded one would need a collective
    return math.prod(shape[1:]) if isinstance(owner, _LINEAR) else 0


def _is_wrapped(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a wrapper such as DDP or a compiled module holds only this module, and represents it."""
    return bool(name) and wrapped_in(modules[name.rpartition(".")[0]]) is modules[name]


def kind_of(module: nn.Module) -> str:
    """The class of ``module``; for TorchScript that of the original module."""
    return str(module.original_name) if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def wrapped_in(module: nn.Module) -> nn.Module | None:
    """The only module in a wrapper such as DDP or a compiled module; None for any other module."""
    if len(module._modules) != 1 or module._parameters:
        return None
    ((name, inner),) = module._modules.items()
    return inner if name in WRAPPERS else None

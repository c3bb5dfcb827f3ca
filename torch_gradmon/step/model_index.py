"""The parameters and modules of a watched model under their canonical names, without keeping the model alive."""

from __future__ import annotations

import math
import re
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, getitem, is_not, itemgetter, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from ..core.errors import display
from ..core.keys import ROOT, WRAPPERS, canonical_name, canonical_names
from ..core.torch_modes import fsdp_param_groups
from .ranks import is_dtensor, is_sharded

_CALL, _CHILDREN, _PARAMETERS = weakref.ref.__call__, attrgetter("_modules"), attrgetter("_parameters")
_GROUP = itemgetter("params")

# --- Where a parameter is ---

#: Returns a parameter while it exists.
Place = Callable[[], "nn.Parameter | None"]


class ModuleParameterRef:
    __slots__ = ("_module", "_name")

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = weakref.ref(module), name

    def __call__(self) -> nn.Parameter | None:
        """The parameter; None if the module is gone or has no such parameter any more."""
        module = self._module()
        try:  # parameters of TorchScript have few methods
            return None if module is None else module._parameters[self._name]
        except KeyError:
            return None


class Places(list[Place]):
    """Where the parameters of a model are, by position."""

    def __init__(self, places: Sequence[Place]) -> None:
        super().__init__(places)
        self.positions = [*range(len(self))]
        of_modules = [place for place in places if type(place) is ModuleParameterRef]
        self._modules, self._names = [place._module for place in of_modules], [place._name for place in of_modules]

    def there(self, positions: Collection[int], read: Callable[[nn.Parameter], Any] | None = None) -> dict[int, Any]:
        """The parameters that exist of those at these positions; or what ``read`` finds for them, without None."""
        found: list[Any] = []
        if len(self._modules) == len(self):  # without one call for each
            modules, names = self._modules, self._names
            if positions != self.positions:
                modules, names = [*map(modules.__getitem__, positions)], [*map(names.__getitem__, positions)]
            try:
                found = [*map(getitem, map(_PARAMETERS, map(_CALL, modules)), names)]
            except (AttributeError, KeyError):  # a module or a parameter is gone
                found = []
        found = found or [self[position]() for position in positions]
        is_all = all(map(is_not, found, repeat(None)))
        if read is not None:
            found = [*map(read, found)] if is_all else [None if each is None else read(each) for each in found]
            is_all = all(map(is_not, found, repeat(None)))
        pairs = zip(positions, found, strict=True)
        return dict(pairs) if is_all else {position: each for position, each in pairs if each is not None}


class FsdpParameterRef:
    """A sharded parameter of ``fully_shard``. During a pass another one, whose storage is freed afterwards, is in its place."""

    __slots__ = ("_held",)

    def __init__(self, held: Any) -> None:
        self._held = weakref.ref(held)

    def __call__(self) -> nn.Parameter | None:
        held = self._held()
        return None if held is None else held.sharded_param

    @property
    def is_offloaded(self) -> bool:
        return bool(getattr(self._held(), "offload_to_cpu", False))


def _identity(parameter: nn.Parameter) -> tuple[int, bool]:
    return id(parameter), parameter.requires_grad


class ParameterRefs:
    """The parameters of modules under ``fully_shard``, as the optimizer has them."""

    def __init__(self, root: nn.Module) -> None:
        self._kept: list[tuple[FsdpParameterRef, tuple[int, bool]]] = []
        self.places: dict[tuple[int, str], FsdpParameterRef] = {}  # by the id of the module and the parameter's name in it
        fsdp = sys.modules.get("torch.distributed.fsdp")
        for module in root.modules() if hasattr(fsdp, "FSDPModule") else ():
            if isinstance(module, fsdp.FSDPModule):  # type: ignore[union-attr]
                for held in chain.from_iterable(group.fsdp_params for group in fsdp_param_groups(module._get_fsdp_state())):
                    info, place = held._module_info, FsdpParameterRef(held)
                    self._kept.append((place, _identity(held.sharded_param)))
                    owners = zip([info.module, *info.shared_modules], [info.param_name, *info.shared_param_names], strict=True)
                    self.places.update(((id(owner), name), place) for owner, name in owners)

    def is_current(self) -> bool:
        """False once one of them was replaced, frozen or thawed."""
        return all((parameter := place()) is not None and _identity(parameter) == known for place, known in self._kept)

    def parameters(self, root: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter, Place]]:
        """The parameters of ``root`` with names and references, as ``nn.Module.named_parameters`` returns them between two passes."""
        seen: set[int] = set()
        for path, module in root.named_modules(remove_duplicate=remove_duplicate):
            for name in list(module._parameters.keys()):
                place: Place = self.places.get((id(module), name)) or ModuleParameterRef(module, name)
                parameter = place()
                if parameter is not None and not (remove_duplicate and id(parameter) in seen):
                    seen.add(id(parameter))
                    yield f"{path}.{name}" if path else name, parameter, place


# --- Whether a model still has the parameters and modules that it had when it was indexed ---


def _is_same(known: object, now: object, parameter: Tensor | None, in_pass: object) -> bool:
    # torch.func.functional_call puts plain tensors in the place of parameters during a call
    return known == now or (
        parameter is not None
        and (
            in_pass is True
            or not isinstance(parameter, nn.Parameter)
            or (not is_dtensor(parameter) and parameter.shape == in_pass)
        )
    )


def _identities(modules: Sequence[nn.Module]) -> tuple[list[object], ...]:
    """How many children and parameters each module has and their names, the children, the parameters, and which of these are trained."""
    both = [*map(_CHILDREN, modules), *map(_PARAMETERS, modules)]
    # those of TorchScript are no dicts
    keys, values = (iter, dict.values) if {dict}.issuperset(map(type, both)) else (methodcaller("keys"), methodcaller("values"))
    found = [*chain.from_iterable(map(values, both[len(modules) :]))]
    return (
        [*map(len, both), *chain.from_iterable(map(keys, both))],
        [*map(id, chain.from_iterable(map(values, both[: len(modules)])))],
        [*map(id, found)],
        [*map(getattr, found, repeat("requires_grad"), repeat(False))],  # a module may have None in the place of a parameter
    )


# --- The whole model, of which this rank has parts ---


class PartFacts(NamedTuple):
    """A parameter of one part, as its rank describes it to the others."""

    stage: int  # number of the part among all parts of the model
    name: str  # of the parameter within the part
    shape: Sequence[int]  # of the whole parameter
    dtype: str
    is_trained: bool  # it requires a gradient
    fan_in: int  # see ``ModelIndex.matrices``; -1 for what is no matrix
    group: int  # number of its group among those of the optimizers of its stage; -1 if none of them has it


class WholeModel:
    def __init__(
        self,
        by_rank: Sequence[Sequence[PartFacts]],
        members: Sequence[int],
        modules: Iterable[tuple[int, str, str]] = (),
        cards: Iterable[dict[str, Any]] = (),
    ) -> None:
        stages: dict[str, set[int]] = {}
        for facts in by_rank:
            for fact in facts:
                stages.setdefault(fact.name, set()).add(fact.stage)
        # parts have parameters of equal names, so each name begins with the number of its stage
        self.has_prefix = any(len(of) > 1 for of in stages.values())
        self.facts: dict[str, PartFacts] = {}  # by name, in the order of the stages
        self.homes: dict[str, int] = {}  # by name, the first rank that has the parameter, among all processes
        ordered = [(fact, rank) for facts, rank in zip(by_rank, members, strict=True) for fact in facts]
        for fact, rank in sorted(ordered, key=lambda each: each[0].stage):  # stable: ranks, then the order in the part
            name = self.prefix(fact.stage) + fact.name
            self.facts.setdefault(name, fact)
            self.homes.setdefault(name, rank)
        ordered_modules = sorted(modules, key=lambda each: each[0])
        # the class of each module by name
        self.kinds = {self.prefix(at) + name if name != ROOT else f"stage{at}": kind for at, name, kind in ordered_modules}
        self.cards: list[dict[str, Any]] = []  # as given, with names in the whole model, those of copies once
        for card in cards:
            named = {**card, "parameters": [self.prefix(stage) + name for stage, name in card["parameters"]]}
            if named not in self.cards:
                self.cards.append(named)

    def groups(self) -> list[set[str]]:
        """The parameters of each group of the optimizers; groups of one number in several stages are one."""
        count = 1 + max((fact.group for fact in self.facts.values()), default=-1)
        return [{name for name, fact in self.facts.items() if fact.group == number} for number in range(count)]

    def prefix(self, stage: int) -> str:
        return f"stage{stage}." if self.has_prefix else ""

    def name_of(self, parts: nn.Module, name: str) -> str:
        """The name in the whole model of a parameter or module that is called ``name`` among the parts of one rank."""
        number, dot, rest = name.partition(".")
        if not number.isdigit() or number not in parts._modules:
            return name  # the root
        return f"{self.prefix(int(number))}{rest}" if dot else f"stage{number}"


# --- Where the gradients of parameters are: in ``.grad``, or where an engine keeps them ---


def parameters_of(*optimizers: Optimizer) -> list[Tensor]:
    """What is in the groups of these optimizers."""
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]


class GradientSource:
    """Where the gradient of each parameter is, when it is final, and what the optimizer steps in its place.

    This class describes plain PyTorch. A subclass describes an engine that keeps gradients elsewhere: in buffers of its own
    (``main_grad``), or in flat tensors that each rank steps a part of (ZeRO). Pass it as ``ModuleMonitor(gradient_source=...)``.

    Every method takes a parameter of the watched model and is called a few times in each step that takes values, so it should only look
    things up. It must not communicate, since other ranks may not call it, nor wait for a device. One that raises costs the values
    of the step, with a warning.
    """

    #: Whether gradients are final only when the outermost optimizer steps, as where it reduces them or an engine does so after the last
    #: backward pass. Otherwise they are when a backward pass ends.
    is_final_at_step = False
    #: The object around all optimizers whose ``step`` steps them, such as an engine; None where the loop calls theirs.
    outer: Any = None
    #: An object whose ``step`` runs all passes of a step, after which gradients are final, such as the schedule of a pipeline; None where
    #: the loop runs them.
    boundary: Any = None
    #: Names of its methods that call the model without training it; those that it lacks do not count.
    trials: Sequence[str] = ()
    #: Whether a GradScaler leaves accumulated gradients scaled, since it unscales those that the optimizer uses, which are others.
    stays_scaled = False
    #: Ranks have other parts of the model, which clip and step together.
    is_pipeline = False

    def groups_of(self, optimizer: Optimizer) -> Sequence[Sequence[Tensor]]:
        """What the optimizer steps in each of its groups, whatever these have between two steps."""
        return [*map(_GROUP, optimizer.param_groups)]

    def tensors_of(self, optimizer: Optimizer) -> Sequence[Tensor]:
        """All that the optimizer steps."""
        return [tensor for group in self.groups_of(optimizer) for tensor in group]

    def stepped(self, parameter: nn.Parameter) -> Tensor:
        """The tensor in the optimizer's groups that stands for the parameter: itself, a master copy, or a flat tensor of many."""
        return parameter

    def value(self, parameter: nn.Parameter) -> Tensor:
        """The elements that the optimizer changes on this rank, of any shape: parameters and updates are measured on them."""
        return self.stepped(parameter)

    def hook_places(self, places: Sequence[Place]) -> Sequence[Place]:
        """The tensors that autograd accumulates gradients of, where these are others than the parameters at ``places``."""
        return places

    def accumulated(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient before the clip, of all micro-batches, or this rank's part of it; None if it has none."""
        return parameter.grad

    def used(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient that the optimizer is about to use; None if it has none, or belongs to a group that it does not step now."""
        return self.stepped(parameter).grad

    def is_part(self, parameter: nn.Parameter) -> bool:
        """Whether other ranks have other elements of the parameter, so that rows of all ranks are merged."""
        return False

    def scale(self) -> float | Tensor | None:
        """By what accumulated gradients are multiplied at this moment, such as a loss scale; None if they are not."""
        return None

    def is_due(self) -> bool:
        """Whether :attr:`outer`, whose step begins, steps the optimizers, and does not only count a micro-batch."""
        return True

    def searches_scale(self) -> bool:
        """Whether infinite gradients may mean no more than that a loss scale is too large, so that they are no spike."""
        return True

    def has_overflowed(self) -> bool:
        """Whether the engine has left out the step that it was just asked for, because gradients were infinite."""
        return False

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return tuple(parameter.shape)


#: Plain PyTorch.
PLAIN_GRADIENTS = GradientSource()


class MainGradSource(GradientSource):
    """Gradients in ``parameter.main_grad``, and the optimizer's copy of each parameter in ``parameter.main_param``, where there is one: the
    names that Megatron-LM uses. It is chosen by itself for a model whose parameters have a ``main_grad``.

    Ranks may reduce gradients after the last backward pass, so they are read when the optimizer steps.
    """

    is_final_at_step = stays_scaled = True

    def stepped(self, parameter: nn.Parameter) -> Tensor:
        found: Tensor | None = getattr(parameter, "main_param", None)
        return parameter if found is None else found

    def accumulated(self, parameter: nn.Parameter) -> Tensor | None:
        """The buffer, or ``.grad`` where there is none; None where the optimizer's gradient is the buffer itself."""
        found: Tensor | None = getattr(parameter, "main_grad", None)
        if found is None:
            return parameter.grad
        stepped = self.stepped(parameter).grad
        # one tensor for both: it may be clipped by now
        return None if stepped is not None and stepped.data_ptr() == found.data_ptr() else found

    def used(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient of the stepped tensor; the buffer where an optimizer reads that."""
        gradient = self.stepped(parameter).grad
        return getattr(parameter, "main_grad", parameter.grad) if gradient is None else gradient

    def is_part(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer has a part of the master copy only."""
        return self.stepped(parameter).numel() != parameter.numel()


def checked(source: object) -> GradientSource | None:
    if source is not None and not isinstance(source, GradientSource):
        raise TypeError(f"gradient_source={display(source)} must be an instance of a subclass of torch_gradmon.GradientSource")
    return source


# --- The index ---


class TrainableNames:
    def __init__(self, names: Iterable[str]) -> None:
        self.names = set(names)  # those that require a gradient, or are doubtful
        self.doubtful: set[str] = set()  # those that are frozen now, perhaps only for a part of each step

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
        return name not in self.names or name in self.doubtful


class _Naming(NamedTuple):
    """How names of a module become those of keys."""

    module: nn.Module
    whole: WholeModel | None
    of_user: Callable[[str], str]  # the user's change of each canonical name
    excluded: re.Pattern[str] | None

    def in_whole(self, name: str) -> str:
        return name if self.whole is None else self.whole.name_of(self.module, name)

    def is_excluded(self, name: str) -> bool:
        """Of a name in the whole model."""
        return self.excluded is not None and self.excluded.search(name) is not None


class ModelIndex:
    """Names and weak references of one moment; :meth:`is_current` checks cheaply whether they are still valid.

    A tied parameter appears once, under its first name; ``aliases`` has the others. ValueError if ``format_name`` gives one name to two.
    """

    def __init__(
        self,
        module: nn.Module,
        excluded: re.Pattern[str] | None = None,  # of metrics, by canonical names; whole-model values use all parameters
        format_name: Callable[[str], str] = str,  # the user's change of each canonical name
        distinct: re.Pattern[str] | None = None,  # of what differs between ranks, whose elements on all ranks are counted
        source: GradientSource = PLAIN_GRADIENTS,
        whole: WholeModel | None = None,  # the model that ``module`` is a part of, where other ranks have the others
    ) -> None:
        self.source = source
        refs, naming = ParameterRefs(module), _Naming(module, whole, format_name, excluded)
        raw = {name: (parameter, place) for name, parameter, place in refs.parameters(module)}
        own = {naming.in_whole(name): raw_name for raw_name, name in canonical_names(raw).items()}
        self.names: list[str] = []
        self.parameters: dict[str, dict[str, Any]] = {}  # shape and dtype by name, for the run directory
        self.matrices: dict[str, int] = {}  # of two or more dimensions, with their fan-in, 0 for what is no factor
        self.kernels: set[str] = set()  # of convolutions, with three dimensions, which elsewhere are a stack of matrices
        self.spread: set[str] = set()  # sharded or rank-specific parameters
        self.excluded: set[str] = set()
        self.foreign: set[str] = set()  # parameters that only other ranks have
        self.aliases: dict[str, list[str]] = {}
        trained, references = set(), []
        described = {} if whole is None else whole.facts
        # with other parts elsewhere without one that has come since on this rank: all ranks exchange the same rows
        for in_whole in own if whole is None else described:
            name = naming.of_user(in_whole)
            parameter, place = raw[own[in_whole]] if in_whole in own else (None, _nowhere)
            if parameter is None:
                self.foreign.add(name)
            fact = described[in_whole] if parameter is None else self._described(module, own[in_whole], name, parameter)
            self.names.append(name)
            references.append(place)
            self.parameters[name] = {"shape": list(fact.shape), "dtype": fact.dtype}
            if fact.fan_in >= 0:
                self.matrices[name] = fact.fan_in
            if whole is not None or (distinct is not None and distinct.search(name)):
                self.spread.add(name)
            if naming.is_excluded(in_whole):
                self.excluded.add(name)
            # as it was when ranks met: what one of them freezes or thaws later is not known to the others
            if described.get(in_whole, fact).is_trained:
                trained.add(name)
        self.trainable, self.references = TrainableNames(trained), Places(references)
        # with other parts elsewhere: the first rank that has each parameter
        self.homes: list[int] = [] if whole is None else [whole.homes[name] for name in whole.facts]
        # then also the parameters of each of the optimizers' groups, and the settings of all of them
        self.groups = None if whole is None else [frozenset(map(naming.of_user, names)) for names in whole.groups()]
        cards = [] if whole is None else whole.cards
        self.cards = [{**card, "parameters": list(map(naming.of_user, card["parameters"]))} for card in cards] or None
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(f"format_module_name_fn gives the name {twice!r} to more than one parameter; names must differ")
        name_of = {id(raw[raw_name][0]): naming.of_user(name) for name, raw_name in own.items()}
        for raw_name, parameter, _ in refs.parameters(module, remove_duplicate=False):
            # torch leaves out modules that compare equal to others
            known, alias = name_of.get(id(parameter)), naming.in_whole(canonical_name(raw_name))
            if raw_name not in raw and known not in (None, alias):
                self.aliases.setdefault(known, []).append(alias)
        self._take_modules(dict(module.named_modules()), refs, naming)

    def _described(self, module: nn.Module, raw_name: str, name: str, parameter: nn.Parameter) -> PartFacts:
        """What a parameter of this rank is; notes kernels, and those that ranks have parts of."""
        shape, owners = self.source.shape(parameter), _owners(module, raw_name)
        if len(shape) == 3 and _convolves(owners):
            self.kernels.add(name)
        if is_sharded(parameter) or (self.source is not PLAIN_GRADIENTS and self.source.is_part(parameter)):
            self.spread.add(name)
        fan_in = -1 if len(shape) < 2 else math.prod(shape[1:]) if isinstance(owners[-1], _LINEAR) else 0
        return PartFacts(0, name, shape, str(parameter.dtype), parameter.requires_grad, fan_in, -1)

    def _take_modules(self, modules: Mapping[str, nn.Module], refs: ParameterRefs, naming: _Naming) -> None:
        self._refs, self._watched = refs, [weakref.ref(module) for module in modules.values()]
        self._known = _identities([*modules.values()])
        # what may be in the place of each parameter during a pass: under fully_shard (True) any other one, for a sharded one that a
        # parent module keeps elsewhere a plain one of this shape
        self._in_pass = [
            (id(module), name) in refs.places or (parameter.shape if parameter is not None and is_sharded(parameter) else None)
            for module in modules.values()
            for name, parameter in module._parameters.items()
        ]
        self.modules: dict[str, Callable[[], nn.Module | None]] = {}
        # a wrapper such as DDP or a compiled module represents the only module that it holds
        owners = {name: wrapped_in(modules[name.rpartition(".")[0]]) for name in modules}
        short = canonical_names(name for name, module in modules.items() if not name or owners[name] is not module)
        own = {naming.in_whole(name): modules[raw_name] for raw_name, name in short.items()}
        kinds = {**({} if naming.whole is None else naming.whole.kinds), **{name: kind_of(one) for name, one in own.items()}}
        self.kinds = {naming.of_user(name): kind for name, kind in kinds.items()}
        for name in dict.fromkeys([*own, *kinds]):
            if name == ROOT or not naming.is_excluded(name):
                self.modules[naming.of_user(name)] = weakref.ref(own[name]) if name in own else _nowhere

    @property
    def facts(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "aliases": self.aliases, "matrices": self.matrices, "kinds": self.kinds}

    def is_current(self) -> bool:
        """False once a parameter or module was added, removed or replaced, or a parameter was frozen or thawed."""
        modules: list[Any] = [*map(_CALL, self._watched)]
        if not all(map(is_not, modules, repeat(None))) or (self._refs.places and not self._refs.is_current()):
            return False
        now = _identities(modules)
        if self._known == now:
            return True  # as nearly always, and without a call for each module or parameter
        if self._known[:2] != now[:2]:
            return False
        parameters = chain.from_iterable(module._parameters.values() for module in modules)
        return all(
            map(_is_same, zip(self._known[2], self._known[3], strict=True), zip(*now[2:], strict=True), parameters, self._in_pass)
        )

    def there(self) -> Iterator[tuple[str, nn.Parameter, Place]]:
        """The parameters that still exist, with names and places."""
        for name, place in zip(self.names, self.references, strict=True):
            if (parameter := place()) is not None:
                yield name, parameter, place

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


#: Modules whose weights have the inputs of one output after the first dimension. Reading a sharded weight would need a collective, so its
#: shape alone is read.
_LINEAR = (nn.Linear, nn.Bilinear, nn.RNNBase, nn.MultiheadAttention, nn.Conv1d, nn.Conv2d, nn.Conv3d)

#: The classes of convolutions that are none of torch's, such as ``CausalConv1d`` and ``ShortConvolution``.
_NAMED_CONVOLUTION = re.compile(r"conv(olution)?(transpose)?(\dd)?$", re.IGNORECASE)


def _owners(module: nn.Module, name: str) -> list[nn.Module]:
    owners = [module]
    for part in name.split(".")[:-1]:  # a module of TorchScript has no get_submodule()
        owners.append(owners[-1]._modules[part])  # type: ignore[arg-type]
    return owners


def _convolves(owners: Sequence[nn.Module]) -> bool:
    """Whether the parameter of these modules is the kernel of a convolution, such as a reparametrised one: torch's, or one by its name."""
    owner = next((each for each in reversed(owners) if not isinstance(each, (ParametrizationList, nn.ModuleDict))), owners[0])
    return isinstance(owner, _ConvNd) or _NAMED_CONVOLUTION.search(kind_of(owner)) is not None


def kind_of(module: nn.Module) -> str:
    """The class of ``module``; for TorchScript that of the original module."""
    return str(module.original_name) if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def wrapped_in(module: nn.Module) -> nn.Module | None:
    """The only module in a wrapper such as DDP or a compiled module; None for any other module."""
    if len(module._modules) != 1 or module._parameters:
        return None
    ((name, inner),) = module._modules.items()
    return inner if name in WRAPPERS else None

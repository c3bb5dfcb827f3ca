"""Checks of how a model, its optimizers and its data are put together."""

from __future__ import annotations

import contextlib
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..capture.hooks import Handles, Hook, ModuleHook, tensors_of
from ..capture.measurer import version_of
from ..core import validation as check
from ..core.errors import display
from ..core.keys import GRADIENT, Pattern, compile_pattern
from ..core.records import EXPECTATION, StatsTable, StepRecord, TrainedPart, trained_parts
from ..core.torch_modes import SharedContext
from ..step.model_index import PLAIN_GRADIENTS, ModelIndex, parameters_of
from ..step.planner import Planner
from .tallies import Check, Tallies

if TYPE_CHECKING:
    from ..core.loop_mistakes import LoopFinding


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What a monitor checks beside the training loop itself, as ``watch(..., checks=Checks(frozen="backbone"))``.

    What is declared here and does not hold warns once, and is the finding ``expectation-broken``. Nothing is synchronised.

    Args:
        data: look at the first 48 monitored steps: fingerprints of the model's inputs, and in some of these steps what they look like and
            the gradient that comes back to the output, which shows the kind and the scale of the loss and the targets. It finds a softmax
            before a loss that takes logits, data sorted by class, the same batch again, and a loss at chance. In each of these steps it
            adds some launches; its numbers go to the host with those of the step.
        replicas_every: steps between two checks that ranks have the same parameters, gradients, optimizer state and learning rates, bit
            for bit; 0 for none. What FSDP2 shards is compared with the copies of that shard, if there are any.
        frozen: parameters whose names fit this pattern never change.
        trained: those that fit are in an optimizer, and have a gradient within eight monitored steps.
        dtype: by pattern of modules' names, the dtype of their floating-point outputs in training, such as
            ``{"attn": torch.bfloat16}``. Each of these modules gets a forward hook, which compiled code does not run.
        batch_varies: True: the model's inputs differ from step to step, in the 48 monitored steps that are looked at. False: they are
            meant to be the same, and the finding ``repeated-batch`` is left out.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value. Patterns that fit nothing in the model are refused by the monitor.
    """

    data: bool = True
    replicas_every: int = 100
    frozen: Pattern | None = None
    trained: Pattern | None = None
    dtype: Mapping[Pattern, torch.dtype] | None = None
    batch_varies: bool | None = None

    def __post_init__(self) -> None:
        check.flag(data=self.data)
        check.positive_int_or_zero("replicas_every", self.replicas_every)
        if self.batch_varies is not None and not isinstance(self.batch_varies, bool):
            raise TypeError(f"batch_varies={display(self.batch_varies)} must be True, False or None")
        if self.dtype is not None and not isinstance(self.dtype, Mapping):
            raise TypeError(
                f"dtype={display(self.dtype)} must be a dict of a torch.dtype by pattern, such as {{'attn': torch.bfloat16}}"
            )
        for key, value in (self.dtype or {}).items():
            if not isinstance(value, torch.dtype):
                raise TypeError(f"dtype={{{key!r}: {display(value)}}} must have a torch.dtype, such as torch.bfloat16")
        compiled("frozen", self.frozen)
        compiled("trained", self.trained)
        for pattern in self.dtype or ():
            compiled("dtype", pattern)

    def fit(self, index: ModelIndex) -> None:
        """Raise ValueError where a pattern fits nothing in the model."""
        for name, value in (("frozen", self.frozen), ("trained", self.trained)):
            pattern = compiled(name, value)
            if pattern is not None and not any(map(pattern.search, index.names)):
                raise ValueError(f"{name}={display(value)} fits no parameter; the first ones are {[*index.names][:5]}")
        for key in self.dtype or ():
            if not any(map(compile_pattern(key, "dtype").search, index.kinds)):
                raise ValueError(f"the pattern {display(key)} in dtype= fits no module; the first ones are {[*index.kinds][:5]}")


def compiled(name: str, pattern: Pattern | None) -> re.Pattern[str] | None:
    """The pattern of option ``name``, compiled. Raises TypeError or ValueError where it is none, or does not compile."""
    return None if pattern is None else compile_pattern(pattern, name)


#: Containers within containers that are looked into.
_DEPTH = 2
#: Objects of a container that are looked at.
_MOST = 1000
#: Forwards in turn that make layers: a lazy one is made once.
_IN_TURN = 3


class HiddenParameters:
    """Those of one model, held weakly."""

    def __init__(self, module: nn.Module) -> None:
        registered = {id(each) for each in (*module.parameters(), *module.buffers(), *module.modules())}
        self._found: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # and how often each was written to
        self._results: dict[str, weakref.ref[Tensor]] = {}  # of operations, before the training begins
        for name, each in module.named_modules():
            for attribute, value in list(vars(each).items()):
                if not attribute.startswith(("_parameters", "_buffers", "_modules")):
                    path = f"{name}.{attribute}" if name else attribute
                    for place, tensor in _tensors_in(path, value, registered, _DEPTH):
                        if tensor.is_leaf:
                            self._found.setdefault(place, (weakref.ref(tensor), version_of(tensor)))
                        else:
                            self._results.setdefault(place, weakref.ref(tensor))

    def with_gradients(self, owned: Collection[int]) -> list[str]:
        """Places of those that have a gradient now, and that nothing trains: the critic that a list keeps out of a generator has an
        optimizer of its own. ``owned``: ids of the tensors that optimizers have.
        """
        return [
            place
            for place, (reference, writes) in self._found.items()
            if (tensor := reference()) is not None and tensor.grad is not None and id(tensor) not in owned
            if version_of(tensor) == writes
        ]

    def results(self, module: nn.Module) -> list[str]:
        """Places of tensors that were computed with a graph before the training began, and are still there, as ``nn.Parameter(...).to()``
        is: no optimizer can have them. ``module``: the model.
        """
        now = {id(value) for each in module.modules() for value in vars(each).values()}
        return [place for place, reference in self._results.items() if (tensor := reference()) is not None and id(tensor) in now]


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
    elif depth and isinstance(value, (Mapping, list, tuple)):
        items = list(value.items()) if isinstance(value, Mapping) else list(enumerate(value[:_MOST]))
        for key, each in items[:_MOST]:
            yield from _tensors_in(f"{path}[{key!r}]", each, registered, depth - 1)


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


#: A dropout of this share is taken for the share that is kept; the largest in use is about 0.8.
_DROPPED = 0.9
#: A batch norm whose running statistics take less than this share of each batch does not reach them within a thousand steps.
_STILL = 1e-3


def has_modes(module: nn.Module) -> bool:
    """Whether the model behaves otherwise in evaluation mode in a part that is trained: it has dropout, or batch norms of its own
    statistics.
    """
    for each in module.modules():
        changes = any(isinstance(child, _DropoutNd) and child.p > 0 for child in each.children())
        changes = changes or (isinstance(each, _BatchNorm) and each.track_running_stats)
        if changes and any(parameter.requires_grad for parameter in each.parameters()):
            return True
        if isinstance(each, nn.RNNBase) and each.dropout > 0:
            return True
    return False


def check_settings(module: nn.Module, tallies: Tallies) -> None:
    high: dict[str, float] = {}
    still: dict[str, float] = {}
    for name, each in module.named_modules():
        if isinstance(each, _DropoutNd) and each.p >= _DROPPED:
            high[name] = float(each.p)
        elif isinstance(each, _BatchNorm) and each.track_running_stats and each.training:
            still[name] = 1.0 if each.momentum is None else float(each.momentum)
    still = {name: momentum for name, momentum in still.items() if momentum < _STILL}
    if high:
        tallies.seen("dropout-high", where=tuple(high), evidence={"share dropped": max(high.values())})
    if still:
        tallies.seen("batch-norm-frozen", where=tuple(still), evidence={"momentum": min(still.values())})


# --- The optimizers: what each group trains and with which settings, and settings that cannot be meant ---


#: An optimizer that takes more steps than this in a row trains in a phase of its own: the critic of a GAN takes 5 as a rule.
_PHASE = 10
#: So many turns in a row are no chance.
_TURNS = 3
_RULE = "parameter-in-two-optimizers"


class Followed:
    """The optimizers that a monitor follows, as long as this object lives. All monitors of the process know them, to find parameters that
    two of them have.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        with _lock:
            _followed.add(self)

    @staticmethod
    def by_any() -> list[Optimizer]:
        with _lock:  # a set that grows meanwhile cannot be iterated over
            everybody = list(_followed)
        found = (reference() for each in everybody for reference in each._optimizers)
        return [optimizer for optimizer in found if optimizer is not None]


_followed: weakref.WeakSet[Followed] = weakref.WeakSet()
_lock = threading.RLock()


def card(optimizers: Sequence[Optimizer], names: Mapping[int, Any]) -> list[dict[str, Any]]:
    """One entry for each group: class and number of the optimizer, settings, and the ``names``, by id, of parameters of the model."""
    groups = []
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            settings = {key: found for key, value in group.items() if (found := _plain(value)) is not None}
            parameters = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
            of = {"optimizer": type(optimizer).__name__, "number": number}
            groups.append({**of, "settings": settings, "parameters": parameters})
    return groups


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):  # of a capturable optimizer: reading it would wait for the device
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(each, (bool, int, float)) for each in value):
        return list(value)
    return None


def check_optimizers(optimizers: Sequence[Optimizer], tallies: Tallies) -> None:
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            betas = _plain(group.get("betas"))
            if isinstance(betas, list) and len(betas) >= 2 and betas[0] > betas[1]:
                evidence = {"first beta": float(betas[0]), "second beta": float(betas[1])}
                tallies.seen("betas-swapped", where=(f"group {number} of {type(optimizer).__name__}",), evidence=evidence)


class SharedParameters:
    """Parameters of the model that several optimizers have now, of whatever monitor, unless these are seen to train one after the other."""

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self._turns: dict[frozenset[int], _Turns] = {}
        self.exist = False  # at the last look

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Follow in which order these step, as far as they have parameters in common. None of them is stepping."""
        self.end()
        for one, other in combinations(optimizers, 2):
            if not {*map(id, parameters_of(one))}.isdisjoint(map(id, parameters_of(other))):
                self._turns[frozenset((id(one), id(other)))] = _Turns([one, other])

    def look(self, optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
        """Look at the groups as they are now; ``names`` of the model's parameters, by id."""
        owned = {id(each): frozenset(map(id, parameters_of(each))) for each in (*optimizers, *Followed.by_any())}
        pairs = {frozenset((id(own), other)) for own in optimizers for other in owned if other != id(own)}
        shared = {pair: frozenset.intersection(*map(owned.__getitem__, pair)) & names.keys() for pair in pairs}
        self.exist = any(shared.values())
        apart = {pair for pair, turns in self._turns.items() if turns.are_phases}
        those = set().union(*(parameters for pair, parameters in shared.items() if pair not in apart))
        found = [name for parameter_id, name in names.items() if parameter_id in those]
        if found:
            self._tallies.seen(_RULE, where=tuple(found), evidence={"parameters": float(len(found))})
        else:
            self._tallies.retract(_RULE)

    def end(self) -> None:
        for turns in self._turns.values():
            turns.handles.remove()
        self._turns, self.exist = {}, False


class _Turns:
    """The order in which two optimizers step."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.are_phases = False  # one has taken many steps in a row, and since then they have not taken turns of few steps
        self._latest = self._run = self._turns = 0
        self.handles = Handles()
        for optimizer in optimizers:
            self.handles.of_optimizer(optimizer.register_step_post_hook(Hook(self._stepped)))

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) != self._latest:
            self._turns = self._turns + 1 if 0 < self._run <= _PHASE else 0
            self._latest, self._run = id(optimizer), 0
        self._run += 1
        self.are_phases = (self.are_phases or self._run > _PHASE) and self._turns < _TURNS


# --- The check of the setup: what model, optimizers and data are, apart from what they do ---


#: Monitored steps after which hidden parameters are looked for, and parameters that another optimizer has meanwhile.
_EARLY = (2, 8, 32)
#: Monitored steps between two looks at optimizers that have parameters in common.
_AGAIN = 16
#: Monitored steps after which a parameter that should train must have had a gradient.
_PATIENCE = 8


class SetupCheck(Check):
    """Looks at modules and optimizers when they are attached, and at few things in monitored steps; it measures nothing."""

    name, part = "setup_check", "setup"

    def __init__(self, planner: Planner, checks: Checks) -> None:
        super().__init__()
        self._planner = planner
        self._frozen_pattern, self._trained = compiled("frozen", checks.frozen), compiled("trained", checks.trained)
        self._dtypes = {compile_pattern(key, "dtype"): dtype for key, dtype in (checks.dtype or {}).items()}
        self._handles, self._shared = Handles(), SharedParameters(self.tallies)
        self._versions: dict[str, int] = {}  # of the parameters that are declared frozen, at the last look
        self._reached: set[str] = set()
        self._looks = 0  # at the parameters, for what is declared of them
        self._module: weakref.ref[nn.Module] | None = None
        self._hidden: HiddenParameters | None = None
        self._followed: Followed | None = None
        self._has_modes = False
        self._steps = 0  # monitored ones
        self.groups: list[dict[str, Any]] = []
        self.frozen: list[str] = []

    def facts(self) -> list[LoopFinding]:
        self._look_at_shared()
        return self.tallies.facts()

    def _look_at_shared(self) -> None:
        if self._shared.exist:
            self._shared.look(self.context.optimizers, self._names())

    def on_attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._module, self._steps = weakref.ref(module), 0
        self.context.set_quiet(False)
        self.groups, self.frozen = self._cards(optimizers), self._frozen()
        self.context.annotate_run(optimizers=self.groups, frozen=self.frozen)
        self._has_modes = has_modes(module)
        self._hidden = HiddenParameters(module) if self._planner.source is PLAIN_GRADIENTS else None
        self._leave()
        self._followed = Followed(optimizers)
        check_settings(module, self.tallies)
        check_optimizers(optimizers, self.tallies)
        self._shared.begin(optimizers)
        self._shared.look(optimizers, self._names())
        self.tallies.write_facts(begins=True)
        inventory = self._planner.inventory
        for name, reference in () if inventory is None else inventory.modules.items():
            wanted = next((dtype for pattern, dtype in self._dtypes.items() if pattern.search(name)), None)
            if wanted is not None and (each := reference()) is not None:
                self._handles.of_module(each.register_forward_hook(ModuleHook(self._called, name, wanted)))

    def _leave(self) -> None:
        self._followed = None
        self._shared.end()
        self._handles.remove()

    def _cards(self, optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
        inventory = self._planner.inventory
        known = None if inventory is None else inventory.cards  # of the stages of all ranks
        return card(optimizers, self._names()) if known is None else known

    def _frozen(self) -> list[str]:
        inventory = self._planner.now()
        return [] if inventory is None else [name for name in inventory.names if inventory.trainable.is_frozen(name)]

    def parts(self) -> list[TrainedPart]:
        inventory = self._planner.now()
        if inventory is None or self._module is None:
            return []
        return list(trained_parts(inventory.parameters, self._cards(self.context.optimizers), self._frozen()))

    def _names(self) -> Mapping[int, str]:
        inventory = self._planner.inventory
        return {} if inventory is None else {key: inventory.names[place] for key, place in inventory.places().items()}

    def on_record(self, record: StepRecord) -> None:
        module = None if self._module is None else self._module()
        if module is None:
            return
        self._steps += 1
        if self._has_modes and not module.training:
            if not any(each.training for each in module.modules()):  # a part alone may be in evaluation mode on purpose
                self.tallies.seen("eval-mode")
        elif not self.tallies.is_empty:
            self.tallies.missed("eval-mode")
        if self._steps in _EARLY and self._hidden is not None:
            owned = self._owned().union(map(id, parameters_of(*Followed.by_any())))
            if places := [*self._hidden.with_gradients(owned), *self._hidden.results(module)]:
                self.tallies.seen("unregistered-parameters", where=tuple(places), evidence={"tensors": float(len(places))})
        if self._steps in _EARLY or (self._shared.exist and self._steps % _AGAIN == 0):
            self._shared.look(self.context.optimizers, self._names())
        if self._frozen_pattern is not None or self._trained is not None:
            self._check_declared(record.tables.get(GRADIENT))
        elif self._steps > _EARLY[-1] and not (self._has_modes or self._shared.exist):  # a mode changes without a word
            self.context.set_quiet(True)

    def _owned(self) -> set[int]:
        return {id(tensor) for optimizer in self.context.optimizers for tensor in self._planner.source.tensors_of(optimizer)}

    def _end(self) -> None:
        self._look_at_shared()  # what was found about optimizers that step no more stays
        self._leave()
        self._hidden = self._module = None

    # --- what is declared ----------------------------------------------------------------------------------------------------

    def _called(self, name: str, wanted: torch.dtype, module: nn.Module, args: object, output: Any) -> None:
        for _, tensor in tensors_of(output, name):
            if module.training and torch.is_floating_point(tensor) and tensor.dtype != wanted:
                self.tallies.seen(EXPECTATION, ("dtype", name), (f"{name} gives {tensor.dtype}, expected {wanted}",))
                return

    def _check_declared(self, gradients: StatsTable | None) -> None:
        if (inventory := self._planner.inventory) is None:
            return
        self._looks += 1
        owned = self._owned()
        self._reached.update(() if gradients is None else gradients.names)
        moving, unowned = [], []
        for name, parameter, _ in inventory.there():
            if self._frozen_pattern is not None and self._frozen_pattern.search(name):
                if self._versions.setdefault(name, parameter._version) != parameter._version:
                    moving.append(name)
                self._versions[name] = parameter._version
            is_owned = id(self._planner.source.stepped(parameter)) in owned
            is_late = not is_owned or (self._looks == _PATIENCE and name not in self._reached)
            if is_late and self._trained is not None and self._trained.search(name):
                unowned.append(name)
        if moving:
            evidence = {"parameters that change, declared frozen": float(len(moving))}
            self.tallies.seen(EXPECTATION, "frozen", tuple(moving), evidence)
        if unowned and self._looks in (1, _PATIENCE):
            evidence = {"parameters without optimizer or gradient, declared to train": float(len(unowned))}
            self.tallies.seen(EXPECTATION, "trained", tuple(unowned), evidence)

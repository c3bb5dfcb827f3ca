"""The optimizers: what each group trains and with which settings, and settings that cannot be meant."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...capture.hooks import Handles, Hook
from ..tallies import Tallies

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
        """Those that any monitor follows, in whatever thread."""
        with _lock:  # a set that grows meanwhile cannot be iterated over
            everybody = list(_followed)
        found = (reference() for each in everybody for reference in each._optimizers)
        return [optimizer for optimizer in found if optimizer is not None]


_followed: weakref.WeakSet[Followed] = weakref.WeakSet()
_lock = threading.RLock()


def owned_anywhere() -> set[int]:
    """The ids of the parameters that followed optimizers have now."""
    return {key for optimizer in Followed.by_any() for key in _parameters(optimizer)}


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def card(optimizers: Sequence[Optimizer], names: Mapping[int, Any]) -> list[dict[str, Any]]:
    """One entry for each group: class and number of the optimizer, settings, and names of the parameters that the model has.

    Args:
        optimizers: in the order of their steps.
        names: of the model's parameters, by id.
    """
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
    """Settings that cannot be meant."""
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            betas = _plain(group.get("betas"))
            if isinstance(betas, list) and len(betas) >= 2 and betas[0] > betas[1]:
                evidence = {"first beta": float(betas[0]), "second beta": float(betas[1])}
                tallies.seen("betas-swapped", where=(f"group {number} of {type(optimizer).__name__}",), evidence=evidence)


class SharedParameters:
    """Parameters of the model that several optimizers have now, of whatever monitor, unless these are seen to train one after the other.

    Attributes:
        exist: two optimizers had a parameter in common at the last look.
    """

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self._turns: dict[frozenset[int], _Turns] = {}
        self.exist = False

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Follow in which order these step, as far as they have parameters in common. None of them is stepping."""
        self.end()
        for one, other in combinations(optimizers, 2):
            if not _parameters(one).isdisjoint(_parameters(other)):
                self._turns[frozenset((id(one), id(other)))] = _Turns([one, other])

    def look(self, optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
        """Look at the groups as they are now; ``names`` of the model's parameters, by id."""
        there = {id(optimizer): optimizer for optimizer in (*optimizers, *Followed.by_any())}
        own = set(map(id, optimizers))
        owners: dict[int, set[int]] = {}
        for key, optimizer in there.items():
            for parameter_id in _parameters(optimizer):
                owners.setdefault(parameter_id, set()).add(key)
        shared: dict[frozenset[int], list[str]] = {}
        for parameter_id, name in names.items():
            for pair in combinations(sorted(owners.get(parameter_id, ())), 2):
                if not own.isdisjoint(pair):
                    shared.setdefault(frozenset(pair), []).append(name)
        self.exist = bool(shared)
        apart = {pair for pair, turns in self._turns.items() if turns.are_phases}
        found = {name: None for pair, of_pair in shared.items() if pair not in apart for name in of_pair}
        if found:
            self._tallies.seen(_RULE, where=tuple(found), evidence={"parameters": float(len(found))})
        else:
            self._tallies.retract(_RULE)

    def end(self) -> None:
        """Take all hooks away."""
        for turns in self._turns.values():
            turns.end()
        self._turns, self.exist = {}, False


class _Turns:
    """The order in which two optimizers step.

    Attributes:
        are_phases: one of them has taken many steps in a row, and since then they have not taken turns of few steps.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.are_phases = False
        self._latest = self._run = self._turns = 0
        self._handles = Handles()
        for optimizer in optimizers:
            self._handles.of_optimizer(optimizer.register_step_post_hook(Hook(self._stepped)))

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) != self._latest:
            self._turns = self._turns + 1 if 0 < self._run <= _PHASE else 0
            self._latest, self._run = id(optimizer), 0
        self._run += 1
        self.are_phases = (self.are_phases or self._run > _PHASE) and self._turns < _TURNS

    def end(self) -> None:
        self._handles.remove()

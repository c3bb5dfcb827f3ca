"""Which parameters the optimizers own: parameters without an optimizer, replaced, frozen and tied ones.

The checks iterate over all parameters, so they run only now and then, and after the planner has seen a change of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...step.model_index import ModelIndex
from ...step.parameter_refs import Place
from ...step.planner import Planner
from ...step.ranks import is_dtensor
from .probe import LARGEST
from .tallies import Tallies

#: The steps of the first checks.
_EARLY = frozenset({2, 8, 16})
#: The least number of steps between two later checks; models with many parameters have more, so that the cost per step is small.
_LEAST = 16
#: The number of comparisons that confirm a finding.
_COMPARED = 3
#: The total number of comparisons of frozen parameters with a gradient; most of them do not move.
_SUSPECTED = 12
_NEARLY_ALL = 0.9


#: Parameters by name, with their places.
Found = Mapping[str, tuple[Tensor, Place]]


class Survey:
    """Checks all parameters of the model.

    Args:
        planner: knows the model.
        tallies: receive the findings.
        optimizers: returns the attached optimizers that still exist.
    """

    def __init__(self, planner: Planner, tallies: Tallies, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        self._planner, self._tallies, self._optimizers = planner, tallies, optimizers
        self._attempts, self._next, self._version = 0, 0, planner.version
        inventory = planner.inventory
        assert inventory is not None
        self._inventory = inventory
        self._cleared: tuple[ModelIndex | None, list[int]] = (None, [])
        self._is_odd = False
        self._aliases = {name: tuple(others) for name, others in inventory.aliases.items()}
        self._known = {name: _told(place()) for name, place in zip(inventory.names, inventory.references, strict=True)}
        self._outside: Sample | None = None
        self._frozen: Sample | None = None
        self._compared = 0

    def step_began(self) -> bool:
        """Check the model before an optimizer steps, while gradients exist. Returns whether a check was due."""
        self._attempts += 1
        if self._frozen is not None:
            self._frozen.take()
        is_due = self._attempts >= self._next or self._version != self._planner.version or self._attempts in _EARLY
        if is_due:
            changed = self._version != self._planner.version
            self._version = self._planner.version
            self._look()
            if self._attempts >= self._next:
                self._next = self._attempts + max(_LEAST, len(self._known) // 2)
            if changed:
                self._next = min(self._next, self._attempts + 4)
        return is_due

    def step_ended(self) -> None:
        """Check after the step whether frozen parameters have moved."""
        frozen = self._frozen
        if frozen is not None and frozen.has_value:
            if frozen.moved():
                self._tallies.seen("frozen-but-moving", where=frozen.names)
            else:
                self._tallies.missed("frozen-but-moving")
            self._compared += 1
            if frozen.looks >= _COMPARED:
                self._frozen = None

    def _look(self) -> None:
        if not self._inventory.is_current():
            self._inventory = self._planner.now() or self._inventory
        inventory, optimizers = self._inventory, self._optimizers()
        sizes = [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
        if (inventory, sizes) == self._cleared:
            return
        self._is_odd = False
        found = {
            name: (parameter, place)
            for name, place in zip(inventory.names, inventory.references, strict=True)
            if (parameter := place()) is not None
        }
        owned = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        self._look_at_ties(inventory)
        self._look_outside(found, owned)
        self._look_at_frozen(found, owned)
        self._look_for_replaced(found, owned)
        # no check is needed until the model or the optimizers change
        self._cleared = (None, []) if self._is_odd else (inventory, sizes)

    def _look_at_ties(self, inventory: ModelIndex) -> None:
        names = set(inventory.names)
        apart = [(other, name) for name, others in self._aliases.items() for other in others if {name, other} <= names]
        self._is_odd |= bool(apart)
        if apart:
            self._tallies.seen("weights-untied", where=apart[0], evidence={"pairs": float(len(apart))})
        elif self._aliases:
            self._tallies.missed("weights-untied")

    def _look_outside(self, found: Found, owned: dict[int, Tensor]) -> None:
        live = {id(parameter) for parameter, _ in found.values()}
        old = [p for key, p in owned.items() if key not in live]
        sharded = bool(old) and any(is_dtensor(p) for p, _ in found.values()) and not any(is_dtensor(p) for p in old)
        others = {name: p for name, p in found.items() if id(p[0]) not in owned and p[0].requires_grad}
        outside = {name: p for name, p in others.items() if p[0].grad is not None or sharded}
        self._is_odd |= bool(others)
        rule, other = "not-in-optimizer", "optimizer-before-sharding"
        if sharded and any(is_dtensor(p) for p, _ in outside.values()):
            rule, other = other, rule
        self._tallies.retract(other)
        if not outside:
            self._outside = None
            self._tallies.retract(rule)
            return
        if self._outside is None or not self._outside.names or self._outside.names[0] not in outside:
            self._outside = Sample.of(outside)
            self._outside.take()
        elif self._outside.looks >= _COMPARED or not self._outside.moved():
            names = tuple(outside)
            evidence = {"parameters": float(len(names))}
            if old:
                evidence["old parameters in the optimizer"] = float(len(old))
            self._tallies.seen(rule, where=names, evidence=evidence)
        else:  # something else trains them
            self._tallies.retract(rule)
            self._outside = None

    def _look_at_frozen(self, found: Found, owned: dict[int, Tensor]) -> None:
        if self._frozen is not None:
            self._is_odd = True
            return
        frozen = {
            name: (parameter, place)
            for name, (parameter, place) in found.items()
            if not parameter.requires_grad and parameter.grad is not None and id(parameter) in owned
        }
        self._is_odd |= bool(frozen)
        if frozen and self._tallies.is_fact("frozen-but-moving"):
            self._tallies.seen("frozen-but-moving", where=tuple(frozen))
        elif frozen and self._compared < _SUSPECTED:
            self._frozen = Sample.of(frozen)
            self._frozen.take()

    def _look_for_replaced(self, found: Found, owned: dict[int, Tensor]) -> None:
        replaced = [
            name
            for name, (parameter, _) in found.items()
            if name in self._known and self._known[name] != _told(parameter) and self._known[name][1] == parameter.shape
        ]
        taken = [name for name in replaced if id(found[name][0]) in owned]
        # replacing some parameters is deliberate; replacing nearly all at once is a checkpoint or a conversion
        if taken and len(replaced) > _NEARLY_ALL * len(found):
            self._is_odd = True
            self._tallies.seen("dead-hooks", where=tuple(taken), evidence={"parameters": float(len(taken))})
        else:
            self._tallies.missed("dead-hooks")


class Sample:
    """The smallest of some parameters, and its value at one moment."""

    def __init__(self, names: tuple[str, ...], place: Place | None) -> None:
        self.names, self._place = names, place
        self._value: Tensor | None = None
        self.looks = 0

    @classmethod
    def of(cls, parameters: Found) -> Sample:
        """A sample of these parameters."""
        name = min(parameters, key=lambda name: parameters[name][0].numel())
        parameter, place = parameters[name]
        return cls((name, *(other for other in parameters if other != name)), place if parameter.numel() <= LARGEST else None)

    def take(self) -> None:
        """Remember the value as it is now. Does not synchronise."""
        self._value = None if (now := self._now()) is None else now.clone()

    @property
    def has_value(self) -> bool:
        """Whether there is a remembered value."""
        return self._value is not None

    def moved(self) -> bool:
        """Whether the value has changed or cannot be compared. Synchronises, so callers use it a few times only."""
        self.looks += 1
        now, before = self._now(), self._value
        return before is None or now is None or now.shape != before.shape or not torch.equal(now, before)

    def _now(self) -> Tensor | None:
        parameter = None if self._place is None else self._place()
        if parameter is None:
            return None
        return parameter.to_local().detach() if is_dtensor(parameter) else parameter.detach()  # type: ignore[attr-defined]


def _told(parameter: Tensor | None) -> tuple[int, torch.Size]:
    return (0, torch.Size()) if parameter is None else (id(parameter), parameter.shape)

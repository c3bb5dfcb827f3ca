"""Which parameters the optimizers own: parameters without an optimizer, replaced, frozen and tied ones.

The checks iterate over all parameters, so they run only now and then, and after the planner has seen a change of the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...capture.hooks import Hook
from ...step.model_index import ModelIndex, Place
from ...step.planner import Planner
from ...step.ranks import is_dtensor
from ..tallies import Tallies
from .probe import LARGEST
from .unattached_updates import local_values

#: The steps of the first checks.
_EARLY = (2, 8, 16)
#: The least number of steps between two later checks; models with many parameters have more, so that the cost per step is small.
_LEAST = 16
#: The number of comparisons that confirm a finding.
_COMPARED = 3
#: The total number of comparisons of frozen parameters with a gradient; most of them do not move.
_SUSPECTED = 12
_NEARLY_ALL = 0.9

#: Parameters by name, with their places.
Found = Mapping[str, tuple[Tensor, Place]]


class OwnershipChecks:
    """Checks all parameters of the model.

    Args:
        planner: knows the model.
        tallies: receive the findings.
        optimizers: the attached optimizers, held weakly.

    Attributes:
        next_step: the number of the next step that has to be reported, unless the model changes.
        is_comparing: the end of the step has to be reported, too.
    """

    def __init__(self, planner: Planner, tallies: Tallies, optimizers: Sequence[Optimizer]) -> None:
        assert planner.inventory is not None
        self._planner, self._inventory = planner, planner.inventory
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._initial = InitialParameters(planner.inventory, tallies)
        self._unowned, self._frozen = UnownedParameters(tallies), FrozenParameters(tallies)
        self._cleared: tuple[ModelIndex | None, list[int]] = (None, [])
        self.next_step = self._next = 0
        self.version = planner.version  # of the model, at the last check
        self.is_comparing = False

    def step_began(self, step: int) -> bool:
        """Check the model before ``step``, from 1 on, while gradients exist. Returns whether a check was due."""
        self._frozen.step_began()
        has_changed = self.version != self._planner.version
        is_due = step >= self._next or has_changed or step in _EARLY
        if is_due:
            self.version = self._planner.version
            self._check()
            if step >= self._next:
                self._next = step + max(_LEAST, self._initial.count // 2)
            if has_changed:
                self._next = min(self._next, step + 4)
        self.is_comparing = self._frozen.sample is not None
        self.next_step = step + 1 if self.is_comparing else min(n for n in (*_EARLY, self._next) if n > step)
        return is_due

    def step_ended(self) -> None:
        """Check after the step whether frozen parameters have moved."""
        self._frozen.step_ended()

    def _check(self) -> None:
        if not self._inventory.is_current():
            self._inventory = self._planner.now() or self._inventory
        self._initial.note_hooks(self._inventory)
        inventory, optimizers = self._inventory, [o for reference in self._optimizers if (o := reference()) is not None]
        sizes = [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
        if (inventory, sizes) == self._cleared:
            return
        found = {
            name: (parameter, place)
            for name, place in zip(inventory.names, inventory.references, strict=True)
            if (parameter := place()) is not None
        }
        owned = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        suspicions = (
            self._initial.are_untied(set(inventory.names)),
            self._unowned.exist(found, owned),
            self._frozen.exist(found, owned),
            self._initial.are_replaced(found, owned),
        )
        # no check is needed until the model or the optimizers change
        self._cleared = (None, []) if any(suspicions) else (inventory, sizes)


class InitialParameters:
    """The parameters at the beginning, ``count`` of them, and what has become of them."""

    def __init__(self, inventory: ModelIndex, tallies: Tallies) -> None:
        self._tallies = tallies
        self._aliases = {name: tuple(others) for name, others in inventory.aliases.items()}
        self._known = {name: _identity(place()) for name, place in zip(inventory.names, inventory.references, strict=True)}
        self._hooked: set[str] = set()  # those with hooks that are none of a monitor's
        self.count = len(self._known)
        self.note_hooks(inventory)

    def note_hooks(self, inventory: ModelIndex) -> None:
        """Note which of those that are still there have hooks of the loop's own."""
        for name, place in zip(inventory.names, inventory.references, strict=True):
            parameter = place()
            if parameter is not None and self._known.get(name) == _identity(parameter):
                (self._hooked.add if _has_hooks(parameter) else self._hooked.discard)(name)

    def are_untied(self, names: set[str]) -> bool:
        """Check whether parameters that were one are among ``names`` with two of theirs."""
        apart = [(other, name) for name, others in self._aliases.items() for other in others if {name, other} <= names]
        if apart:
            self._tallies.seen("weights-untied", where=apart[0], evidence={"pairs": float(len(apart))})
        elif self._aliases:
            self._tallies.missed("weights-untied")
        return bool(apart)

    def are_replaced(self, found: Found, owned: Mapping[int, Tensor]) -> bool:
        """Check whether nearly all are other tensors now, and hooks of the loop were lost with them. A few are replaced deliberately,
        all by a checkpoint or a conversion.
        """
        replaced = [
            name
            for name, (parameter, _) in found.items()
            if name in self._known and self._known[name] != _identity(parameter) and self._known[name][1] == parameter.shape
        ]
        taken = [
            name for name in replaced if id(found[name][0]) in owned and name in self._hooked and not _has_hooks(found[name][0])
        ]
        is_so = bool(taken) and len(replaced) > _NEARLY_ALL * len(found)
        if is_so:
            self._tallies.seen("dead-hooks", where=tuple(taken), evidence={"parameters": float(len(taken))})
        else:
            self._tallies.missed("dead-hooks")
        return is_so


class UnownedParameters:
    """Parameters with a gradient that no optimizer moves."""

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self._sample: Sample | None = None

    def exist(self, found: Found, owned: Mapping[int, Tensor]) -> bool:
        """Check those without an optimizer. Returns whether there are any, with a gradient or without."""
        live = {id(parameter) for parameter, _ in found.values()}
        old = [p for key, p in owned.items() if key not in live]
        sharded = bool(old) and any(is_dtensor(p) for p, _ in found.values()) and not any(is_dtensor(p) for p in old)
        others = {name: p for name, p in found.items() if id(p[0]) not in owned and p[0].requires_grad}
        outside = {name: p for name, p in others.items() if p[0].grad is not None or sharded}
        rule, other = "not-in-optimizer", "optimizer-before-sharding"
        if sharded and any(is_dtensor(p) for p, _ in outside.values()):
            rule, other = other, rule
        self._tallies.retract(other)
        if not outside:
            self._retract(rule)
        elif self._sample is None or self._sample.names[0] not in outside:
            self._sample = Sample.of(outside)
        elif self._sample.looks >= _COMPARED or not self._sample.moved():
            evidence = {"parameters": float(len(outside))}
            if old:
                evidence["old parameters in the optimizer"] = float(len(old))
            self._tallies.seen(rule, where=tuple(outside), evidence=evidence)
        else:  # something else trains them
            self._retract(rule)
        return bool(others)

    def _retract(self, rule: str) -> None:
        self._tallies.retract(rule)
        self._sample = None


class FrozenParameters:
    """Frozen parameters with a gradient, which an optimizer may move: some steps compare a ``sample`` before and after."""

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self.sample: Sample | None = None
        self._compared = 0

    def step_began(self) -> None:
        """Remember the value before a step."""
        if self.sample is not None:
            self.sample.take()

    def step_ended(self) -> None:
        """Compare the value after a step."""
        if self.sample is not None and self.sample.value is not None:
            if self.sample.moved():
                self._tallies.seen("frozen-but-moving", where=self.sample.names)
            else:
                self._tallies.missed("frozen-but-moving")
            self._compared += 1
            if self.sample.looks >= _COMPARED:
                self.sample = None

    def exist(self, found: Found, owned: Mapping[int, Tensor]) -> bool:
        """Begin to compare if there are any. Returns whether there are, or a comparison is under way."""
        if self.sample is not None:
            return True
        frozen = {
            name: (parameter, place)
            for name, (parameter, place) in found.items()
            if not parameter.requires_grad and parameter.grad is not None and id(parameter) in owned
        }
        if frozen and self._tallies.is_fact("frozen-but-moving"):
            self._tallies.seen("frozen-but-moving", where=tuple(frozen))
        elif frozen and self._compared < _SUSPECTED:
            self.sample = Sample.of(frozen)
        return bool(frozen)


class Sample:
    """The smallest of some parameters, and its value at one moment."""

    def __init__(self, names: tuple[str, ...], place: Place | None) -> None:
        self.names, self._place = names, place
        self.looks = 0
        self.take()

    @classmethod
    def of(cls, parameters: Found) -> Sample:
        """A sample of these parameters, with the value that it has now."""
        name = min(parameters, key=lambda name: parameters[name][0].numel())
        parameter, place = parameters[name]
        return cls((name, *(other for other in parameters if other != name)), place if parameter.numel() <= LARGEST else None)

    def take(self) -> None:
        """Remember the value as it is now. Does not synchronise."""
        self.value = None if (now := self._now()) is None else now.clone()

    def moved(self) -> bool:
        """Whether the value has changed or cannot be compared. Synchronises, so callers use it a few times only."""
        self.looks += 1
        now, before = self._now(), self.value
        return before is None or now is None or now.shape != before.shape or not torch.equal(now, before)

    def _now(self) -> Tensor | None:
        return None if self._place is None else local_values(self._place())


def _has_hooks(parameter: Tensor) -> bool:
    """Whether the parameter has a hook that is none of a monitor's."""
    kinds = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return any(not isinstance(hook, Hook) for hooks in kinds if hooks for hook in [*hooks.values()])


def _identity(parameter: Tensor | None) -> tuple[int, torch.Size]:
    return (0, torch.Size()) if parameter is None else (id(parameter), parameter.shape)

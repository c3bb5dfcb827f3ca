"""One optimizer under the audit: which of its parameters is the probe, and what is judged with it."""

from __future__ import annotations

import weakref
from itertools import takewhile

import torch
from torch.optim import Optimizer

from ...step.model_index import ModelIndex
from ..tallies import Tallies
from .probe import Probe
from .scaler_checks import ScalerChecks
from .step_checks import StepChecks
from .unattached_updates import UnattachedUpdates

#: The number of consecutive steps without a gradient, or backward passes without the probe, after which it is replaced.
PATIENCE = 3
#: The number of parameters of an optimizer without steps that are compared, and the largest size of one.
_PLACES, _LARGEST = 4, 2**20


class ProbedOptimizer:
    """The audit's state of one optimizer.

    Args:
        optimizer: held weakly.
        tallies: receive the findings.
        is_alone: no other one is attached, so that no parameter has to show which one a finding is about.

    Attributes:
        owned: the ids of its parameters.
    """

    def __init__(self, optimizer: Optimizer, tallies: Tallies, is_alone: bool) -> None:
        self._is_alone = is_alone
        self.key = id(optimizer)  # in the tallies
        self.probe: Probe | None = None
        self.checks, self.scaler = StepChecks(tallies, self.key), ScalerChecks(tallies, self.key)
        self.unattached = UnattachedUpdates()
        self.stepped_in = -1  # the backward pass within which it has stepped last
        self.has_stepped = False  # or a scaler has kept it from that
        self.is_unknown = False  # whether it steps with a closure, or outside training
        self._optimizer = weakref.ref(optimizer)
        self.owned: frozenset[int] = frozenset()
        self._absent = self._silent = 0
        self._had_gradients = False

    def choose_probe(self, inventory: ModelIndex | None, with_gradient: bool = False) -> None:
        """Probe the smallest of its parameters; ``with_gradient``: the smallest that has a gradient now."""
        optimizer = self._optimizer()
        self._absent, self.probe, self._silent = 0, None, 0
        if optimizer is None or inventory is None:
            return
        self.owned = owned = frozenset(id(p) for group in optimizer.param_groups for p in group["params"])
        found = [
            (parameter.numel(), number)
            for number, place in enumerate(inventory.references)
            if (parameter := place()) is not None
            and id(parameter) in owned
            and parameter.requires_grad
            and (parameter.grad is not None or not with_gradient)
        ]
        if found:
            _, number = min(found)
            place = inventory.references[number]
            others = [each for size, each in found if size <= _LARGEST and each != number]
            chosen = others[:: max(1, len(others) // (_PLACES - 1))][: _PLACES - 1]
            self.unattached.compare([place, *(inventory.references[each] for each in chosen)])
            if (parameter := place()) is not None:
                self.probe = Probe("" if self._is_alone else inventory.names[number], place, parameter)

    def shares_parameters(self, other: ProbedOptimizer) -> bool:
        """Whether both own some parameter."""
        return not self.owned.isdisjoint(other.owned)

    def rests(self) -> bool:
        """Whether it has never stepped, though its parameters get gradients."""
        probe = self.probe
        has_gradient = probe is not None and (probe.has_fired or ((p := probe.place()) is not None and p.grad is not None))
        return has_gradient and not self.has_stepped

    def names(self, inventory: ModelIndex) -> tuple[str, ...]:
        """Its parameters; the module that has them all, if they have one that is not the whole model."""
        found = [n for n, place in zip(inventory.names, inventory.references, strict=True) if id(place()) in self.owned]
        common = "".join(one + "." for one in _common([name.split(".")[:-1] for name in found]))
        return (common.removesuffix("."),) if common else tuple(found)

    def missed_backward(self) -> bool:
        """Count a backward pass without the probe. Returns whether there were too many of them."""
        self._silent += 1
        return self._silent >= PATIENCE

    def is_stale(self, in_step: bool) -> bool:
        """Whether the parameters have changed since its last step; ``in_step``: this may synchronise."""
        if self.probe is None or not self.unattached.passes:
            return False
        return self.unattached.has_moved or (in_step and (self.probe.was_written() or self.unattached.has_changed))

    def step_began(self, optimizer: Optimizer, forwards: int, is_alone: bool, is_unknown: bool) -> bool:
        """Judge the step. Returns whether the probe has to be replaced.

        ``forwards``: number of training forwards since the last step of any optimizer; ``is_alone``: no other one is attached;
        ``is_unknown``: gradients show nothing.
        """
        self.is_unknown, probe = is_unknown, self.probe
        if probe is None or is_unknown:
            return False
        parameter = probe.place()
        if parameter is None or id(parameter) != probe.identity:  # it was replaced
            return True
        if getattr(optimizer, "grad_scale", None) is not None:  # a fused one, that unscales as it steps
            self.scaler.unscaling(parameter, probe, optimizer)
        gradient = probe.look(parameter)
        if gradient is not None:
            self._absent, self._had_gradients = 0, True
            self.checks.step_with_gradient(probe, gradient, optimizer, forwards, is_alone)
            return False
        if not self.checks.step_without_gradient(probe, optimizer, forwards, is_alone):
            return False
        self._absent += 1
        return self._absent >= PATIENCE or not self._had_gradients

    def unscaling(self, optimizer: Optimizer) -> None:
        """Judge the probe before the scaler unscales the gradients."""
        if self.probe is not None and (parameter := self.probe.place()) is not None:
            self.scaler.unscaling(parameter, self.probe, optimizer)

    def step_ended(self, has_stepped: bool, is_alone: bool) -> None:
        """Begin an interval after the step, or with ``has_stepped`` False after the scaler prevented it; ``is_alone``: as above."""
        self.has_stepped = True
        if has_stepped:
            self.stepped_in = torch._C._current_graph_task_id()
        probe = self.probe
        if self.scaler.is_active:
            self.scaler.step_ended(probe, is_alone)
        if probe is not None:
            probe.stepped(None if self.is_unknown else probe.place())
            self.checks.step_ended(probe.gradient)
        self.is_unknown = False


def _common(paths: list[list[str]]) -> list[str]:
    """The longest beginning that all have."""
    return [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]

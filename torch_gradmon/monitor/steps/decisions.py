"""What plugins may know of an optimizer that is about to step, and gradients that are left of skipped steps."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set

from torch import Tensor

from ...step.planner import Planner
from ...step.plugin import OptimizerContext
from ..loop.gradient_hold import GradientHolds
from .ownership import Ownership


class Decisions:
    """Describes optimizers to plugins that decide about their steps.

    Args:
        ownership: which optimizer has which parameters.
        order: the optimizers in the order in which they step; shared with the step machine, which changes it.
        holds: has the gradients of skipped steps.
        planner: knows the model.
    """

    def __init__(self, ownership: Ownership, order: list[Hashable], holds: GradientHolds, planner: Planner) -> None:
        self._ownership, self._order, self._holds, self._planner = ownership, order, holds, planner

    def context_of(
        self, optimizer: Hashable, done: Set[Hashable], overflowed: Set[Hashable], is_overflowed: bool
    ) -> OptimizerContext:
        """What plugins may know of an optimizer that is about to step."""
        holds, found = self._holds, self._ownership[optimizer]
        alive = [name for name in self._order if self._ownership[name] is not None]
        stepped = [type(self._ownership[name]).__name__ for name in alive if name in done and name != optimizer]
        left = {name: holds.leftovers(other) for name in alive if (other := self._ownership[name]) is not None}
        own = left.pop(optimizer, [])
        has_scaler = isinstance(getattr(found, "found_inf", None), Tensor)  # of a fused optimizer, whose step reads it
        return OptimizerContext(has_scaler, is_overflowed, " and ".join(stepped), self._ignored(left, overflowed), bool(own))

    def _ignored(self, left: Mapping[Hashable, Sequence[Tensor]], overflowed: Set[Hashable]) -> frozenset[str]:
        """Names of the parameters whose gradients another optimizer has from a skipped step, or will not use, since it overflowed."""
        index = self._planner.inventory
        if index is None:
            return frozenset()
        positions = {p for parameters in left.values() if parameters for p in index.positions(parameters)}
        positions |= {p for name in overflowed for p in self._ownership.positions(name)}
        return frozenset(index.names[p] for p in positions)

    def accept_leftovers(self) -> None:
        """Gradients that are left of skipped steps may be used after all."""
        self._holds.accept()

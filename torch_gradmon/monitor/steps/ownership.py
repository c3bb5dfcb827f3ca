"""Which optimizer has which parameters, and by what their gradients are scaled."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence

from torch import Tensor
from torch.optim import Optimizer

from ...step.model_index import PLAIN_GRADIENTS
from ...step.planner import Planner
from ..loop.scaler_hooks import ScalerHooks


class Ownership:
    """The optimizers of one loop, by the names that the step machine has for them, and the positions of their parameters.

    Args:
        optimizers: those attached.

    Attributes:
        unowned: positions of parameters that no optimizer has.
        shared: positions of parameters that several optimizers have.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._references = {id(optimizer): weakref.ref(optimizer) for optimizer in optimizers}
        self._first = weakref.ref(optimizers[0])
        self._owned: dict[Hashable, list[int]] = {}
        self.unowned: list[int] = []
        self.shared: set[int] = set()
        self._group_sizes: list[int] = []
        self._source = PLAIN_GRADIENTS

    def __getitem__(self, name: Hashable) -> Optimizer | None:
        """The optimizer, while it exists; None for the name None, under which unowned parameters stand."""
        reference = self._references.get(name)  # type: ignore[call-overload]
        return None if reference is None else reference()

    def alive(self, order: Iterable[Hashable]) -> list[Optimizer]:
        """The optimizers that still exist, in this order."""
        return [optimizer for name in order if (optimizer := self[name]) is not None]

    @property
    def is_orphaned(self) -> bool:
        """Whether no optimizer exists any more."""
        return self._first() is None and all(reference() is None for reference in self._references.values())

    def positions(self, name: Hashable) -> list[int]:
        """Positions of the optimizer's parameters."""
        return self._owned.get(name, [])

    def all_positions(self) -> list[int]:
        """Positions of all parameters."""
        return sorted({*self.unowned, *(position for own in self._owned.values() for position in own)})

    def update(self, planner: Planner, order: Iterable[Hashable]) -> None:
        """Take the groups of the optimizers as they are now."""
        optimizers, self._source = self.alive(order), planner.source
        self._group_sizes = self._sizes(optimizers)
        owned, self.unowned = planner.positions(optimizers)
        self._owned = dict(owned.items())
        owners = Counter(position for positions in self._owned.values() for position in positions)
        self.shared = {position for position, count in owners.items() if count > 1}

    def has_changed(self, order: Iterable[Hashable]) -> bool:
        """Whether an optimizer got or lost parameters since the last :meth:`update`."""
        return self._group_sizes != self._sizes(self.alive(order))

    def _sizes(self, optimizers: Iterable[Optimizer]) -> list[int]:
        if self._source is not PLAIN_GRADIENTS:
            return [len(self._source.tensors_of(optimizer)) for optimizer in optimizers]
        return [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]

    def shares(self, order: Iterable[Hashable]) -> Iterator[tuple[Hashable | None, list[int]]]:
        """The positions of each optimizer that exists; under None those that no optimizer has."""
        for name in order:
            if self[name] is not None:
                yield name, self.positions(name)
        yield None, self.unowned

    def to_step(self, positions: Iterable[int], done: Iterable[Hashable]) -> list[int]:
        """Those of ``positions`` whose optimizers are not ``done``: later gradients of the others are not for this step."""
        stepped = {position for name in done for position in self.positions(name)}
        return [position for position in positions if position not in stepped]

    def by_scale(
        self, positions: Iterable[int], order: Iterable[Hashable], scaler: ScalerHooks
    ) -> list[tuple[list[int], Tensor | None]]:
        """These positions by what their gradients have to be multiplied by at this moment."""
        wanted = set(positions)
        found = [(sorted(wanted.intersection(own)), scaler.inverse_scale(self[name])) for name, own in self.shares(order)]
        return [(own, scale) for own, scale in found if own]

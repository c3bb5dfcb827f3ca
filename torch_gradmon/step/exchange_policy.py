"""Which values of a step ranks exchange, and what all ranks must have in common for that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Protocol

from ..core import keys as n
from ..core.keys import Key
from ..core.moments import SQUARES
from .buffer import StepBuffer
from .exchange import CADENCE, METRICS, NAMES, RankExchange
from .plan import SourcePlan
from .planner import Planner
from .summary import Summary


class ValueDetectors(Protocol):
    """The detectors, as far as ranks have to share values for them.

    Attributes:
        watches_values: a detector uses logged values.
    """

    @property
    def watches_values(self) -> bool: ...  # noqa: D102

    def accept_late_values(self, is_accepted: bool) -> None:
        """Whether detectors also use values that arrive after the ranks have exchanged theirs."""

    def watches(self, key: Key) -> bool:
        """Whether a detector uses this value."""


class ExchangePolicy:
    """Merges the values of a step over ranks. The plan determines which, not what this rank has seen.

    Args:
        exchange: with the other ranks.
        planner: knows the model and the metrics.
        summary: knows the whole-model values.
        detectors: use values.
        every: steps from one monitored step to the next; None if a function decides.

    Attributes:
        exchange: with the other ranks.
    """

    def __init__(
        self, exchange: RankExchange, planner: Planner, summary: Summary, detectors: ValueDetectors, every: int | None = 1
    ) -> None:
        self.exchange, self._every = exchange, every
        self._reduces = self._is_leaving = False
        self._planner, self._summary, self._detectors = planner, summary, detectors

    def reduce(self) -> None:
        """A value was logged to be merged over ranks."""
        self._reduces = True

    @contextlib.contextmanager
    def without_others(self) -> Iterator[None]:
        """The run ends on this rank, perhaps within a step, so other ranks may not come to the exchange."""
        self._is_leaving = True
        try:
            yield
        finally:
            self._is_leaving = False

    def ranks_take_part(self, step: int | None = None) -> bool:
        """Whether every rank exchanges rows of tensors, of the same model and metrics. Waits for the others the first time; ``step``: the
        one in flight, in which late ranks may join.
        """
        return self.exchange.all_take_part("tensors", self.parts, step) and self.exchange.are_equal("tensors")

    def parts(self) -> dict[str, object]:
        """What all ranks must have in common to exchange values, and rows of tensors, as JSON."""
        return {CADENCE: self._every, **self.parts_of_tensors()}

    def parts_of_tensors(self) -> dict[str, object]:
        """What all ranks must have in common to exchange rows of tensors in one step, as JSON."""
        inventory = self._planner.inventory
        if inventory is None or not inventory.spread:  # perhaps no model is watched, but gradients are clipped
            return {}
        metrics = [(m.source, m.name, m.pattern.pattern, m.every) for m in self._planner.registry.own]
        of_model = inventory.spread, inventory.excluded, inventory.trainable.names
        names = [(name, *(name in some for some in of_model)) for name in inventory.names]
        return {METRICS: [metrics, sorted(self._summary.choice.shown)], NAMES: names}

    @property
    def _is_sharded(self) -> bool:
        inventory = self._planner.inventory
        return inventory is not None and bool(inventory.spread)

    @property
    def _has_values(self) -> bool:
        """Whether values are exchanged. The plan decides, since a rank cannot know whether the others have any."""
        return self._is_sharded or self._reduces or self._planner.measures_batches or self._detectors.watches_values

    @property
    def exchanges_values(self) -> bool:
        """Whether this rank exchanges values when a monitored step ends."""
        what = "tensors" if self._is_sharded else "values"
        return self.exchange.ranks.count > 1 and self._has_values and not self.exchange.is_refused(what)

    def run(self, buffer: StepBuffer, plans: Mapping[str, SourcePlan], may_extend: bool) -> None:
        """Exchange the values of a step that ends.

        Args:
            buffer: its values.
            plans: the requested measurements.
            may_extend: whether the list of shared values may grow, and the first rank broadcast its slot.
        """
        if self._is_leaving:
            self._refuse(buffer, plans, "the run ended in the middle of the step")
            return
        if self.exchange.ranks.count > 1:
            wanted = {source: (plan.exchanged, plan.columns) for source, plan in plans.items() if plan.exchanged}
            if n.UPDATE in wanted:
                wanted[n.UPDATE_BASE] = wanted[n.UPDATE][0], SQUARES
            asked = "tensors" if self._is_sharded else ""
            self.exchange.run(buffer, wanted, self._has_values, self._detectors.watches, may_extend, asked, self.parts)
        self._detectors.accept_late_values(not self.exchange.shares_values)

    def _refuse(self, buffer: StepBuffer, plans: Mapping[str, SourcePlan], why: str) -> None:
        if self.exchange.ranks.count > 1:
            for source, plan in plans.items():
                if plan.exchanged:
                    buffer.refuse_all(source, why)

"""Where the steps of all ranks meet: what they must have in common, and what is merged when a step ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ..core import keys as n
from ..core.keys import Key
from ..core.moments import SQUARES
from .buffer import StepBuffer
from .exchange import RankExchange
from .plan import SourcePlan
from .planner import Planner
from .summary import Summary


class ValueDetectors(Protocol):
    """Who judges values: which ones ranks have to tell each other for that.

    Attributes:
        watches_values: whether any value that a loop logs is judged.
        accepts_late_values: whether a value that comes when the ranks have told each other theirs is judged as well.
    """

    accepts_late_values: bool

    @property
    def watches_values(self) -> bool: ...  # noqa: D102

    def watches(self, key: Key) -> bool:
        """Whether this value is judged."""


class ExchangePolicy:
    """Merges the values of a step over ranks; which these are the plan says, not what this rank saw.

    Attributes:
        exchange: with the other ranks.
        reduces: whether values were logged to be merged over ranks.
        leaving: whether the run ends on this rank, maybe in the middle of a step, so that nobody may come to the exchange.
    """

    def __init__(self, exchange: RankExchange, planner: Planner, summary: Summary, judging: ValueDetectors) -> None:
        self.exchange = exchange
        self.reduces = self.leaving = False
        self._planner, self._summary, self._judging = planner, summary, judging

    def ranks_take_part(self) -> bool:
        """Whether every rank exchanges rows of tensors, of the same model and metrics. All ask together, and once."""
        return self.exchange.all_take_part("tensors", self._layout)

    def _layout(self) -> list[object]:
        """What all ranks must have in common to exchange rows of tensors."""
        inventory = self._planner.inventory
        if inventory is None:  # nothing is watched, and gradients are clipped all the same
            return []
        metrics = [(m.source, m.name, m.pattern.pattern, m.every) for m in self._planner.registry.own]
        return [inventory.names, sorted(inventory.spread), metrics, sorted(self._summary.shown)]

    @property
    def _is_spread(self) -> bool:
        inventory = self._planner.inventory
        return inventory is not None and bool(inventory.spread)

    @property
    def _has_values(self) -> bool:
        """Whether values go along where ranks meet: a rank cannot know whether the others have any."""
        return self._is_spread or self.reduces or self._planner.measures_batches or self._judging.watches_values

    @property
    def meets(self) -> bool:
        """Whether this rank tells others anything when a monitored step ends."""
        what = "tensors" if self._is_spread else "values"
        return self.exchange.ranks.count > 1 and self._has_values and not self.exchange.is_refused(what)

    def run(self, buffer: StepBuffer, plans: Mapping[str, SourcePlan], may_extend: bool) -> None:
        """The step of ``buffer`` ends.

        Args:
            buffer: its values.
            plans: what was to be measured.
            may_extend: whether the list of what is shared may grow, and the first rank say something.
        """
        if self.leaving:
            self._refuse(buffer, plans, "the run ended in the middle of the step")
            return
        wanted = {source: (plan.exchanged, plan.columns) for source, plan in plans.items() if plan.exchanged}
        if n.UPDATE in wanted:
            wanted[n.UPDATE_BASE] = wanted[n.UPDATE][0], SQUARES
        self.exchange.run(buffer, wanted, self._has_values, self._judging.watches, may_extend)
        self._judging.accepts_late_values = not self.exchange.shares_values

    def _refuse(self, buffer: StepBuffer, plans: Mapping[str, SourcePlan], why: str) -> None:
        if self.exchange.ranks.count > 1:
            for source, plan in plans.items():
                if plan.exchanged:
                    buffer.refuse_all(source, why)

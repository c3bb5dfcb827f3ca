"""A step between its end and its record: all that is known of it, and its values on their way to the host."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from . import names as n
from .acting.policy import Act
from .assembly import assemble
from .guard import Guard
from .heads import head_values
from .inventory import Inventory
from .layers import Layers
from .ledger import Ledger
from .merging import Aggregation
from .names import Key
from .plan import SourcePlan
from .record import StepRecord, Table
from .registry import Registry
from .step import Departure, StepBuffer
from .summary import Facts, Summary


@dataclass
class Flight:
    """What a step leaves behind when it ends.

    Attributes:
        departure: its values.
        plans: what was to be measured.
        inventory: the model as it was.
        modules: the built-in values of the tables of what modules take and return.
        refused: whether the optimizer did not apply the step.
        groups: names of the parameters of each of the optimizers' groups.
        tags: facts for its context.
        cost: time spent in the monitor, in percent of the time since the last step that was monitored; None for one that was not.
        ranks: over how many the values of batches are merged.
        act: what was done about it, where it is a spike.
        skipped: how many steps were skipped so far, where they may be.
        late: where values that were logged after its end are merged.
        late_departure: the same on their way, once the next step has begun.
        refusals_after: steps that were neither monitored nor applied, between this one and the next one monitored.
        tuned: the live change of detail that it was measured under, if any.
        judged: whether detectors are to judge it. Not where this rank alone has monitored it, for what a spike brings about has to
            come about on all ranks.
    """

    departure: Departure
    plans: Mapping[str, SourcePlan]
    inventory: Inventory
    modules: Callable[[dict[str, Table]], dict[Key, float]]
    refused: bool
    groups: list[tuple[str, frozenset[str]]]
    tags: dict[str, Any]
    cost: float | None
    ranks: int = 1
    act: Act | None = None
    skipped: int | None = None
    late: StepBuffer | None = None
    late_departure: Departure | None = None
    refusals_after: int = 0
    tuned: Mapping[str, Any] | None = None
    judged: bool = True

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.departure.buffer.step

    def land(self, ledger: Ledger, registry: Registry) -> None:
        """Make the record and enter it into ``ledger``. Waits for the values."""
        ledger.knows(self.inventory.matrices, self.inventory.kinds)
        record, signals = self.record(ledger.summary, ledger.layers, registry)
        try:
            ledger.enter(record, signals, self.departure.buffer, self.judged)
        finally:  # where a spike raises
            if self.late is not None:
                departure = self.late_departure or self.late.depart()
                ledger.amend(self.late, departure.land()[1])
            ledger.summary.refused_unseen(self.refusals_after)

    def record(self, summary: Summary, layers: Layers, registry: Registry) -> tuple[StepRecord, dict[str, float]]:
        """The record, and all whole-model values by name. Waits for the values."""
        buffer = self.departure.buffer
        tables, custom, noted = self.departure.land()
        summary.refused_unseen(int(noted.pop("unseen_refusals", 0)))
        edited, found_inf = noted.pop("edited", None), bool(noted.pop("found_inf", 0))
        facts = Facts(
            buffer.step,
            applied=not self.refused and not found_inf and not (self.act is not None and self.act.skipped),
            updates_void=found_inf,
            edited=None if edited is None else bool(edited),
            trainable=self._trained(tables.get(n.GRADIENT)),
            matrices=self.inventory.matrices.keys(),
            groups=self.groups,
            refused={**{source: why for (source, name), why in buffer.absent.items() if not name}, **buffer.refused},
            context=self._context(noted),
            ranks=self.ranks,
            refusal=self.refused or found_inf,
        )
        if (
            self.cost is not None and "overhead_pct" in summary.keys
        ):  # on the dashboard of a preset; in the context of every record
            custom[Key(n.SUMMARY, "", "overhead_pct")] = self.cost
        if self.skipped is not None:
            custom[Key(n.SUMMARY, "", "steps_skipped")] = float(self.skipped)
        attention, heads = head_values(tables, buffer.unshown)
        modules = {**self.modules(tables), **attention}
        record, signals = assemble(
            facts,
            tables,
            custom,
            self.plans,
            modules,
            registry.hidden(),
            heads,
            summary,
            layers,
            buffer.absent,
        )
        return replace(record, rng=buffer.rng), signals

    def _trained(self, gradients: Table | None) -> Set[str]:
        """The trainable parameters; those that are frozen now where the step has a gradient of them."""
        with_gradient = () if gradients is None else gradients.names
        return self.inventory.trainable - self.inventory.doubtful.difference(with_gradient)

    def _context(self, noted: Mapping[str, float]) -> dict[str, Any]:
        context: dict[str, Any] = {} if self.cost is None else {"overhead_pct": self.cost}
        context.update((name, value) for name, value in noted.items() if "/" not in name)
        if rates := {name: value for name, value in noted.items() if name.startswith("lr/")}:
            context["lr"] = list(rates.values())
        if self.act is not None:
            context.update(self.act.context())
        if self.tuned is not None:
            context["tuned"] = dict(self.tuned)
        if self.tags:
            context["tags"] = self.tags
        return context


class Flights:
    """The steps whose records are not made yet, at most two of them: the one that ended last and the one before.

    Args:
        ledger: where records are entered.
        registry: the metrics.
        guard: told of time that was not its own.
        rest: gives records that are still to be written when everything ends.
    """

    def __init__(
        self, ledger: Ledger, registry: Registry, guard: Guard, rest: Callable[[], Sequence[StepRecord]] = tuple
    ) -> None:
        self._rest = rest
        self.lockstep = False  # with the other ranks: when values land is told by the steps' numbers, and not by the device
        self.now = 0  # the step that begins
        self._ledger, self._registry, self._guard = ledger, registry, guard
        self._flying: deque[Flight] = deque()

    def __del__(self) -> None:
        # collected without detach(): what is still on its way reaches the run directory
        with contextlib.suppress(Exception):
            rest = self._rest()
            if self._flying or rest:
                self.land(None, open_to_late_values=False)
                self._ledger.fill(rest)
                self._ledger.outbox.close()

    def newest(self, step: int | None) -> Flight | None:
        """The flight of ``step``, if it is the one that departed last."""
        return self._flying[-1] if self._flying and self._flying[-1].step == step else None

    @property
    def oldest(self) -> int | None:
        """The oldest step whose values are on their way."""
        return self._flying[0].step if self._flying else None

    def start(self, flight: Flight) -> None:
        """Take charge of ``flight``; where its values are on the host already, its record is made at once."""
        self._flying.append(flight)
        if flight.departure.arrival.is_local:
            self.land(flight.step, open_to_late_values=True)

    def add(self, flight: Flight, key: Key, value: Any, aggregation: Aggregation) -> None:
        """A value that was logged after the step ended."""
        if flight.late is None:
            flight.late = flight.departure.buffer.scalars()
        flight.late.merge_value(key, value, aggregation)

    def seal(self) -> None:
        """The next step begins: late values depart now, while they are not yet behind its work."""
        for flight in self._flying:
            if flight.late is not None and flight.late_departure is None:
                flight.late_departure = flight.late.depart()

    def count_refusal(self) -> None:
        """A step that was not monitored was not applied."""
        if self._flying:
            self._flying[-1].refusals_after += 1
        else:
            self._ledger.summary.refused_unseen(1)

    def _may_land(self, flight: Flight) -> bool:
        return self.now >= flight.step + 2 if self.lockstep else flight.departure.arrival.is_ready()

    def land(self, ended: int | None, open_to_late_values: bool, waiting: bool = True) -> None:
        """Make the records of steps that have departed.

        Args:
            ended: number of the step that ended last; the ledger's last record is of that one, or there is none.
            open_to_late_values: that step is the latest, so that values may still be added to it.
            waiting: wait for values; otherwise only for those of the step before the last one.
        """
        while self._flying:
            if not waiting and len(self._flying) < 2 and not self._may_land(self._flying[0]):
                return
            start = time.perf_counter()
            self._flying[0].departure.arrival.wait()  # interrupted here, the flight is still there
            if not waiting:
                # the device is two steps behind, and it is the training that waits here rather than elsewhere
                self._guard.forgive(time.perf_counter() - start)
            flight = self._flying.popleft()
            flight.land(self._ledger, self._registry)
            if flight.step != ended or not open_to_late_values:
                self._ledger.finish()
            if flight.step != ended:
                self._ledger.last = None

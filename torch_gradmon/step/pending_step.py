"""A step between its end and its record: its facts, and its values on their way to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core import keys as n
from ..core.metric import ASKED_LATE
from ..core.moments import Column
from ..core.records import StatsTable, StepRecord
from ..core.step_values import Block, StepValues
from .active_step import ActiveStep
from .buffer import PendingReadback, StepBuffer
from .head_values import head_values
from .layer_values import LayerSelection
from .model_index import ModelIndex
from .reasons import OTHERS
from .record_builder import assemble
from .registry import Registry
from .summary import Summary
from .summary_keys import StepFacts
from .summary_keys import key as summary_key
from .worst_rows import merged


@dataclass
class PendingStep:
    """A step that has ended, without its record.

    Attributes:
        readback: its values.
        active: what was known of it when it closed.
        inventory: the model as it was.
        modules: computes the built-in values of modules from tables.
        groups: names of the parameters of each of the optimizers' groups.
        tags: facts for its context.
        cost: time spent in the monitor, in percent of the time since the last monitored step; None for an unmonitored one.
        ranks: number of ranks over which values of batches are merged.
        attached: hooks on optimizers took part.
        late: merges values that were logged after its end.
        late_readback: these on their way to the host, once the next step has begun.
        refusals_after: steps neither monitored nor applied, between this one and the next monitored one.
        interruptions_after: those of them that the loop left by an error.
    """

    readback: PendingReadback
    active: ActiveStep
    inventory: ModelIndex
    modules: Callable[[dict[str, StatsTable]], list[Block]]
    groups: list[tuple[str, frozenset[str]]]
    tags: dict[str, Any]
    cost: float | None
    ranks: int = 1
    attached: bool = False
    late: StepBuffer | None = None
    late_readback: PendingReadback | None = None
    refusals_after: int = 0
    interruptions_after: int = 0

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.readback.buffer.step

    def add(self, late: StepBuffer) -> None:
        """Values that were logged after the step ended."""
        if self.late is None:
            self.late = self.readback.buffer.scalars()
        self.late.absorb(late)

    def count_refusal_after(self, is_interrupted: bool) -> None:
        """A step after this one was neither monitored nor applied."""
        self.refusals_after += 1
        self.interruptions_after += is_interrupted

    def seal(self) -> None:
        """The next step begins: copy late values to the host now, while they are not yet behind its work."""
        if self.late is not None and self.late_readback is None:
            self.late_readback = self.late.start_readback()

    def record(self, summary: Summary, layers: LayerSelection, registry: Registry) -> tuple[StepRecord, dict[str, float]]:
        """The record, and all whole-model values by name. Waits for the values."""
        buffer = self.readback.buffer
        tables, custom, noted = self.readback.land()
        summary.count_rejected(int(noted.pop("unseen_refusals", 0)))
        edited, found_inf = bool(noted.pop("edited", 0)), bool(noted.pop("found_inf", 0))
        rounding, rounds = noted.pop("rounding", 0.0), bool(noted.pop("rounds", 0))
        is_assigned, is_dropped = bool(noted.pop("assigned", 0)), bool(noted.pop("dropped", 0))
        if summary.sets_others(tables, rounding, is_assigned, is_dropped):
            tables.pop(n.GRADIENT_BEFORE_CLIP, None)
            custom = {key: value for key, value in custom.items() if key.source != n.GRADIENT_BEFORE_CLIP}
            buffer.absent[n.GRADIENT_BEFORE_CLIP, ""] = OTHERS
        facts = StepFacts(
            buffer.step,
            applied=not self.active.is_overflowed and not found_inf and not self.active.is_skipped,
            updates_void=found_inf,
            edited=edited,
            used=buffer.used,
            trainable=self.inventory.trainable.trained(buffer.thawed) - buffer.frozen,
            matrices=self.inventory.matrices.keys(),
            groups=self.groups,
            refused={**self._unplanned(), **{s: why for (s, name), why in buffer.absent.items() if not name}, **buffer.refused},
            rounding=rounding,
            rounds=rounds,
            context=self._context(noted),
            ranks=self.ranks,
            refusal=(self.active.is_overflowed and not self.active.is_interrupted and self.inventory.source.searches_scale())
            or found_inf,
            is_interrupted=self.active.is_interrupted,
            nonfinite=any(_is_spoiled(tables.get(source)) for source in (n.GRADIENT_BEFORE_CLIP, n.GRADIENT)),
            attached=self.attached,
        )
        if self.cost is not None and "overhead_pct" in summary.choice.keys:
            custom[summary_key("overhead_pct")] = self.cost
        custom.update(self.active.values)
        attention, heads = head_values(tables, buffer.unshown)
        modules = [*self.modules(tables), *StepValues.of(attention).blocks]
        record, signals = assemble(
            facts,
            tables,
            custom,
            self.active.plans,
            modules,
            registry.hidden(),
            heads,
            summary,
            layers,
            self.inventory.names,
            buffer.absent,
        )
        return replace(record, rng=buffer.rng, extras=self.readback.extras), signals

    def _unplanned(self) -> dict[str, str]:
        """Sources that were not measured of the whole model in this step, although a whole-model value of them was requested since."""
        return {source: ASKED_LATE for source, plan in self.active.plans.items() if not plan.is_whole}

    def _context(self, noted: Mapping[str, float]) -> dict[str, Any]:
        context: dict[str, Any] = {} if self.cost is None else {"overhead_pct": self.cost}
        context.update((name, value) for name, value in noted.items() if "/" not in name)
        if rates := {name: value for name, value in noted.items() if name.startswith("lr/")}:
            context["lr"] = list(rates.values())
        context.update(self.active.annotations)
        if self.tags:
            context["tags"] = self.tags
        due = {metric.source for metric in self.active.due}.intersection(n.ATTENTION_SOURCES.values())
        absent = (self.readback.buffer.absent.get((source, "")) for source in due)
        if due and n.has_attention(self.inventory.kinds) and (why := next(filter(None, absent), None)):
            context[n.NO_ATTENTION] = why
        if rows := self.readback.buffer.rows:
            context["rows"] = merged([(*row, self.readback.extras[f"rows/{call}"]) for call, row in enumerate(rows)])
        return context


def _is_spoiled(table: StatsTable | None) -> bool:
    return table is not None and table.sums[Column.NONFINITE] > 0

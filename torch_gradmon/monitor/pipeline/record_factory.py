"""From a step whose values have come to its record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from ...core.keys import Key
from ...core.records import StepRecord
from ...step.layer_values import LayerSelection
from ...step.pending_step import PendingStep
from ...step.reasons import ReasonContext
from ...step.record_builder import asked_for, missing
from ...step.registry import Registry
from ...step.summary import Summary
from ...step.summary_choice import SummaryChoice
from .run_directory import RunDirectory


class ModelFacts:
    """What the run directory and a diagnosis need to know of the model.

    Args:
        annotate: adds facts to the run directory.

    Attributes:
        matrices: the fan-in of each parameter of two or more dimensions, see :attr:`torch_gradmon.step.model_index.ModelIndex.facts`.
        kinds: the class of each module by name.
        parameters: the shape and dtype of each parameter, see there.
    """

    def __init__(self, annotate: Callable[..., None]) -> None:
        self.matrices: Mapping[str, int] = {}
        self.kinds: Mapping[str, str] = {}
        self.parameters: Mapping[str, Mapping[str, Any]] = {}
        self._annotate = annotate
        self._stored: dict[str, Any] = {}

    def update(self, facts: Mapping[str, Any]) -> None:
        """Take the facts of the model as it is now."""
        if facts["matrices"] is self.matrices:
            return
        self.matrices, self.kinds, self.parameters = facts["matrices"], facts["kinds"], facts["parameters"]
        # alternating models, as in a GAN, change the inventory in every step, but no other fact
        new = {name: fact for name, fact in facts.items() if fact != self._stored.get(name)}
        if new:
            self._stored.update(new)
            self._annotate(**new)


class RecordFactory:
    """Makes the records of monitored steps, and knows why the last one lacks values.

    Args:
        registry: the metrics.
        layers: which per-layer values are shown.
        directory: whether there is one decides what a record needs.

    Attributes:
        summary: the whole-model values.
        is_stored: records have the states of random generators, for a run directory.
        model: facts about the model of the last record.
    """

    def __init__(self, registry: Registry, layers: LayerSelection, directory: RunDirectory) -> None:
        self._registry, self.layers, self.is_stored = registry, layers, directory.stores
        self.summary = Summary(SummaryChoice(all_columns=self.is_stored, of_layers=layers.needs))
        self.model = ModelFacts(directory.annotate)
        self._reasons: ReasonContext | None = None

    def make(self, pending: PendingStep) -> tuple[StepRecord, dict[str, float]]:
        """The record of a step, and all whole-model values by name. Waits for the values."""
        active, refused = pending.active, pending.readback.buffer.refused
        self.model.update(pending.inventory.facts)
        self._reasons = ReasonContext(
            pending.inventory, active.plans, active.due, self.summary.choice.shown, pending.attached, refused
        )
        return pending.record(self.summary, self.layers, self._registry)

    def requested(self, names: Mapping[str, Any]) -> list[Key]:
        """The keys of all requested values; ``names`` are those of parameters and modules, by source."""
        return asked_for(self._registry.metrics, names, self.summary.choice.shown)

    def missing(
        self, record: StepRecord, absent: Mapping[tuple[str, str], str], names: Mapping[str, Any], owned: Set[str] | None
    ) -> dict[Key, str]:
        """Why requested values are not in ``record``, the last one.

        Args:
            record: the last one.
            absent: reasons that are known, by source and name.
            names: of parameters and modules, by source.
            owned: the parameters of attached optimizers, if known.
        """
        if self._reasons is None:
            return {}
        return missing(record, list(self._registry.metrics), names, absent, self._reasons, self.layers, owned)

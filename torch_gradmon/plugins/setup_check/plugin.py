"""The check of the setup: what model, optimizers and data are, apart from what they do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...core.errors import WarningLog
from ...core.keys import GRADIENT
from ...core.loop_mistakes import SETUP_MISTAKES, LoopFinding
from ...core.records import StepRecord, TrainedPart, trained_parts
from ...step.model_index import PLAIN_GRADIENTS
from ...step.planner import Planner
from ...step.plugin import Plugin
from ..tallies import Tallies
from .expectations import Expectations
from .hidden_parameters import HiddenParameters
from .modules import check_settings, has_modes, in_evaluation
from .optimizers import Followed, SharedParameters, card, check_optimizers, owned_anywhere

#: Monitored steps after which hidden parameters are looked for, and parameters that another optimizer has meanwhile.
_EARLY = (2, 8, 32)
#: Monitored steps between two looks at optimizers that have parameters in common.
_AGAIN = 16


class SetupCheck(Plugin):
    """Looks at modules and optimizers when they are attached, and at few things in monitored steps; it measures nothing.

    Args:
        planner: knows the model.
        complaints: receives a warning about each certain mistake.
        note: writes facts about the run to the run directory.
    """

    name = "setup_check"
    stops_on_failure = True

    def __init__(self, planner: Planner, complaints: WarningLog, note: Callable[..., None]) -> None:
        self._planner, self._note = planner, note
        self.tallies = Tallies(complaints, lambda: self.context.step or 0, note, SETUP_MISTAKES, "setup")
        self.expectations = Expectations(self.tallies)
        self._shared = SharedParameters(self.tallies)
        self._module: weakref.ref[nn.Module] | None = None
        self._hidden: HiddenParameters | None = None
        self._followed: Followed | None = None
        self._has_modes = False
        self._steps = 0  # monitored ones
        self.groups: list[dict[str, Any]] = []
        self.frozen: list[str] = []

    def facts(self) -> list[LoopFinding]:
        """What was found so far."""
        if self._shared.exist:
            self._shared.look(self.context.optimizers, self._names())
        return self.tallies.facts()

    def on_attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Look at what is there."""
        self._module, self._steps = weakref.ref(module), 0
        self.groups, self.frozen = self._cards(optimizers), self._frozen()
        self._note(optimizers=self.groups, frozen=self.frozen)
        self._has_modes = has_modes(module)
        self._hidden = HiddenParameters(module) if self._planner.source is PLAIN_GRADIENTS else None
        self._leave()
        self._followed = Followed(optimizers)
        check_settings(module, self.tallies)
        check_optimizers(optimizers, self.tallies)
        self._shared.begin(optimizers)
        self._shared.look(optimizers, self._names())
        self.tallies.write_facts(begins=True)
        self.expectations.begin(self._planner)

    def _leave(self) -> None:
        self._followed = None
        self._shared.end()

    def _cards(self, optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
        inventory = self._planner.inventory
        known = None if inventory is None else inventory.cards  # of the stages of all ranks
        return card(optimizers, self._names()) if known is None else known

    def _frozen(self) -> list[str]:
        inventory = self._planner.now()
        return [] if inventory is None else [name for name in inventory.names if inventory.trainable.is_frozen(name)]

    def parts(self) -> list[TrainedPart]:
        """What trains now."""
        inventory = self._planner.now()
        if inventory is None or self._module is None:
            return []
        return list(trained_parts(inventory.parameters, self._cards(self.context.optimizers), self._frozen()))

    def _names(self) -> Mapping[int, str]:
        inventory = self._planner.inventory
        return {} if inventory is None else {key: inventory.names[place] for key, place in inventory.places().items()}

    def on_record(self, record: StepRecord) -> None:
        """Look at modes after each monitored step, and at parameters after few of them."""
        module = None if self._module is None else self._module()
        if module is None:
            return
        self._steps += 1
        if self._has_modes and not module.training:
            if in_evaluation(module):
                self.tallies.seen("eval-mode")
        elif not self.tallies.is_empty:
            self.tallies.missed("eval-mode")
        if self._steps in _EARLY:
            self._check_hidden()
        if self._steps in _EARLY or (self._shared.exist and self._steps % _AGAIN == 0):
            self._shared.look(self.context.optimizers, self._names())
        if self.expectations.is_declared:
            self.expectations.look(self._owned, record.tables.get(GRADIENT))

    def _owned(self) -> set[int]:
        return {id(tensor) for optimizer in self.context.optimizers for tensor in self._planner.source.tensors_of(optimizer)}

    def _check_hidden(self) -> None:
        module = None if self._module is None else self._module()
        if self._hidden is None or module is None:
            return
        owned = self._owned() | owned_anywhere()
        if places := [*self._hidden.with_gradients(owned), *self._hidden.results(module)]:
            self.tallies.seen("unregistered-parameters", where=tuple(places), evidence={"tensors": float(len(places))})

    def on_detach(self) -> None:
        """Hold nothing of the model, and what was found about optimizers that step no more stays."""
        if self._shared.exist:
            self._shared.look(self.context.optimizers, self._names())
        self._leave()
        self._hidden = self._module = None
        self.expectations.end()

    def on_leave(self, last: int | None) -> None:
        """Write the facts to the run directory, if they are new."""
        self.tallies.write_facts()

"""The check of replicas: when it is due, and what is done with its verdict."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...capture.hooks import Handles, ModuleHook
from ...core.errors import WarningLog
from ...core.loop_findings import LoopFinding
from ...core.rank_faults import RANK_FAULTS
from ...core.records import StepRecord
from ...step.active_step import ActiveStep
from ...step.planner import Planner
from ...step.plugin import Plugin
from ...step.ranks import Ranks
from .board import Board
from .conversation import Conversation, Memory
from .items import items_of
from .local_values import has_own_batches, tensors_in
from .snapshot import Snapshot

#: Steps that others are waited for, and steps after which an alert has reached all ranks.
PATIENCE, AFTER_ALERT = 50, 4


class ReplicaCheck(Plugin):
    """Compares fingerprints of everything that must be equal on all ranks. Each rank leaves its own; the first one compares them.

    Args:
        every: steps between two checks.
        sync_every: ranks average their parameters after each such number of steps, and train by themselves in between.
        distinct: pattern of parameters that differ between ranks.
        ranks: that are compared.
        planner: knows the names of parameters.
        complaints: gets one warning for each kind of difference.
        records: the last records of this rank.
    """

    name = "replica_check"
    stops_on_failure = True

    def __init__(
        self,
        every: int,
        sync_every: int,
        distinct: re.Pattern[str] | None,
        ranks: Ranks,
        planner: Planner,
        complaints: WarningLog,
        records: Callable[[], Sequence[StepRecord]],
    ) -> None:
        self._every, self._sync_every, self._distinct = every, sync_every, distinct
        self._ranks, self._planner, self._complaints, self._records = ranks, planner, complaints, records
        self._board: Board | None = None
        self._due = 0
        self._snapshot: Snapshot | None = None
        self._conversation: Conversation | None = None
        self._memory = Memory()
        self._handles = Handles()
        self._facts: dict[str, LoopFinding] = {}

    def facts(self) -> list[LoopFinding]:
        """What was found so far."""
        return list(self._facts.values())

    # --- when ----------------------------------------------------------------------------------------------------------------

    def on_attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Begin with the next step but one: ranks that were initialised differently show there."""
        self.on_detach()
        if self._ranks.count > 1:
            subject = hashlib.sha256(repr((self._every, self._sync_every, self._planner_names())).encode()).hexdigest()[:16]
            self._board = Board(subject, self._ranks.rank, self._ranks.count)
        self._plan(0 if self.context.step is None else self.context.step + 1)

        if self._board is not None and has_own_batches(module, self._ranks.count):
            hook = ModuleHook(self._called)
            self._handles.of_module(module.register_forward_pre_hook(hook, with_kwargs=True))

    def on_detach(self) -> None:
        """Take the hook on the model away, and forget a check that is not over."""
        self._handles.remove()
        self._end()
        self._board, self._memory = None, Memory()

    def _planner_names(self) -> list[str]:
        return [] if self._planner.inventory is None else self._planner.inventory.names

    def _plan(self, step: int) -> None:
        """The next check is in ``step``, or when ranks have averaged their parameters next."""
        self._due = -(-step // self._sync_every) * self._sync_every

    def _plan_next(self) -> None:
        self._plan(((self.context.step or 0) // self._every + 1) * self._every)

    def may_miss(self) -> int:
        """All idle steps before the next check."""
        if self._board is None:
            return sys.maxsize
        return 0 if self._snapshot is not None else max(0, self._due - (self.context.step or 0) - 2)

    def on_alert(self, step: int) -> None:
        """Check soon after a spike."""
        if self._board is not None and self._snapshot is None:
            self._plan(step + AFTER_ALERT)

    def on_rewind(self, step: int) -> None:
        """The run repeats steps."""
        self._end()
        self._plan(step + 1)

    # --- a check -------------------------------------------------------------------------------------------------------------

    def on_optimizer_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Take the fingerprints, if a check is due in this step."""
        step = self.context.step
        if self._board is None or step is None or step < self._due or has_closure:
            return
        if step > self._due:  # none of the steps since had an optimizer's step
            self._plan_next()
        elif self._conversation is None:
            optimizers = list(self.context.optimizers)
            before = optimizers[: optimizers.index(optimizer)] if optimizer in optimizers else []
            first = sum(len(each.param_groups) for each in before)
            self._begin(step).add(list(items_of(optimizer, self._names(), self._distinct, self._sync_every > 1, first)))

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        # a step that this call opens may not be open yet
        step = self.context.step
        coming = 0 if step is None else step if self.context.is_step_open else step + 1
        if self._board is not None and coming == self._due and module.training and self._conversation is None:
            self.context.call(self._take_batch, coming, args, kwargs or {})

    def _take_batch(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begin(step).add_batch(tensors_in(args, kwargs))

    def _begin(self, step: int) -> Snapshot:
        if self._snapshot is None:
            self._snapshot, self.watches_idle_steps = Snapshot(step), True
        return self._snapshot

    def _end(self) -> None:
        self._snapshot, self._conversation, self.watches_idle_steps = None, None, False

    def _names(self) -> Mapping[int, str]:
        inventory = self._planner.inventory
        if inventory is None:
            return {}
        found = zip(inventory.names, inventory.references, strict=True)
        return {id(parameter): name for name, reference in found if (parameter := reference()) is not None}

    def on_step_closed(self, step: ActiveStep) -> None:
        """Go on with what others have left."""
        if self._board is None or self._snapshot is None:
            return
        if self._conversation is None:
            if (self.context.step or 0) < self._snapshot.step:
                return
            self._snapshot.start_copy()
            self._conversation = Conversation(self._board, self._snapshot, self._records, self._memory)
        verdict = self._conversation.go_on()
        if verdict is None and (self.context.step or 0) <= self._snapshot.step + PATIENCE:
            return
        for fact in verdict or ():
            self._take(fact)
        if verdict:
            self.context.annotate_run(replicas=[fact.to_dict() for fact in self.facts()])
        self._end()
        self._plan_next()

    def _take(self, fact: LoopFinding) -> None:
        known = self._facts.get(fact.rule)
        if known is None:
            self._facts[fact.rule] = fact
            if self._ranks.is_first:
                mistake, numbers = RANK_FAULTS[fact.rule], ", ".join(f"{name} {value:g}" for name, value in fact.evidence.items())
                seen = "; ".join(filter(None, (f"seen in step {fact.first}", *fact.where, numbers)))
                self._complaints.add(f"replicas:{fact.rule}", f"{mistake.cause} ({seen}). {mistake.advice}")
        else:
            self._facts[fact.rule] = LoopFinding(fact.rule, known.first, fact.last, known.count + 1, known.where, known.evidence)

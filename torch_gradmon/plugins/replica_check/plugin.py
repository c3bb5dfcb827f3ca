"""The check of replicas: when it is due, and what is done with its verdict."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...capture.hooks import Handles, ModuleHook
from ...core.errors import WarningLog
from ...core.loop_mistakes import RANK_FAULTS, LoopFinding
from ...core.records import StepRecord
from ...step.active_step import ActiveStep
from ...step.planner import Planner
from ...step.plugin import Plugin
from ...step.ranks import Ranks, digest_of
from .board import Board
from .conversation import Conversation, Memory
from .items import Common, buffers_of, items_of, others_of, scale_items
from .local_values import batch_in, has_own_batches
from .snapshot import Snapshot
from .wrapper import Wrappers, is_broadcasting, is_ddp

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
        recorded: those of steps that were not monitored, which waits for the device.
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
        recorded: Callable[[], Sequence[StepRecord]],
    ) -> None:
        self._every, self._sync_every, self._common = every, sync_every, Common(distinct)
        self._ranks, self._planner, self._complaints = ranks, planner, complaints
        self._records, self._recorded = records, recorded
        self._board: Board | None = None
        self._due: int | None = None  # None: in the next step of an optimizer
        self._snapshot: Snapshot | None = None
        self._conversation: Conversation | None = None
        self._taken: set[int] = set()  # ids of the optimizers in the snapshot
        self._has_others = False  # parameters that no optimizer has were compared
        self._brings_buffers = False  # DDP is called, and sends them before it calls the module
        self._wrappers: Wrappers | None = None
        self._has_own_batches = self._is_paused = self._has_joined = False
        self._memory = Memory()
        self._handles = Handles()
        self._facts: dict[str, LoopFinding] = {}

    def facts(self) -> list[LoopFinding]:
        """What was found so far."""
        return list(self._facts.values())

    # --- when ----------------------------------------------------------------------------------------------------------------

    def on_attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Begin with the next step: ranks that were initialised differently show there."""
        self.on_detach()
        inventory = self._planner.inventory
        names = [] if inventory is None else inventory.names
        subject = (self._every, self._sync_every, self._common.pattern, self._ranks.members, names)
        with contextlib.suppress(
            ImportError, RuntimeError, ValueError, TimeoutError
        ):  # no store, or one that cannot be connected to again
            self._board = Board(digest_of(subject), self._ranks.rank, self._ranks.count)
        self._wrappers = Wrappers(module, self._ranks.members)
        self._common = self._common.within(self._wrappers)
        called = self._wrappers.only or module
        self._has_own_batches = has_own_batches(called, self._ranks.members)
        if self._board is not None and (self._has_own_batches or is_ddp(called)):
            self._handles.of_module(called.register_forward_pre_hook(ModuleHook(self._called), with_kwargs=True))
        if self._board is not None and is_ddp(called):
            self._handles.of_module(called.module.register_forward_pre_hook(ModuleHook(self._inner_called), prepend=True))

    def on_pause(self, is_paused: bool) -> None:
        """What the model gets meanwhile is no batch of the training."""
        self._is_paused = is_paused

    def on_detach(self) -> None:
        """Take the hook on the model away, and forget a check that is not over."""
        self._handles.remove()
        self._end()
        self._board, self._memory, self._due, self._has_others = None, Memory(), None, False
        self._wrappers, self._has_joined = None, False

    def may_miss(self) -> int:
        """All idle steps before the next check."""
        if self._board is None:
            return sys.maxsize
        if self._snapshot is not None or self._due is None:
            return 0
        return max(0, self._due - (self.context.step or 0) - 2)

    def on_alert(self, step: int) -> None:
        """Check soon after a spike."""
        if self._snapshot is None:
            self._due = step + AFTER_ALERT

    def on_rewind(self, step: int) -> None:
        """The run repeats steps."""
        self._end()
        self._due, self._memory = None, Memory()

    def _is_due(self, step: int) -> bool:
        """Whether ``step`` is that of a check, or the first one after it in which ranks have just averaged their parameters."""
        return (self._due is None or step >= self._due) and step % self._sync_every == 0 and self._conversation is None

    # --- a check -------------------------------------------------------------------------------------------------------------

    def on_optimizer_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Take the fingerprints of parameters that ranks have just averaged."""
        if self._sync_every > 1:
            self._take_fingerprints(optimizer)

    def on_optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Take the fingerprints: gradients are still there, also those that a closure has computed."""
        if self._sync_every == 1:
            self._take_fingerprints(optimizer)

    def _take_fingerprints(self, optimizer: Optimizer) -> None:
        step = self.context.step
        if self._board is None or step is None or id(optimizer) in self._taken or not self._is_due(step):
            return
        # once ranks have had steps that others had not, the same number is no longer the same moment
        self._has_joined = self._has_joined or (self._wrappers is not None and self._wrappers.is_joining)
        if self._has_joined:
            self._end()
            return
        if self._snapshot is not None and self._snapshot.step != step:
            self._end()  # the batch of a step whose optimizer did not step
        optimizers, names = list(self.context.optimizers), self._names()
        before = optimizers[: optimizers.index(optimizer)] if optimizer in optimizers else []
        first = sum(len(each.param_groups) for each in before)
        items = list(items_of(optimizer, names, self._common, self._sync_every > 1, first))
        if not self._taken and self._sync_every == 1:
            items += scale_items(self.context.scaler, optimizer, self._common)
        if not self._has_others:
            owned = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
            others = {name: p for name, p in self._parameters() if id(p) not in owned}
            items += others_of(others, self._common)
            self._has_others = True
        self._begin(step).add(items)
        self._taken.add(id(optimizer))

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        self._brings_buffers = is_ddp(module) and is_broadcasting(module)
        if self._has_own_batches and self._trains(module) and self._is_due(step := self.context.coming_step):
            self.context.call(self._take_batch, step, args, kwargs or {})

    def _inner_called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        brings, self._brings_buffers = self._brings_buffers, False
        if brings and self._trains(module) and self._is_due(step := self.context.coming_step):
            self.context.call(self._take_buffers, step)

    def _trains(self, module: nn.Module) -> bool:
        return module.training and torch.is_grad_enabled() and not self._is_paused

    def _take_batch(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begin(step).add_batch(batch_in(args, kwargs))

    def _take_buffers(self, step: int) -> None:
        if self._wrappers is not None and (module := self._wrappers.only) is not None:
            self._begin(step).add_buffers(list(buffers_of(module, self._common)))

    def _begin(self, step: int) -> Snapshot:
        if self._snapshot is None:
            self._snapshot, self.watches_idle_steps = Snapshot(step), True
        return self._snapshot

    def _end(self) -> None:
        self._snapshot, self._conversation, self.watches_idle_steps = None, None, False
        self._taken = set()

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        inventory = self._planner.inventory
        for name, reference in () if inventory is None else zip(inventory.names, inventory.references, strict=True):
            # a part whose other elements are on other ranks is no copy
            if (parameter := reference()) is not None and not self._planner.source.is_part(parameter):
                yield name, parameter

    def _names(self) -> Mapping[int, str]:
        return {id(self._planner.source.stepped(parameter)): name for name, parameter in self._parameters()}

    def on_step_closed(self, step: ActiveStep) -> None:
        """Go on with the messages of others."""
        snapshot, now = self._snapshot, self.context.step or 0
        if self._board is None or snapshot is None or not self._taken:
            return
        if self._conversation is None:
            if now < snapshot.step:
                return
            snapshot.start_copy()
            self._conversation = Conversation(
                self._board,
                snapshot,
                self._records,
                self._recorded,
                self._memory,
                self._ranks.members,
                has_traces=self._sync_every == 1,
                compares_losses=self._sync_every == 1 and self._has_own_batches,
            )
        try:
            verdict = self._conversation.go_on()
            if verdict is None and now <= snapshot.step + PATIENCE:
                return
            if verdict is None:
                verdict = self._not_compared(self._conversation, snapshot.step)
        except TimeoutError:  # the store stands still; the next check asks again
            verdict = []
        except torch.distributed.DistNetworkError:  # the process that has the store has ended, as at the end of a training
            self._board, verdict = None, []
        for fact in verdict:
            self._take(fact)
        if verdict:
            self.context.annotate_run(replicas=[fact.to_dict() for fact in self.facts()])
        self._end()
        self._due = (now // self._every + 1) * self._every

    def _not_compared(self, conversation: Conversation, step: int) -> list[LoopFinding]:
        """The finding, where nothing was ever compared because some ranks give no answer. The first rank alone asks which."""
        if self._memory.last_good is not None or not self._ranks.is_first:
            return []
        count, first = conversation.silent()
        if not count:
            return []
        evidence = {
            "ranks without an answer": float(count),
            "the first of them": float(first),
            "ranks": float(self._ranks.count),
        }
        return [LoopFinding("ranks-not-compared", step, step, 1, (), evidence)]

    def _take(self, fact: LoopFinding) -> None:
        known = self._facts.get(fact.rule)
        if known is not None:
            self._facts[fact.rule] = LoopFinding(fact.rule, known.first, fact.last, known.count + 1, known.where, known.evidence)
            return
        self._facts[fact.rule] = fact
        mistake = RANK_FAULTS[fact.rule]
        if self._ranks.is_first and mistake.warns:
            self._complaints.add(f"replicas:{fact.rule}", f"{mistake.cause} ({_in_words(fact)}). {mistake.advice}")


def _in_words(fact: LoopFinding) -> str:
    numbers = {name: f"{value:,.0f}" if value.is_integer() else f"{value:.6g}" for name, value in fact.evidence.items()}
    if not fact.where:
        return f"first in step {fact.first:,}"
    if "unlike rank" not in numbers:
        middle = f"{numbers['median there']} in the median, elsewhere {numbers['median elsewhere']}"
        return f"{fact.where[0]} of rank {numbers['rank']}: {middle}, in steps {fact.first:,} to {fact.last:,}"
    found = f"rank {numbers['rank']} is unlike rank {numbers['unlike rank']} in {fact.where[0]} from step {fact.first:,} on"
    if fact.evidence["ranks like it"] >= fact.evidence["ranks like the other"]:
        return f"{found}, and either may be the wrong one"
    return f"{found}, which is as on {numbers['ranks like the other']} ranks"

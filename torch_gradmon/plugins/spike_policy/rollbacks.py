"""Snapshots between the steps of a run, and the way back to one of them after a spike: all ranks go back, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer

from ...core.errors import WarningLog
from ...step.ranks import Ranks
from .policy import Rollback, RolledBack
from .snapshots import Snapshots


class Rollbacks:
    """Takes the snapshots of one run, and restores them.

    Args:
        policy: when a snapshot is due, and how many batches to skip after a rollback.
        ranks: go back together.
        complaints: receives failures.

    Attributes:
        due: the step before, if a snapshot is due after it.
    """

    def __init__(self, policy: Rollback, ranks: Ranks, complaints: WarningLog) -> None:
        self._snapshots = Snapshots(policy, ranks.rank)
        self._skip_batches, self._ranks, self._complaints = policy.skip_batches, ranks, complaints
        self._batches = 0  # that came, or were passed over
        self.due: int | None = None

    def take_due(self, model: nn.Module | None, optimizers: Sequence[Optimizer]) -> bool:
        """Take the snapshot that is due, which waits for the device. Returns whether one was due and the model is there."""
        last, self.due = self.due, None
        if last is None or model is None:
            return False
        try:
            self._snapshots.take(last, self._batches, model, optimizers)
        except Exception as error:  # a full disk, or what cannot be copied
            self._complaints.add("snapshot", f"no snapshot could be taken after step {last}", error)
        return True

    def attempt_ended(self, step: int, is_sound: bool) -> None:
        """Count the batch of ``step``; ``is_sound``: the step was applied, and is no spike."""
        self._batches += 1
        if is_sound and self._snapshots.is_due(step):
            self.due = step

    def go_back(self, step: int, model: nn.Module, optimizers: Sequence[Optimizer]) -> RolledBack | None:
        """Go back after a spike in ``step``; None without a snapshot that all ranks have and can restore."""
        snapshots = self._snapshots
        to = snapshots.choose(step, set(snapshots.steps).intersection(*self._ranks.gathered(snapshots.steps)))
        if to is None:
            return None
        if failures := self._on_all(lambda: snapshots.load(to, model, optimizers)):  # all go back, or none
            snapshots.forget()
            message = f"step {step} is skipped, but the model could not go back to step {to}: {failures[0]}"
            self._complaints.add("rollback", message)
            return None
        before = snapshots.batches_of(to)
        if failures := self._on_all(lambda: snapshots.go_back(step, model, optimizers)):
            message = f"not all of the model went back to step {to}, and what it is now is of no use: {failures[0]}"
            self._complaints.add("rollback:partly", message)
        seen = self._batches - before
        self._batches += self._skip_batches
        return RolledBack(step, to, seen, self._skip_batches)

    def _on_all(self, action: Callable[[], object]) -> list[str]:
        """Do it on each rank; what went wrong, on any of them."""
        failure = ""
        try:
            action()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        return list(filter(None, self._ranks.gathered(failure)))

    def rewind(self) -> None:
        """Drop all snapshots, and take none after the step before: they are of another branch."""
        self.due = None
        self.forget()

    def forget(self) -> None:
        """Drop all snapshots and their files."""
        self._snapshots.forget()

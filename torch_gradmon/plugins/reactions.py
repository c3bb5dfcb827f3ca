"""The actions on a spike: skip the step, or go back to a snapshot."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any

from ..core import validation as check
from ..core.errors import display

_ON_LIMIT = ("accept", "stop")


@dataclass(frozen=True)
class Skip:
    """``on_spike=Skip()``, or ``on_spike="skip"``: a step that is a spike changes nothing.

    Parameters, the optimizer's state, the GradScaler's scale and the model's buffers (running statistics) have the same values as
    before the batch, bit for bit. Random generators are not restored.

    Args:
        limit: the most consecutive steps to skip; None for no limit. A step that the GradScaler prevents does not count.
        on_limit: the action on the next consecutive spike. ``"accept"`` applies it, and skips may follow again. ``"stop"`` raises
            :class:`torch_gradmon.SpikeError` from ``optimizer.step()``, on every rank. A step with NaN or Inf in the gradients that
            the optimizer would use is never accepted, since the model would become NaN: it is skipped despite the limit.

    With several optimizers in a step, each one is judged just before it steps, and a skip includes all later ones of the step.
    With a closure, the gradients of its first call decide; L-BFGS, which calls it again, may still find NaN in a later call.

    Raises:
        ValueError: an argument is invalid.
    """

    limit: int | None = 3
    on_limit: str = "accept"

    def __post_init__(self) -> None:
        _check_limit(self.limit, self.on_limit)

    @property
    def settings(self) -> tuple[object, ...]:
        """What has to be the same on all ranks."""
        return self.limit, self.on_limit


@dataclass(frozen=True)
class Rollback:
    """``on_spike=Rollback()``: after a spike the model goes back to a snapshot, and the data continue after the spike.

    A snapshot holds the parameters that the optimizers step, the model's buffers and the optimizers' state; each rank holds its
    own part. It is taken at the start of the next step, so it includes the loop's changes after ``optimizer.step()``. The step
    with the spike is skipped, as by :class:`Skip`. Then the snapshot is restored in place, and ``monitor.last_record.rollback``
    has the step of the snapshot and the number of batches to skip. A second spike before the next snapshot restores the previous
    one. Without a snapshot the step is only skipped.

    Source: PaLM (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1) restarted from a checkpoint about 100 steps before a spike
    and passed over 200 to 500 batches; the same batches from another checkpoint did not spike.

    Args:
        keep: the number of snapshots; each takes as much host memory as parameters and optimizer state.
        every: steps from one snapshot to the next. A snapshot copies everything to the host and waits for the device.
        margin: the preferred minimum age of a snapshot, in steps; by default half of ``every``. The cause of a spike may precede
            it.
        skip_batches: the number of further batches to skip after the one that spiked, for ``monitor.last_record.rollback``.
        directory: keeps the snapshots there instead of in memory, in files without a name, which the system removes at the end.
        extra_state: objects with ``state_dict`` and ``load_state_dict`` to restore too, such as LR schedulers or an average of the
            model; they are not kept alive. If there are any, the optimizers' options such as ``lr`` are restored too. Otherwise
            they keep the loop's values.
        limit: the most rollbacks without a new snapshot in between; None for no limit.
        on_limit: as in :class:`Skip`.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    keep: int = 2
    every: int = 100
    margin: int | None = None
    skip_batches: int = 0
    directory: str | os.PathLike[str] | None = None
    extra_state: tuple[Any, ...] = field(default=(), repr=False)
    limit: int | None = 3
    on_limit: str = "accept"

    def __post_init__(self) -> None:
        check.positive_int("keep", self.keep)
        check.positive_int("every", self.every)
        check.step_number("skip_batches", self.skip_batches)
        if self.margin is not None:
            check.step_number("margin", self.margin)
        if self.directory is not None and not isinstance(self.directory, (str, os.PathLike)):
            raise TypeError(f"directory must be a path, or None to keep snapshots in memory, got {display(self.directory)}")
        if not isinstance(self.extra_state, (tuple, list)):
            raise TypeError(f"extra_state must be a tuple of objects such as LR schedulers, got {display(self.extra_state)}")
        for each in self.extra_state:
            methods = (getattr(each, name, None) for name in ("state_dict", "load_state_dict"))
            if isinstance(each, type) or not all(map(callable, methods)):
                raise TypeError(f"extra_state takes objects with state_dict() and load_state_dict(), got {display(each)}")
        _check_limit(self.limit, self.on_limit)

    @property
    def settings(self) -> tuple[object, ...]:
        """What has to be the same on all ranks."""
        return self.keep, self.every, self.margin, self.skip_batches, len(self.extra_state), self.limit, self.on_limit

    @property
    def age(self) -> int:
        """The preferred minimum age of a snapshot, in steps."""
        return self.every // 2 if self.margin is None else self.margin

    def without_others(self) -> Rollback:
        """The same policy without ``extra_state``: a scheduler holds the optimizer, which holds the model."""
        return dataclasses.replace(self, extra_state=())


Policy = Skip | Rollback


@dataclass(frozen=True)
class RollbackResult:
    """The result of a rollback.

    Attributes:
        step: the step with the spike.
        to_step: the step whose model is restored, as it was when the next step began.
        seen: the number of batches since then, including that of the spike. A loader that goes back to ``to_step`` has to skip
            these too; one that simply continues has passed them already.
        skip_batches: the number of batches to skip after those, from ``Rollback(skip_batches=)``.
    """

    step: int
    to_step: int
    seen: int
    skip_batches: int


@dataclass(frozen=True)
class StepCounts:
    """Steps so far; with ``attempted`` = ``applied`` + ``skipped`` + ``overflowed`` + ``interrupted``.

    Attributes:
        attempted: the optimizers were called.
        applied: they changed the model.
        skipped: not applied because of a spike.
        overflowed: not applied by the GradScaler. An overflow that a fused optimizer finds in a step that is not monitored counts as
            applied until the next one that is.
        nonfinite: gradients held NaN or Inf, as far as they were measured; overflowed steps among them.
        rolled_back: of those skipped, how many took the model back to a snapshot.
        interrupted: not applied because the closure or the optimizer raised.
    """

    attempted: int
    applied: int
    skipped: int
    overflowed: int
    nonfinite: int
    rolled_back: int
    interrupted: int = 0


def policy_of(on_spike: object) -> Policy | None:
    """The action on the step itself that ``on_spike`` requests; None if it requests none."""
    if on_spike == "skip":
        return Skip()
    return on_spike if isinstance(on_spike, (Skip, Rollback)) else None


def _check_limit(limit: object, on_limit: object) -> None:
    if limit is not None:
        check.positive_int("limit", limit, "or None for no limit")
    check.one_of("on_limit", on_limit, _ON_LIMIT)

"""What may be done about a spike: skip the step, or go back to a snapshot."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core import validation as check
from ...core.errors import display

_ON_LIMIT = ("accept", "stop")


@dataclass(frozen=True)
class Skip:
    """``on_spike=Skip()``, which ``on_spike="skip"`` stands for: a step that is a spike changes nothing.

    Parameters, the optimizer's state, the GradScaler's scale and the model's buffers (running statistics) are what they were before
    the batch came, bit for bit. Random generators are not: what was drawn was drawn.

    Args:
        limit: so many steps in a row are skipped at most; None for no limit. A refusal of the GradScaler is no skip.
        on_limit: what becomes of the next spike in that row: ``"accept"`` applies it, and skips may follow again; ``"stop"`` raises
            :class:`torch_gradmon.SpikeError` out of ``optimizer.step()``, on every rank. A step whose gradients, as the optimizer would
            use them, hold NaN or Inf is never accepted, for it would make NaN of the model: it is skipped however many came before.

    Of several optimizers in a step each is judged when it is about to step; where one is skipped, those after it in the step are too.
    With a closure, what its first call brings decides; L-BFGS, which calls it again, may still find NaN in a later call.

    Raises:
        ValueError: an argument is not what it should be.
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
    """``on_spike=Rollback()``: a spike takes the model back to a snapshot, and the data go on behind it.

    A snapshot has the parameters that the optimizers step, the model's buffers and the optimizers' state, of each rank its own part.
    It is taken when the next step begins, so that it has what the loop did after ``optimizer.step()``. The step with the spike is
    skipped, as by :class:`Skip`; then all of it is put back in place, and ``monitor.rolled_back`` says how far back that was and
    how many batches to pass over. A second spike before there is a new snapshot goes back to the snapshot before. Until there is
    one, the step is skipped.

    Source: PaLM (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1) restarted from a checkpoint about 100 steps before a spike
    and passed over 200 to 500 batches; the same batches from another checkpoint did not spike.

    Args:
        keep: how many snapshots; each takes as much memory as parameters and optimizer state, on the host.
        every: steps from one snapshot to the next. Taking one copies everything to the host and waits for the device.
        margin: a snapshot is gone back to when it is at least so many steps old, if there is such a one; by default half of
            ``every``. What a spike comes from may have begun before it.
        skip_batches: so many more batches to pass over after the one that spiked, for ``monitor.rolled_back``.
        directory: keep the snapshots there instead of in memory, in a new directory for each rank, which is removed in the end.
        extra_state: objects with ``state_dict`` and ``load_state_dict`` that go back as well, such as LR schedulers or an average of the
            model, which are not kept alive. With any, the optimizers' options such as ``lr`` go back too; without, they stay as the
            loop has set them.
        limit: so many times it goes back without a new snapshot in between; None for no limit.
        on_limit: as in :class:`Skip`.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
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
        """How old a snapshot should be."""
        return self.every // 2 if self.margin is None else self.margin

    def without_others(self) -> Rollback:
        """The same without ``extra_state``: a scheduler holds the optimizer, and that the model."""
        return dataclasses.replace(self, extra_state=())


Policy = Skip | Rollback


@dataclass(frozen=True)
class RolledBack:
    """What a rollback did.

    Attributes:
        step: the step with the spike.
        to_step: the model is as it was after this step, when the next one began.
        seen: steps whose batches came since then, the one with the spike included. A loader that goes back to ``to_step`` has to
            pass over these too; one that simply goes on has passed over them.
        skip_batches: batches to pass over after those, as ``Rollback(skip_batches=)`` says.
    """

    step: int
    to_step: int
    seen: int
    skip_batches: int


@dataclass(frozen=True)
class Counts:
    """Steps so far; with ``attempted`` = ``applied`` + ``skipped`` + ``overflowed``.

    Attributes:
        attempted: the optimizers were called.
        applied: they changed the model.
        skipped: not applied because of a spike.
        overflowed: not applied by the GradScaler. An overflow that a fused optimizer finds in a step that is not monitored counts as
            applied until the next one that is.
        nonfinite: gradients held NaN or Inf, as far as they were measured; overflowed steps among them.
        rolled_back: of those skipped, how many took the model back to a snapshot.
    """

    attempted: int
    applied: int
    skipped: int
    overflowed: int
    nonfinite: int
    rolled_back: int


@dataclass(frozen=True)
class Act:
    """What became of a step that is a spike.

    Attributes:
        reason: what spiked, in words.
        words: what was done about it.
        skipped: whether the step was not applied.
        in_a_row: how many such steps this one ends.
    """

    reason: str
    words: str
    skipped: bool
    in_a_row: int

    def context(self) -> Mapping[str, str | int]:
        """Facts for the record of the step."""
        return {"action": self.words, "in_a_row": self.in_a_row, **({"skipped": self.reason} if self.skipped else {})}


def policy_of(on_spike: object) -> Policy | None:
    """What ``on_spike`` says to do about the step itself."""
    if on_spike == "skip":
        return Skip()
    return on_spike if isinstance(on_spike, (Skip, Rollback)) else None


def _check_limit(limit: object, on_limit: object) -> None:
    if limit is not None:
        check.positive_int("limit", limit, "or None for no limit")
    if not isinstance(on_limit, str) or on_limit not in _ON_LIMIT:
        check.one_of("on_limit", on_limit, _ON_LIMIT)

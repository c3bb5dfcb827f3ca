"""What each rank has by itself: its batches, which should differ, and its losses, which should be alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...core.loop_mistakes import LoopFinding
from ...core.records import StepRecord, loss_among
from ...step.ranks import is_dtensor
from .wrapper import is_ddp, ranks_of

#: Types of arguments that are no batch.
_SETTINGS = (type(None), bool, int, float, str)
#: The share of values at either end that a range leaves out, the fewest values that have one, and the number of checks in a row in which
#: one rank has to be apart. By simulation: losses of 100 steps, correlated by .99 from step to step, kept two to eight ranks apart in
#: 15 of 1,200 checks, and never in three in a row.
OUTSIDE, FEWEST, IN_A_ROW = 0.1, 20, 3
#: What a rank measures of its own batches.
LOCAL = ("loss", "gradient norm")


def has_own_batches(module: nn.Module, members: Sequence[int]) -> bool:
    """Whether each of these ranks has a batch of its own: under DDP or FSDP2 over just them, and no tensor parallelism."""
    if is_ddp(module):
        return ranks_of(module) == sorted(members)
    if not any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
        return False
    sharded: list[Any] = [parameter for parameter in module.parameters() if is_dtensor(parameter)]
    return bool(sharded) and all(
        sorted(each.device_mesh.mesh.flatten().tolist()) == sorted(members)
        and all(p.is_replicate() for p in each.placements[:-1])
        for each in sharded
    )


def same_batches(step: int, messages: Mapping[int, Mapping[str, Any]]) -> list[LoopFinding]:
    """The finding that all ranks had the same batch in this check and in the last one; ``messages`` by rank."""
    now = {message["batch"] for message in messages.values()}
    before = {message["batch before"] for message in messages.values()}
    # a batch that never changes is no batch, or the whole data
    if len(now) == len(before) == 1 and None not in now | before and now != before:
        return [LoopFinding("same-batches-on-all-ranks", step, step, 1, (), {"ranks": float(len(messages))})]
    return []


def batch_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a model, and one level inside of lists and dicts.

    None of them if an argument is of another kind, since the batch may be in there; nor if all have a single element.
    """
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, Tensor) and not is_dtensor(each) and not each.is_sparse and not each.is_nested:
                found.append(each)
            elif not isinstance(each, _SETTINGS):
                return []
    return found if any(tensor.numel() > 1 for tensor in found) else []


class Range(NamedTuple):
    """Most of the values of one rank since the last check."""

    low: float
    median: float
    high: float


class Streak(NamedTuple):
    """Checks in a row in which one rank was far from all others.

    Attributes:
        rank: its number on the board.
        is_above: its values are larger than those of the others.
        first: the step of the first of these checks.
        checks: their number.
    """

    rank: int
    is_above: bool
    first: int
    checks: int


def range_of(values: Sequence[float]) -> Range | None:
    """The range of the values without a tenth at either end; None if there are too few, or if one is not finite."""
    if len(values) < FEWEST or not all(map(math.isfinite, values)):
        return None
    ordered = sorted(values)
    low, median, high = (ordered[round(share * (len(values) - 1))] for share in (OUTSIDE, 0.5, 1 - OUTSIDE))
    return Range(low, median, high)


def local_values(kind: str, records: Sequence[StepRecord], after: int, rank: int) -> list[float]:
    """What this rank has measured of its own batches in the steps ``after`` that one: the loss, or the norm of their gradients where
    :meth:`ModuleMonitor.add_batch_metrics` measures it.
    """
    recent = [record for record in records if record.step > after]
    if kind == "loss":
        loss = loss_among({key for record in recent[-1:] for key in record.values})
        return [record.values[loss] for record in recent if loss in record.values] if loss is not None else []
    norms = [record.context["batch_norms"].get(str(rank)) for record in recent if "batch_norms" in record.context]
    return [sum(of) / len(of) for of in norms if of]


def ranks_apart(
    step: int, ranges: Mapping[int, Mapping[str, Sequence[float]]], streaks: dict[str, Streak], names: Sequence[int]
) -> list[LoopFinding]:
    """The findings that one rank was far from all others in several checks in a row.

    Args:
        step: of this check.
        ranges: by rank and kind.
        streaks: by kind; brought up to date.
        names: numbers of the ranks among all processes.
    """
    found = []
    for kind in LOCAL:
        known = {rank: Range(*of[kind]) for rank, of in ranges.items() if kind in of}
        if len(known) < len(ranges):
            continue  # some have measured too little since
        before, now = streaks.pop(kind, None), apart(known)
        if now is None:
            continue
        goes_on = before is not None and before[:2] == now
        streaks[kind] = streak = Streak(
            *now, before.first if goes_on and before else step, before.checks + 1 if goes_on and before else 1
        )
        if streak.checks >= IN_A_ROW:
            others = statistics.median(each.median for rank, each in known.items() if rank != streak.rank)
            evidence = {"rank": float(names[streak.rank]), "median there": known[streak.rank].median, "median elsewhere": others}
            found.append(LoopFinding("one-rank-apart", streak.first, step, 1, (kind,), evidence))
    return found


def apart(ranges: Mapping[int, Range]) -> tuple[int, bool] | None:
    """The rank whose range is as far from those of all others as the widest of these is wide, while the others overlap; and whether its
    values are larger.
    """
    if len(ranges) < 2:
        return None
    for rank, own in sorted(ranges.items(), key=lambda item: -item[1].median):
        others = [each for number, each in ranges.items() if number != rank]
        if max(each.low for each in others) > min(each.high for each in others):
            continue
        widest = max(each.high - each.low for each in others)
        if len(ranges) == 2 and not _differ_by_far(own.median, others[0].median):
            continue  # where each has the same few rows again and again, ranges are narrow
        above, below = own.low - max(each.high for each in others), min(each.low for each in others) - own.high
        if max(above, below) >= widest and max(above, below) > 0:
            return rank, above > 0
    return None


def _differ_by_far(one: float, other: float) -> bool:
    """Whether one is at least twice the other, or has the other sign."""
    small, large = sorted((abs(one), abs(other)))
    return one * other < 0 or large >= 2 * small

"""What should differ between ranks: their batches, and their losses only by chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...core.loop_findings import LoopFinding
from ...core.loss_keys import loss_among
from ...core.records import StepRecord
from ...step.ranks import is_dtensor

#: Losses of the last steps that are compared, and the fewest.
MOST, FEWEST = 100, 20
#: A loss is apart by this number of standard errors of the means, and of median deviations of the other ranks' means.
ERRORS, DEVIATIONS = 8.0, 10.0
#: Consecutive checks in which a rank must be apart.
REPEATS = 2


def has_own_batches(module: nn.Module, count: int) -> bool:
    """Whether each of ``count`` ranks has a batch of its own: under DDP or FSDP2 over all of them, and no tensor parallelism."""
    if isinstance(module, DistributedDataParallel):
        ranks: int = module.process_group.size()
        return ranks == count
    if not any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
        return False
    sharded: list[Any] = [parameter for parameter in module.parameters() if is_dtensor(parameter)]
    return bool(sharded) and all(
        each.device_mesh.size() == count and all(p.is_replicate() for p in each.placements[:-1]) for each in sharded
    )


def losses_of(records: Sequence[StepRecord]) -> list[float]:
    """The number of this rank's last losses, their mean and its standard error; empty if there are too few."""
    key = loss_among(records[-1].logged) if records else None
    found = [float(record.logged[key]) for record in records[-MOST:] if key in record.logged] if key is not None else []
    if len(found) < FEWEST or not all(map(math.isfinite, found)):
        return []
    return [len(found), fmean(found), stdev(found) / math.sqrt(len(found))]


class LocalValues:
    """Judges the values of all ranks, check by check, on the first rank."""

    def __init__(self) -> None:
        self._apart: dict[int, int] = {}

    def judge(self, step: int, messages: Mapping[int, Mapping[str, Any]]) -> list[LoopFinding]:
        """The findings of one check; ``messages`` by rank."""
        return [*_same_batches(step, messages), *self._one_apart(step, messages)]

    def _one_apart(self, step: int, messages: Mapping[int, Mapping[str, Any]]) -> list[LoopFinding]:
        known = {rank: message["loss"] for rank, message in messages.items()}
        apart = _apart(known) if len(known) > 2 and all(known.values()) else None
        self._apart = {} if apart is None else {apart: self._apart.get(apart, 0) + 1}
        if apart is None or self._apart[apart] < REPEATS:
            return []
        others = median(mean for rank, (_, mean, _) in known.items() if rank != apart)
        evidence = {
            "rank": float(apart),
            "mean of its loss": known[apart][1],
            "median of the others": others,
            "steps": known[apart][0],
        }
        return [LoopFinding("one-rank-apart", step, step, 1, ("loss",), {name: float(value) for name, value in evidence.items()})]


def _apart(known: Mapping[int, Sequence[float]]) -> int | None:
    """The rank whose mean is far from those of all others."""
    for rank, (_, mean, error) in known.items():
        others = [of for other, of in known.items() if other != rank]
        center = median(of[1] for of in others)
        spread = median(abs(of[1] - center) for of in others)
        errors = math.hypot(error, median(of[2] for of in others))
        if abs(mean - center) > max(ERRORS * errors, DEVIATIONS * spread) > 0:
            return rank
    return None


def _same_batches(step: int, messages: Mapping[int, Mapping[str, Any]]) -> list[LoopFinding]:
    now = {message["batch"] for message in messages.values()}
    before = {message["batch before"] for message in messages.values()}
    # a batch that never changes is no batch, or the whole data
    if len(now) == len(before) == 1 and None not in now | before and now != before:
        return [LoopFinding("same-batches-on-all-ranks", step, step, 1, (), {"ranks": float(len(messages))})]
    return []


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The dense tensors among the arguments of a model, and one level inside of lists and dicts."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (value,)
        found += [each for each in inside if isinstance(each, Tensor) and not is_dtensor(each) and not each.is_sparse]
    return found

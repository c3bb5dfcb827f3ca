"""Interleaved timing: other load on the machine affects all contenders alike."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Run = Callable[[], object]
#: Seconds of a call.
Clock = Callable[[Run], float]

#: A contender that takes more than this number of floors is measured in one round of three, as long as that leaves five.
SLOW = 20.0
SLOW_EVERY, SLOW_LEAST = 3, 5


@dataclass(frozen=True)
class Floor:
    """The lower bound: ``run`` takes ``1 / scale`` times as long."""

    run: Run
    scale: float = 1.0


@dataclass
class Samples:
    """The measurements, in seconds.

    Attributes:
        floors: every measurement of the floor.
        seconds: of each contender, by round.
        ratios: the same over the mean of the floors directly before and after it.
    """

    floors: list[float] = field(default_factory=list)
    seconds: dict[str, dict[int, float]] = field(default_factory=dict)
    ratios: dict[str, dict[int, float]] = field(default_factory=dict)


def clock_for(device: torch.device) -> Clock:
    """On a GPU a call lasts until the device has finished, launch included."""
    if device.type != "cuda":
        return _on_host
    return _on_gpu


def _on_host(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _on_gpu(run: Run) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def floor_for(tensors: Sequence[Tensor]) -> Floor:
    """On a CPU one ``torch.sum`` per tensor; on a GPU the bytes over the copy bandwidth, measured on 1 GiB."""
    if tensors[0].device.type != "cuda":
        return Floor(lambda: [tensor.sum() for tensor in tensors])
    size = 1 << 29
    source, target = (torch.ones(size, dtype=torch.uint8, device=tensors[0].device) for _ in range(2))
    # a copy reads and writes
    return Floor(lambda: target.copy_(source), scale=sum(t.nbytes for t in tensors) / (2 * size))


def interleave(
    floor: Floor, contenders: Mapping[str, Run], slow: frozenset[str], rounds: int, clock: Clock, seed: int = 0
) -> Samples:
    """In each round every contender once, in a new order, with the floor measured directly before and after it."""
    order = random.Random(seed)
    found = Samples(seconds={name: {} for name in contenders}, ratios={name: {} for name in contenders})
    collects = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds):
            gc.collect()
            names = [name for name in contenders if takes_part(number, rounds, name in slow)]
            order.shuffle(names)
            for name in names:
                before = clock(floor.run) * floor.scale
                seconds = clock(contenders[name])
                after = clock(floor.run) * floor.scale
                found.floors += [before, after]
                found.seconds[name][number] = seconds
                found.ratios[name][number] = seconds / ((before + after) / 2)
    finally:
        if collects:
            gc.enable()
    return found


def takes_part(number: int, rounds: int, slow: bool) -> bool:
    """Whether a contender is measured in this round."""
    return not slow or rounds < SLOW_EVERY * SLOW_LEAST or number % SLOW_EVERY == 0


def quotients(numerator: Mapping[int, float], denominator: Mapping[int, float]) -> list[float]:
    """Quotients within the rounds that both have."""
    return [numerator[number] / denominator[number] for number in sorted(numerator.keys() & denominator.keys())]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and number of values."""
    if len(values) < 2:
        low = middle = high = values[0]
    else:
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "quartile_1": low, "quartile_3": high, "count": len(values)}

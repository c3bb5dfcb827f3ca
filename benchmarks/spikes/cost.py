"""Cost of one update on the training thread."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable

from torch_gradmon import SpikeDetector

from ..timing import spread
from .contenders import Factory
from .scenarios import generate

#: Microseconds that a detector of one signal may take.
AIM = 10.0
#: A batch is long relative to a clock reading, and short relative to other load on the machine.
BATCH, BATCHES = 20, 300
LAYERS = 1000


def microseconds(update: Callable[[], object], batch: int = BATCH, batches: int = BATCHES) -> dict[str, float]:
    """Median and quartiles of one call, over ``batches`` of ``batch`` calls."""
    found = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(batch):
            update()
        found.append(1e6 * (time.perf_counter() - start) / batch)
    return spread(found)


def layerwise(layers: int) -> Callable[[], object]:
    """One update of a detector with the default rule for this number of layers, after 300 values of each."""
    generator, names = random.Random(0), [f"gradient/{layer}/norm" for layer in range(layers)]
    steps = [{name: generator.lognormvariate(0, 0.1) for name in names} for _ in range(20)]
    detector, turn = SpikeDetector(signal=re.compile("norm$")), itertools.cycle(steps)
    for step in range(300):
        detector.update_all(step, next(turn))
    return lambda: detector.update_all(300, next(turn))


#: By contender: makes a function that updates this number of signals at once, as a detector for every layer would.
VECTORISED: dict[str, Callable[[int], Callable[[], object]]] = {"default": layerwise}


def cost(make: Factory) -> dict[str, float]:
    """Cost for a detector after 1,200 values. The function around it, some 0.1 microseconds, is included."""
    values = generate("small", 0).values
    detector, step = make("gnorm"), 0
    for step, value in enumerate(values):
        detector.update(step, value)

    def update() -> None:
        nonlocal step
        step += 1
        detector.update(step, values[step % len(values)])

    return microseconds(update)


def vectorised_cost(name: str) -> dict[str, float] | None:
    """Cost of one update of 1,000 signals; None for contenders without such an update."""
    return microseconds(VECTORISED[name](LAYERS), batch=1) if name in VECTORISED else None

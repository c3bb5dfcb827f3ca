"""Whole training steps on a GPU, with and without ``watch``, in alternation: GPT-2 124M, 8,192 tokens, bf16 autocast."""

from __future__ import annotations

import copy
import gc
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_gradmon as gradmon

from .models import GPT, GPT2_124M, Sizes
from .timing import clock_for, quotients, spread
from .training import Side, batch_of

PRESETS = ("standard", "full")
#: The standard preset measures updates on one step of ten, so each block has one of these.
BLOCK = 10
SEQUENCES = 8
#: The blocks take about this number of seconds together, by the time of a first one; the least and the most of them.
SECONDS, LEAST, MOST = 60.0, 5, 30
_BARE = "without"


def train(
    device: torch.device, sizes: Sizes = GPT2_124M, block: int = BLOCK, seconds: float = SECONDS, least: int = LEAST
) -> dict[str, Any]:
    """Milliseconds of a step on each side, what a preset adds in percent, and how often the host waits in a step.

    A measurement is a block of steps with one wait for the device at its end: as in a training, the host runs ahead of the device.
    """
    torch.manual_seed(0)
    foreach = None if device.type == "cuda" else False
    models = [GPT(sizes)]
    models += [copy.deepcopy(models[0]) for _ in PRESETS]
    sides = {name: Side(model.to(device), foreach) for name, model in zip((_BARE, *PRESETS), models, strict=True)}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        monitors = [
            gradmon.watch(sides[preset].model, sides[preset].optimizer, preset=preset, run_dir=f"{folder}/{preset}")
            for preset in PRESETS
        ]
        times = _in_turns(sides, sizes, device, block, seconds, least)
        waits = {name: _waits_in_a_step(side, sizes, device, block) for name, side in sides.items()}
        for monitor in monitors:
            monitor.detach()
    of_bare = times[_BARE]
    return {
        "title": "GPT-2 124M, bf16 autocast" if device.type == "cuda" else "tiny, fp32",
        "parameters": sum(parameter.numel() for parameter in models[0].parameters()),
        "tokens": SEQUENCES * sizes.context,
        "block": block,
        "step_ms": {name: spread([1e3 * each for each in by_round.values()]) for name, by_round in times.items()},
        "added_pct": {
            preset: spread([100 * (quotient - 1) for quotient in quotients(times[preset], of_bare)]) for preset in PRESETS
        },
        "waits": waits,
    }


def _in_turns(
    sides: dict[str, Side], sizes: Sizes, device: torch.device, block: int, seconds: float, least: int
) -> dict[str, dict[int, float]]:
    """Seconds of a step of each side, by round. Each round has a block of each side, in an order that rotates."""
    clock, generator = clock_for(device), torch.Generator().manual_seed(1)
    times: dict[str, dict[int, float]] = {name: {} for name in sides}
    names, rounds, number = list(sides), least, -2  # in the first two nothing is kept
    while number < rounds:
        batches = [batch_of(sizes, SEQUENCES, generator, device) for _ in range(block)]
        gc.collect()
        of_round = {}
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            of_round[name] = clock(partial(_steps, sides[name], batches))
        if number == -1:
            rounds = max(least, min(MOST, int(seconds / sum(of_round.values()))))
        if number >= 0:
            for name, taken in of_round.items():
                times[name][number] = taken / block
        number += 1
    return times


def _steps(side: Side, batches: list[tuple[Tensor, Tensor]]) -> None:
    for batch in batches:
        side.step(*batch)


def _waits_in_a_step(side: Side, sizes: Sizes, device: torch.device, steps: int) -> dict[str, float]:
    """How often the host waits, for an operation or for an event, in the mean over some steps."""
    batch = batch_of(sizes, SEQUENCES, torch.Generator().manual_seed(2), device)
    functions = torch.get_device_module(device)
    operations = events = 0
    for _ in range(steps):
        functions.synchronize()
        with _waits_for_events(functions.Event) as of_events, _waiting_operations(device) as of_operations:
            side.step(*batch)
        operations, events = operations + of_operations(), events + len(of_events)
    return {"operations": operations / steps, "events": events / steps}


@contextmanager
def _waits_for_events(kind: Any) -> Iterator[list[object]]:
    """Collects the events that had not happened when the host synchronised with them."""
    found: list[object] = []
    synchronize = kind.synchronize

    def counting(event: Any) -> None:
        if not event.query():
            found.append(event)
        synchronize(event)

    kind.synchronize = counting
    try:
        yield found
    finally:
        kind.synchronize = synchronize


@contextmanager
def _waiting_operations(device: torch.device) -> Iterator[Callable[[], int]]:
    """Counts the operations that wait for the device, by torch's sync debug mode, or by what the simulated device counts."""
    if device.type != "cuda":
        with gradmon.testing.simulated_device().counted() as work:
            yield lambda: work.waits
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: sum("synchronizing CUDA operation" in str(each.message) for each in caught)
        finally:
            torch.cuda.set_sync_debug_mode("default")

"""Loops whose steps are captured into CUDA graphs, whole or in part: programs for :mod:`tests.device_programs`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torch_gradmon import GradmonWarning

from .device_loop import Loop, apart
from .places import Place


def _capturable_loop(place: Place, **options: Any) -> Loop:
    return Loop(place, lambda some: torch.optim.AdamW(some, 1e-2, capturable=True, foreach=place.foreach), **options)


def _warmed_up(loop: Loop) -> Tensor:
    """The memory of the captured input, after three steps with it."""
    static = loop.batches[0].clone()
    with loop.place.aside():
        for batch in loop.batches[:3]:
            static.copy_(batch)
            loop.backward(static)
            loop.update()
    return static


@contextmanager
def _captured(place: Place) -> Iterator[Any]:
    """A capture, of which the monitor warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradmonWarning)
        with place.captured() as graph:
            yield graph


def captured_query(place: Place) -> dict[str, Any]:
    """What must be caught: a question about an event within a capture."""
    event, x = place.functions.Event(), torch.ones(3, device=place.at)
    event.record()
    with place.captured():
        x.add_(1)
        event.query()
    return {}


def captured_step(place: Place) -> dict[str, Any]:
    """A whole step is captured into a graph. No hook runs when the graph is replayed, so nothing may be reported of the replays."""
    found: dict[bool, Loop] = {True: _capturable_loop(place, preset="standard"), False: _capturable_loop(place)}
    for loop in found.values():
        static = _warmed_up(loop)
        norms = list(loop.norms)
        with _captured(place) as graph:
            loop.backward(static)
            loop.update()
        for batch in loop.batches[3:6]:
            static.copy_(batch)
            graph.replay()
        del graph  # else the next capture would free it, which ends that capture
    values = found[True].values()
    return {
        "same_bits": all(map(torch.equal, *(loop.parameters() for loop in found.values()))),
        "worst": max(apart(values[step]["gradmon/grad_norm"], norm.item()) for step, norm in enumerate(norms)),
        "of_replays": sorted(step for step in values if step >= len(norms)),
    }


def captured_backward(place: Place) -> dict[str, Any]:
    """Forward and backward are captured, and the optimizer steps outside. What is reported of a replay is right, or absent."""
    loop = _capturable_loop(place, preset="standard")
    assert loop.monitor is not None
    loop.monitor.add_gradient_metric("norm")
    static = _warmed_up(loop)

    with _captured(place) as graph:
        loop.backward(static)
    used: list[dict[str, Tensor]] = []
    for batch in loop.batches[3:8]:
        static.copy_(batch)
        graph.replay()
        loop.update()
        used.append({name: p.grad.norm() for name, p in loop.model.named_parameters() if p.grad is not None})
    values = loop.values()
    found = [
        (reported[f"gradient/{name}/norm"], norm.item())
        for step, norms in enumerate(used, 3)
        for name, norm in norms.items()
        if f"gradient/{name}/norm" in (reported := values.get(step, {}))
    ]
    whole = [(values[step].get("gradmon/grad_norm"), loop.norms[step].item()) for step in values]
    return {
        "worst": max(apart(*pair) for pair in found),
        "values": len(found),
        "worst_of_whole": max(apart(value, norm) for value, norm in whole if value is not None),
    }


PROGRAMS = {each.__name__: each for each in (captured_query, captured_step, captured_backward)}

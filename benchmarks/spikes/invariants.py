"""Invariants that hold exactly for every rule. A check yields a sentence for each failure, and none if it passes."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from torch_gradmon.spikes import Verdict

from .contenders import Factory
from .scenarios import LEARNS, generate
from .traces import KINDS, Trace

#: A trace and the verdicts on it.
Judged = tuple[Trace, Sequence[bool]]
Check = Callable[[Factory, Sequence[Judged]], Iterator[str]]

FACTORS = (1e-6, 1e5)
SHIFTS, SHIFT_SEEDS, AFTER_SHIFT = (50, 150, 400), 3, 300
#: Signals with a state worth saving at each of these samples: decay, spikes, a run of them, and a change of level.
SIGNALS, SIGNAL_LENGTH = ("early", "burst", "steep_ramps", "level_shift", "constant_stretches", "loss_like"), 700
CUTS = (0, 1, 10, 63, 130, 300, 412, 550)


def flags(make: Factory, trace: Trace) -> list[bool]:
    """The verdicts of a fresh detector."""
    detector = make(trace.kind)
    return [detector.update(step, value).is_spike for step, value in enumerate(trace.values)]


def scale(make: Factory, judged: Sequence[Judged]) -> Iterator[str]:
    """The unit of the signal changes no verdict."""
    for trace, expected in judged:
        for factor in FACTORS:
            scaled = Trace(trace.name, trace.kind, tuple(value * factor for value in trace.values))
            changed = [step for step, (a, b) in enumerate(zip(expected, flags(make, scaled), strict=True)) if a != b]
            if changed:
                yield f"{trace.name} times {factor:g}: {len(changed)} verdicts change, the first at sample {changed[0]}"


def not_finite(make: Factory, judged: Sequence[Judged]) -> Iterator[str]:
    """One NaN or infinity is flagged and changes no later verdict."""
    for trace in _signals():
        for cut, bad in ((cut, bad) for cut in CUTS for bad in (math.nan, math.inf)):
            whole, without = make(trace.kind), make(trace.kind)
            steps = [(step + (step >= cut), value) for step, value in enumerate(trace.values)]
            expected = [without.update(*each) for each in steps]
            before = [whole.update(*each) for each in steps[:cut]]
            if not whole.update(cut, bad).is_spike:
                yield f"{trace.name}: {bad} at sample {cut} is not flagged"
            yield from _differences(
                expected, before + [whole.update(*each) for each in steps[cut:]], f"{trace.name}, {bad} at {cut}"
            )


def doubling(make: Factory, judged: Sequence[Judged]) -> Iterator[str]:
    """A level that doubles and stays is accepted within ten samples. Noise of at most 5 %, so nothing else should be flagged."""
    for kind, shift, seed in ((kind, shift, seed) for kind in KINDS for shift in SHIFTS for seed in range(SHIFT_SEEDS)):
        rng = random.Random(f"doubling {kind} {shift} {seed}")
        values = [math.exp(rng.uniform(-0.05, 0.05)) * (1 + (step >= shift)) for step in range(shift + AFTER_SHIFT)]
        found = flags(make, Trace("doubling", kind, tuple(values)))
        late = [step - shift for step in range(shift + LEARNS, len(found)) if found[step]]
        if late:
            yield f"{kind}, twice the level from sample {shift} on: {len(late)} flags after {LEARNS} samples, the last after {late[-1]}"


def saved_state(make: Factory, judged: Sequence[Judged]) -> Iterator[str]:
    """A detector that was saved and restored continues unchanged."""
    for trace in _signals():
        whole = make(trace.kind)
        expected = [whole.update(step, value) for step, value in enumerate(trace.values)]
        for cut in CUTS:
            first = make(trace.kind)
            before = [first.update(step, value) for step, value in enumerate(trace.values[:cut])]
            for way, through in (("JSON", _through_json), ("torch.save", _through_torch)):
                second = make(trace.kind)
                second.load_state_dict(through(first.state_dict()))
                after = [second.update(step, value) for step, value in enumerate(trace.values[cut:], cut)]
                yield from _differences(expected, before + after, f"{trace.name}, {way} at {cut}")


CHECKS: dict[str, Check] = {
    "times 1e-6 and 1e5": scale,
    "one NaN or Inf": not_finite,
    "doubling accepted": doubling,
    "saved and restored": saved_state,
}


def check(make: Factory, judged: Sequence[Judged]) -> dict[str, list[str]]:
    """The failures of every check. One that raises has failed."""
    return {name: _all(each, make, judged) for name, each in CHECKS.items()}


def _all(each: Check, make: Factory, judged: Sequence[Judged]) -> list[str]:
    found: list[str] = []
    try:
        found.extend(each(make, judged))
    except Exception as error:
        # a rule without the feature fails here, and the others are still evaluated
        found.append(f"{type(error).__name__}: {error}")
    return found


def _signals() -> Iterable[Trace]:
    for name in SIGNALS:
        trace = generate(name, 0)
        yield Trace(trace.name, trace.kind, trace.values[:SIGNAL_LENGTH])


def _differences(expected: Sequence[Verdict], found: Sequence[Verdict], where: str) -> Iterator[str]:
    changed = [step for step, (a, b) in enumerate(zip(expected, found, strict=True)) if not _same(a, b)]
    if changed:
        yield f"{where}: {len(changed)} verdicts change, the first at sample {changed[0]}"


def _same(a: Verdict, b: Verdict) -> bool:
    """Scores may differ by rounding only."""
    if a.is_spike != b.is_spike or (a.score is None) != (b.score is None):
        return False
    return a.score is None or b.score is None or math.isclose(a.score, b.score, rel_tol=1e-9, abs_tol=1e-9)


def _through_json(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(state))
    return found


def _through_torch(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found

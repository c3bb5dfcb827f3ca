"""Synthetic signals with known spikes, each reproducible from its name and a seed.

A signal is a level times log-normal noise; a spread of 0.1 is noise of 10 %. The rule for what is a spike is that of the traces'
labels: each of its samples lies at least eight standard deviations of the noise above the level, and at least half as high
again (a loss: 15 %). It holds for every scenario except the ramps, which start at the level and end far beyond it. Clean signals
have no sample beyond it, except where they change permanently: the ``LEARNS`` samples after that are grey. The level is drawn
between 0.01 and 10, since no rule may depend on the unit, unless the scenario is about the level.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from .traces import Kind, Trace

LENGTH = 1200
#: Spikes come after this sample, when every rule has seen enough, unless the scenario is about the beginning.
SETTLED = 250
#: Samples in which a lasting change may be flagged: before that it cannot be distinguished from a spike.
LEARNS = 10
#: Least height of a spike: in standard deviations of the noise, and relative to the level; the second is for a loss.
SPIKE_DEVIATIONS, SPIKE_FACTOR, LOSS_SPIKE_FACTOR = 8.0, 1.5, 1.15
#: Scale of Student's t with three degrees of freedom to a median absolute deviation times 1.4826 of 1.
_T3_ROBUST = 1.4826 * 0.7649

Levels = Sequence[float]


def _flat(rng: random.Random) -> list[float]:
    return [10 ** rng.uniform(-2, 1)] * LENGTH


def _noisy(rng: random.Random, levels: Levels, spread: float) -> list[float]:
    return [level * math.exp(rng.gauss(0, spread)) for level in levels]


def _clean(values: Sequence[float], changes: Sequence[int] = ()) -> Trace:
    grey = frozenset(index for change in changes for index in range(change, change + LEARNS))
    return Trace("", "gnorm", tuple(values), grey=grey)


def white(rng: random.Random) -> Trace:
    """Clean: noise of 10 % on one level."""
    return _clean(_noisy(rng, _flat(rng), 0.1))


def heavy_tailed(rng: random.Random) -> Trace:
    """Clean: Student's t with three degrees of freedom, scaled by 10 to 20 %, on one level.

    Samples beyond eight robust standard deviations are drawn again. Samples beyond five and half as high again are grey, since
    some people would call them spikes.
    """
    scale, spiky = rng.uniform(0.1, 0.2), []
    (level, *_) = _flat(rng)
    logs = []
    for index in range(LENGTH):
        log = math.inf
        while abs(log) > SPIKE_DEVIATIONS * scale * _T3_ROBUST:
            log = scale * rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.5, 2) / 3)
        logs.append(log)
        if log > max(5 * scale * _T3_ROBUST, math.log(SPIKE_FACTOR)):
            spiky.append(index)
    return replace(_clean([level * math.exp(log) for log in logs]), grey=frozenset(spiky))


def very_noisy(rng: random.Random) -> Trace:
    """Clean: noise of 30 % on one level."""
    return _clean(_noisy(rng, _flat(rng), 0.3))


def _decay(rng: random.Random) -> list[float]:
    time = rng.uniform(30, 60)
    return [0.3 + 14.7 * math.exp(-step / time) for step in range(LENGTH)]


def warmup_decay(rng: random.Random) -> Trace:
    """Clean: from 15 down to 0.3 with a time constant of 30 to 60 samples, noise of 10 %."""
    return _clean(_noisy(rng, _decay(rng), 0.1))


def _drift(rng: random.Random) -> list[float]:
    (level, *_), rise = _flat(rng), rng.choice((-1, 1)) * math.log(5) / LENGTH
    return [level * math.exp(rise * step) for step in range(LENGTH)]


def drift(rng: random.Random) -> Trace:
    """Clean: five times as high or as low at the end as at the start, at an even rate, noise of 10 %."""
    return _clean(_noisy(rng, _drift(rng), 0.1))


def periodic(rng: random.Random) -> Trace:
    """Clean: waves of 60 to 200 samples between 0.74 and 1.35 times the level, noise of 5 %."""
    turn, levels = 2 * math.pi / rng.uniform(60, 200), _flat(rng)
    return _clean(_noisy(rng, [level * math.exp(0.3 * math.sin(turn * step)) for step, level in enumerate(levels)], 0.05))


def level_shift(rng: random.Random) -> Trace:
    """Clean: at about a third of the way two to four times as high, at two thirds back, noise of 10 %."""
    levels, factor = _flat(rng), rng.uniform(2, 4)
    up, down = rng.randrange(350, 450), rng.randrange(750, 850)
    shifted = [level * (factor if up <= step < down else 1) for step, level in enumerate(levels)]
    return _clean(_noisy(rng, shifted, 0.1), changes=(up,))


def variance_shift(rng: random.Random) -> Trace:
    """Clean: noise of 5 %, from about the middle on of 15 %, on one level."""
    levels, change = _flat(rng), rng.randrange(500, 700)
    values = _noisy(rng, levels[:change], 0.05) + _noisy(rng, levels[change:], 0.15)
    return _clean(values, changes=(change,))


def _places(rng: random.Random, first: int, last: int, count: int, apart: int) -> Iterator[int]:
    """``count`` rising samples of ``first`` to ``last`` with at least ``apart`` between them."""
    slot = (last - first) // count
    return (first + number * slot + rng.randrange(slot - apart) for number in range(count))


def _spiked(
    rng: random.Random, levels: Levels, spread: float, low: float, high: float, places: Sequence[int] = (), kind: Kind = "gnorm"
) -> Trace:
    """Noise, and at each place one or two samples that are ``low`` to ``high`` times the level, without noise."""
    values, events = _noisy(rng, levels, spread), []
    for first in places or _places(rng, SETTLED, LENGTH, 8, 20):
        last = first + rng.choice((0, 0, 1))
        for index in range(first, last + 1):
            values[index] = levels[index] * math.exp(rng.uniform(math.log(low), math.log(high)))
        events.append((first, last))
    return Trace("", kind, tuple(values), tuple(events))


def small(rng: random.Random) -> Trace:
    """Spikes of two to three times the level, noise of 8 %."""
    return _spiked(rng, _flat(rng), 0.08, 2, 3)


def in_noise(rng: random.Random) -> Trace:
    """Spikes of 12 to 30 times the level, noise of 30 %."""
    return _spiked(rng, _flat(rng), 0.3, 12, 30)


def on_drift(rng: random.Random) -> Trace:
    """Spikes of three to ten times the level on the drift of the clean scenario, noise of 10 %."""
    return _spiked(rng, _drift(rng), 0.1, 3, 10)


def burst(rng: random.Random) -> Trace:
    """Twice one sample of 100 times the level, then five single ones of four times it, 8 to 30 samples apart; noise of 10 %."""
    levels = _flat(rng)
    values, events = _noisy(rng, levels, 0.1), []
    for place in _places(rng, SETTLED, LENGTH, 2, 200):
        for number in range(6):
            values[place] = levels[place] * (4 if number else 100)
            events.append((place, place))
            place += rng.randrange(8, 31)
    return Trace("", "gnorm", tuple(values), tuple(events))


def early(rng: random.Random) -> Trace:
    """Four spikes of four to ten times the level among samples 20 to 150 of the clean scenario's decay, noise of 10 %."""
    return _spiked(rng, _decay(rng), 0.1, 4, 10, list(_places(rng, 20, 150, 4, 15)))


def _ramps(rng: random.Random, slowest: float, fastest: float) -> Trace:
    values, events = _noisy(rng, _flat(rng), 0.05), []
    for first in _places(rng, SETTLED, LENGTH, 4, 60):
        growth, height, index = rng.uniform(slowest, fastest), 1.0, first
        while height < 3:
            height *= growth
            values[index] *= height
            index += 1
        events.append((first, index - 1))
    return Trace("", "gnorm", tuple(values), tuple(events))


def slow_ramps(rng: random.Random) -> Trace:
    """Four ramps that grow by 5 to 10 % a step up to three times the level (12 to 23 steps) and fall back at once; noise of 5 %."""
    return _ramps(rng, 1.05, 1.10)


def steep_ramps(rng: random.Random) -> Trace:
    """Four ramps that grow by 10 to 20 % a step up to three times the level (7 to 12 steps) and fall back at once; noise of 5 %."""
    return _ramps(rng, 1.10, 1.20)


def not_finite(rng: random.Random) -> Trace:
    """Six times one to three NaN or infinities, each with a spike of five times the level 8 to 40 samples later; noise of 10 %."""
    levels = _flat(rng)
    values, events = _noisy(rng, levels, 0.1), []
    for first in _places(rng, SETTLED, LENGTH, 6, 60):
        length, later = rng.randrange(1, 4), first + rng.randrange(8, 41)
        values[first : first + length] = [rng.choice((math.nan, math.inf)) for _ in range(length)]
        values[later] = 5 * levels[later]
        events += [(first, first + length - 1), (later, later)]
    return Trace("", "gnorm", tuple(values), tuple(events))


def quantised(rng: random.Random) -> Trace:
    """Two decimals of a level between 0.1 and 0.5, spikes of two to three times it, noise of 5 %."""
    trace = _spiked(rng, [rng.uniform(0.1, 0.5)] * LENGTH, 0.05, 2, 3)
    return replace(trace, values=tuple(round(value, 2) for value in trace.values))


def constant_stretches(rng: random.Random) -> Trace:
    """Noise of 5 % that stands exactly still six times, for 20 to 60 samples; spikes of three to ten times the level all over."""
    levels = _flat(rng)
    trace = _spiked(rng, levels, 0.05, 3, 10)
    values, spikes = list(trace.values), {index for first, last in trace.events for index in (first, last)}
    for first in _places(rng, 0, LENGTH, 6, 60):
        for index in range(first, first + rng.randrange(20, 61)):
            values[index] = values[index] if index in spikes else levels[index]
    return replace(trace, values=tuple(values))


def tiny(rng: random.Random) -> Trace:
    """A level of 3e-7, spikes of three to ten times it, noise of 10 %."""
    return _spiked(rng, [3e-7] * LENGTH, 0.1, 3, 10)


def loss_like(rng: random.Random) -> Trace:
    """A loss from 11 down to 3 with a time constant of 150 samples, spikes of 1.15 to 2 times it, noise of 1.5 %."""
    levels = [3 + 8 * math.exp(-step / 150) for step in range(LENGTH)]
    return _spiked(rng, levels, 0.015, LOSS_SPIKE_FACTOR, 2, kind="loss")


CLEAN = (white, heavy_tailed, very_noisy, warmup_decay, drift, periodic, level_shift, variance_shift)
RAMPS = (slow_ramps, steep_ramps)
SPIKED = (small, in_noise, on_drift, burst, early, *RAMPS, not_finite, quantised, constant_stretches, tiny, loss_like)
SCENARIOS: dict[str, Callable[[random.Random], Trace]] = {make.__name__: make for make in (*CLEAN, *SPIKED)}


def generate(name: str, seed: int) -> Trace:
    """The signal of a scenario, the same for the same name and seed."""
    return replace(SCENARIOS[name](random.Random(f"{name} {seed}")), name=f"{name} {seed}")

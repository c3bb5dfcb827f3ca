"""Signs of a divergence before the loss shows it."""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import keys as n
from ..core.keys import Key
from ..core.loop_mistakes import ABOUT_TO_DIVERGE, DIVERGENCE_ADVICE, LoopFinding
from ..core.moments import VIEWS, Column
from ..core.records import StepRecord
from ..step.plugin import Plugin

# --- Quantities that grow as they have not grown before ---


class Growth(NamedTuple):
    """The quantity that has left its past furthest behind.

    Attributes:
        name: of the tensor.
        now: its growth, as a logarithm.
        before: the largest one of its past, or 0 if it only shrank.
    """

    name: str
    now: float
    before: float

    @property
    def excess(self) -> float:
        """By how much it exceeds its past, as a logarithm."""
        return self.now - self.before


class _Window:
    """The last values of all tensors by step; begins anew when the tensors are others.

    Args:
        span: steps that are kept.
    """

    def __init__(self, span: int) -> None:
        self._span = span
        self._names: tuple[str, ...] = ()
        self.rows: deque[tuple[int, Tensor]] = deque()

    def add(self, step: int, names: Sequence[str], values: Tensor) -> None:
        """Values ``[tensors]`` of a step after the last one."""
        if tuple(names) != self._names or (self.rows and self.rows[-1][0] >= step):
            self._names = tuple(names)
            self.rows.clear()
        self.rows.append((step, values))
        while self.rows[0][0] < step - self._span:
            self.rows.popleft()

    def at(self, step: int) -> Tensor | None:
        """The values of the last step that is not later."""
        return next((values for at, values in reversed(self.rows) if at <= step), None)

    def between(self, first: int, last: int) -> list[Tensor]:
        """The values of these steps."""
        return [values for step, values in self.rows if first <= step <= last]


class AcceleratedGrowth:
    """Compares the growth over the last steps with the growth over as many steps before: in sound training it only becomes slower.
    What has rested for as long in its past, as a frozen weight does, is left out.

    Args:
        over: the steps of one growth.
        past: the steps before these that are looked at.
    """

    def __init__(self, over: int = 20, past: int = 120) -> None:
        self._over, self._past = over, past
        self._logs, self._rates = _Window(over + 1), _Window(over + past)

    def update(self, step: int, names: Sequence[str], logs: Tensor) -> Growth | None:
        """Take the logarithms ``[tensors]`` of a step. Returns None until the past is known; what is not finite is left out."""
        self._logs.add(step, names, logs)
        first = self._logs.at(step - self._over)
        if first is None:
            return None
        rate = logs - first
        self._rates.add(step, names, rate)
        past = self._rates.between(step - self._over - self._past, step - self._over)
        if not past:
            return None
        rates = torch.stack(past)
        rate = torch.where((rates == 0).any(dim=0), -torch.inf, rate)
        return _furthest(names, rate, rates.amax(dim=0).clamp(min=0))


class RecordHigh:
    """Compares the median of the last values with the highest one before.

    Args:
        values: number of values of a median.
        gap: steps from the last one that counts as past.
        past: the steps before these that are looked at.
    """

    def __init__(self, values: int = 5, gap: int = 20, past: int = 120) -> None:
        self._values, self._gap, self._past = values, gap, past
        self._logs, self._medians = _Window(gap + past), _Window(gap + past)

    def update(self, step: int, names: Sequence[str], logs: Tensor) -> Growth | None:
        """As of :class:`AcceleratedGrowth`, from the highest value of the past on."""
        self._logs.add(step, names, logs)
        last = [values for _, values in list(self._logs.rows)[-self._values :]]
        if len(last) < self._values:
            return None
        middle = torch.stack(last).median(dim=0).values
        self._medians.add(step, names, middle)
        past = self._medians.between(step - self._gap - self._past, step - self._gap)
        if not past:
            return None
        return _furthest(names, middle - torch.stack(past).amax(dim=0), torch.zeros_like(middle))


def _furthest(names: Sequence[str], now: Tensor, before: Tensor) -> Growth | None:
    if not len(now):
        return None
    excess = now - before
    place = int(excess.nan_to_num(-torch.inf, -torch.inf, -torch.inf).argmax())
    found = Growth(names[place], float(now[place]), float(before[place]))
    return found if torch.isfinite(excess[place]) else None


# --- When a growing number reaches a level, if its trend lasts ---


#: Fewest values, and the share of pairs of them that have to rise.
_FEWEST, _RISING = 5, 0.75


def steps_until(steps: Sequence[int], values: Sequence[float], level: float) -> float | None:
    """Steps from the last one until ``level``, by the median slope of all pairs of logarithms (Theil 1950, Sen 1968, JASA 63, 1379-1389).

    None where the values do not rise, as less than three quarters of the pairs do; 0 where the line has reached the level.
    """
    known = [(step, math.log(value)) for step, value in zip(steps, values, strict=True) if value > 0 and math.isfinite(value)]
    if len(known) < _FEWEST:
        return None
    slopes = [(b - a) / (there - here) for (here, a), (there, b) in combinations(known, 2)]
    slope = statistics.median(slopes)
    if slope <= 0 or sum(each > 0 for each in slopes) < _RISING * len(slopes):
        return None
    last = known[-1][0]
    now = statistics.median(value + slope * (last - step) for step, value in known)
    return max((math.log(level) - now) / slope, 0.0)


# --- The plugin that warns of a divergence before the loss shows it ---


#: Logarithms of the growth from which on it speaks: of a weight beyond what it grew before, and of the output. Chosen on the families of
#: ``benchmarks/foresight/families.py``, whose sound trainings reach 0.04 and 0.23.
WEIGHTS, OUTPUTS = math.log(1.05), math.log(1.35)
#: Steps of a training, and after the warm-up of its learning rate, in which weights have to grow.
_BEGIN, _AFTER_WARM_UP = 150, 100
#: Elements in a step that an output has at least; fewer are a loss, or noise.
_ELEMENTS = 64
#: Steps without a sign after which the next one is a new finding.
_OVER = 1000
#: The finding is written to the run directory with each tenth sign, and at the end.
_WRITTEN = 10
#: Logit of attention from which on its softmax has one winner: Kimi K2 clips there (2025, arXiv 2507.20534, section 2.1).
CRITICAL_LOGIT = 100.0
_HEADROOM, _LOGITS = Key(n.SUMMARY, "", "lr_over_critical"), n.ATTENTION_SOURCES["max_logit"]


class Foresight(Plugin):
    """Warns that a training is about to diverge while its loss is still normal, and names the layer that leads.

    Two signs, each over 20 steps against the 120 before: the growth of a weight's norm exceeds the largest one in these by five
    percentage points, while in sound training growth only becomes slower; or the root mean square of the model's output, the median of
    five measurements, is a third above its highest. Measured by ``make bench-foresight``: ten steps early in five of six divergences of
    the kinds that the thresholds were chosen on, and in one of four of other kinds; see ``docs/guide/foresight.md``. Silent in the first
    150 steps, after a resumption too, and until no learning rate has been higher than ever before for 100 steps.

    The warning becomes the finding ``about-to-diverge`` of :meth:`ModuleMonitor.diagnose`, and mentions what :class:`Headroom` has
    measured. It adds the norms of parameters and the root mean square of the output, on steps divisible by ``every``, which are monitored
    for it, and does not wait for the device.

    Args:
        every: measured on steps divisible by it, 10 at most.

    Attributes:
        signs: steps in which one was there, with the tensor that leads; the last thousand.

    Raises:
        ValueError: ``every`` is out of range.
    """

    name = "foresight"

    def __init__(self, every: int = 5) -> None:
        if not 1 <= every <= 10:
            raise ValueError(f"every has to be from 1 to 10, since growth is that over 20 steps; got {every!r}")
        self._every = every
        self._facts: list[LoopFinding] = []
        self.signs: deque[tuple[int, str]] = deque(maxlen=1000)
        self._forget()

    def _forget(self) -> None:
        """Know nothing of the past."""
        self._warm_up, self._first = _WarmUp(), -1
        self._weights = AcceleratedGrowth()
        self._outputs: dict[str, RecordHigh] = {}
        self._headroom: deque[tuple[int, float]] = deque(maxlen=8)
        self._logits: deque[tuple[int, float]] = deque(maxlen=8)

    def facts(self) -> list[LoopFinding]:
        """What was found so far: the last one."""
        return self._facts

    def wants(self, step: int, asked: bool) -> bool:
        """The steps that it measures in are monitored."""
        return asked or step % self._every == 0

    def on_attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Begin anew, and ask for what it needs."""
        self._forget()
        whole = re.compile(re.escape(n.ROOT))
        # two views of the same sum, since one that the script has for some tensors is not measured for the others
        weights = [self.context.make_metric(n.PARAMETER, name, self._every) for name in ("norm", "rms")]
        outputs = [replace(self.context.make_metric(n.ACTIVATION, name, self._every), pattern=whole) for name in ("rms", "norm")]
        self.context.set_overlay(self.name, [*weights, *outputs])
        self.context.request_replan()

    def on_rewind(self, step: int) -> None:
        """Forget what belongs to later steps."""
        self._forget()
        self._facts = [fact for fact in self._facts if fact.last < step]
        self._write()

    def state_dict(self) -> list[dict[str, Any]]:
        """What was found."""
        return [fact.to_dict() for fact in self._facts]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._facts = [LoopFinding.of_dict(fact) for fact in state]

    def on_record(self, record: StepRecord) -> None:
        """Look at the step."""
        if self._first < 0:
            self._first = record.step
        self._warm_up.update(record.step, record.context.get("lr") or [])
        if (value := record.values.get(_HEADROOM)) is not None:
            self._headroom.append((record.step, value))
        logits = [value for key, value in record.values.items() if key.source == _LOGITS and key.metric == "max"]
        if logits:
            self._logits.append((record.step, max(logits)))
        if record.step % self._every or not record.applied:
            return
        weights = self._grown_weight(record)
        outputs = self._grown_output(record)
        if record.step < self._first + _BEGIN or not self._warm_up.is_over:
            return
        if weights is not None and weights.excess > WEIGHTS:
            self._say(record.step, weights, "growth in 20 steps", "most in the 120 steps before")
        elif outputs is not None and outputs.excess > OUTPUTS:
            self._say(record.step, outputs, "growth over its highest in the 120 steps before")

    def _say(self, step: int, growth: Growth, now: str, before: str = "") -> None:
        self.signs.append((step, growth.name))
        if not self._facts or step - self._facts[0].last > _OVER:  # one of long ago was another one
            evidence = {
                now: math.expm1(growth.now),
                **({before: math.expm1(growth.before)} if before else {}),
                **self._forecast(),
            }
            self._facts = [LoopFinding(ABOUT_TO_DIVERGE, step, step, 0, (), evidence)]
            words = ", ".join(f"{name} {value:.3g}" for name, value in evidence.items())
            self.context.warn(
                "foresight", f"step {step}: a divergence may be near: {growth.name} leads ({words}). {DIVERGENCE_ADVICE}"
            )
        known = self._facts[0]
        where = tuple(dict.fromkeys((*known.where, growth.name)))
        self._facts = [replace(known, last=step, count=known.count + 1, where=where)]
        if known.count % _WRITTEN == 0:
            self._write()

    def _write(self) -> None:
        self.context.annotate_run(foresight=[fact.to_dict() for fact in self._facts])

    def on_leave(self, last: int | None) -> None:
        """Write what was found to the run directory."""
        if self._facts:
            self._write()

    def _forecast(self) -> dict[str, float]:
        """What the head-room and the logits of attention were, and when they reach the level at which trainings break."""
        found: dict[str, float] = {}
        for name, series, level in (
            ("learning rate over the critical one", self._headroom, 1.0),
            ("largest logit of attention", self._logits, CRITICAL_LOGIT),
        ):
            if series:
                found[f"{name} in step {series[-1][0]}"] = series[-1][1]
                if (left := steps_until([step for step, _ in series], [value for _, value in series], level)) is not None:
                    found[f"steps from there to {level:g} by its trend"] = left
        return found

    def _grown_weight(self, record: StepRecord) -> Growth | None:
        table = record.tables.get(n.PARAMETER)
        if table is None or not table.has("norm"):
            return None
        matrices = self.context.matrices
        places = [place for place, name in enumerate(table.names) if name in matrices]
        logs = VIEWS["norm"].compute(table.rows[places]).log()
        return self._weights.update(record.step, [table.names[place] for place in places], logs)

    def _grown_output(self, record: StepRecord) -> Growth | None:
        """The output that has grown most; each has a past of its own, since some come in some steps only."""
        table = record.tables.get(n.ACTIVATION)
        if table is None or not table.has("rms"):
            return None
        counts, logs = table.rows[:, Column.COUNT].tolist(), VIEWS["rms"].compute(table.rows).log()
        found = [
            self._outputs.setdefault(name, RecordHigh()).update(record.step, (name,), logs[place : place + 1])
            for place, name in enumerate(table.names)
            if n.ROOT in name and counts[place] >= _ELEMENTS and not name.endswith(".loss")
        ]
        return max((growth for growth in found if growth is not None), key=lambda growth: growth.excess, default=None)


class _WarmUp:
    """Finds the end of the warm-up: for :data:`_AFTER_WARM_UP` steps no learning rate has been higher than ever before.

    Attributes:
        is_over: whether it has ended.
    """

    def __init__(self) -> None:
        self.is_over, self._risen = False, 0
        self._highest: list[float] = []

    def update(self, step: int, rates: Sequence[float]) -> None:
        """Take the rates of all groups."""
        if self.is_over:
            return
        if len(rates) != len(self._highest) or any(rate > most for rate, most in zip(rates, self._highest, strict=True)):
            same = self._highest if len(rates) == len(self._highest) else rates
            self._highest, self._risen = [max(pair) for pair in zip(rates, same, strict=True)], step
        self.is_over = step - self._risen >= _AFTER_WARM_UP

"""Signs of a divergence before the loss shows it: a plugin to copy beside your script.

It asks for metrics of its own on some steps, reads them from the records, warns once, and leaves a finding that ``monitor.diagnose()`` and
``gradmon diagnose`` show. docs/guide/foresight.md says how early it is, and how often in vain.
"""

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

from torch_gradmon.plugins import Key, Plugin, StepRecord


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


#: Logarithms of the growth from which on it speaks: of a weight beyond what it grew before, and of the output. Chosen on the families of
#: ``benchmarks/foresight/families.py``, whose sound trainings reach 0.04 and 0.23.
WEIGHTS, OUTPUTS = math.log(1.05), math.log(1.35)
#: Steps of a training, and after the warm-up of its learning rate, in which weights have to grow.
_BEGIN, _AFTER_WARM_UP = 150, 100
#: Elements in a step that an output has at least; fewer are a loss, or noise.
_ELEMENTS = 64
#: Steps without a sign after which the next one is a new finding.
_OVER = 1000
#: Logit of attention from which on its softmax has one winner: Kimi K2 clips there (2025, arXiv 2507.20534, section 2.1).
CRITICAL_LOGIT = 100.0
_HEADROOM, _LOGITS = Key("gradmon", "", "lr_over_critical"), "attention_max_logit"
#: The module that the monitor watches, as in keys.
_ROOT = "[root module]"
#: Columns of the rows of ``record.tables``: the number of elements of a tensor, and the sum of their squares.
_COUNT, _SQUARE_SUM = 0, 3
_ADVICE = "Lower the learning rate by half, clip gradients to their usual norm, or look at what has changed in the data"


class Foresight(Plugin):
    """Warns that a training is about to diverge while its loss is still normal, and names the layer that leads.

    Two signs, each over 20 steps against the 120 before: the growth of a weight's norm exceeds the largest one in these by five
    percentage points, while in sound training growth only becomes slower; or the root mean square of the model's output, the median of
    five measurements, is a third above its highest. Measured by ``make bench-foresight``: ten steps early in five of six divergences of
    the kinds that the thresholds were chosen on, and in one of four of other kinds; see ``docs/guide/foresight.md``. Silent in the first
    150 steps, after a resumption too, and until no learning rate has been higher than ever before for 100 steps.

    The warning becomes the finding ``about-to-diverge`` of ``monitor.diagnose()``, and mentions what the plugin of ``headroom.py`` has
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
        self._finding: dict[str, Any] | None = None
        self.signs: deque[tuple[int, str]] = deque(maxlen=1000)
        self._forget()

    def _forget(self) -> None:
        """Know nothing of the past."""
        self._warm_up, self._first = _WarmUp(), -1
        self._weights = AcceleratedGrowth()
        self._outputs: dict[str, RecordHigh] = {}
        self._headroom: deque[tuple[int, float]] = deque(maxlen=8)
        self._logits: deque[tuple[int, float]] = deque(maxlen=8)

    def wants(self, step: int, asked: bool, ahead: int | None = 0) -> bool:
        """The steps that it measures in are monitored."""
        return asked or step % self._every == 0

    def on_attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Begin anew, and ask for what it needs."""
        self._forget()
        whole = re.compile(re.escape(_ROOT))
        # two views of the same sum, since one that the script has for some tensors is not measured for the others
        weights = [self.context.make_metric("parameter", name, self._every) for name in ("norm", "rms")]
        outputs = [replace(self.context.make_metric("activation", name, self._every), pattern=whole) for name in ("rms", "norm")]
        self.context.set_overlay(self.name, [*weights, *outputs])
        self.context.request_replan()

    def on_rewind(self, step: int) -> None:
        """Forget what belongs to later steps."""
        self._forget()
        self._note(self._finding if self._finding is not None and self._finding["last"] < step else None)

    def state_dict(self) -> dict[str, Any] | None:
        """What was found."""
        return self._finding

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """The inverse of :meth:`state_dict`."""
        self._note(state)

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
        known = self._finding
        if known is None or step - known["last"] > _OVER:  # one of long ago was another one
            evidence = {
                now: math.expm1(growth.now),
                **({before: math.expm1(growth.before)} if before else {}),
                **self._forecast(),
            }
            known = {"rule": "about-to-diverge", "first": step, "count": 0, "where": [], "evidence": evidence}
            words = ", ".join(f"{name} {value:.3g}" for name, value in evidence.items())
            self.context.warn("foresight", f"step {step}: a divergence may be near: {growth.name} leads ({words}). {_ADVICE}")
        where = list(dict.fromkeys((*known["where"], growth.name)))
        self._note({**known, "last": step, "count": known["count"] + 1, "where": where})

    def _note(self, finding: dict[str, Any] | None) -> None:
        """Keep the finding, also among the facts about the run, where the diagnosis looks for it."""
        self._finding = finding
        self.context.annotate_run(foresight=[] if finding is None else [finding])

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
        table = record.tables.get("parameter")
        if table is None or not table.has("norm"):
            return None
        matrices = self.context.matrices
        places = [place for place, name in enumerate(table.names) if name in matrices]
        logs = table.rows[places, _SQUARE_SUM].sqrt().log()
        return self._weights.update(record.step, [table.names[place] for place in places], logs)

    def _grown_output(self, record: StepRecord) -> Growth | None:
        """The output that has grown most; each has a past of its own, since some come in some steps only."""
        table = record.tables.get("activation")
        if table is None or not table.has("rms"):
            return None
        counts = table.rows[:, _COUNT]
        logs = (table.rows[:, _SQUARE_SUM] / counts).sqrt().log()
        found = [
            self._outputs.setdefault(name, RecordHigh()).update(record.step, (name,), logs[place : place + 1])
            for place, name in enumerate(table.names)
            if _ROOT in name and counts[place] >= _ELEMENTS and not name.endswith(".loss")
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

"""The plugin that warns of a divergence before the loss shows it."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...core import keys as n
from ...core.keys import Key
from ...core.loop_mistakes import ABOUT_TO_DIVERGE, DIVERGENCE_ADVICE, LoopFinding
from ...core.moments import VIEWS, Column
from ...core.records import StepRecord
from ...step.plugin import Plugin
from .growth import AcceleratedGrowth, Growth, RecordHigh
from .trend import steps_until

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

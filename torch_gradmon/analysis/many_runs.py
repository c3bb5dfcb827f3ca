"""Several runs beside each other: one row for each."""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, Literal

from ..core import keys as n
from ..core.formatting import placed, printable, significant, strict
from ..core.keys import Key, parse_key
from ..core.records import is_loss_of_network, loss_among
from ..runs.liveness import PAUSES, RunStatus
from ..runs.reader import RunReader
from ..spikes.signals import Episode, episodes, largest
from .diagnosis.findings import Diagnosis
from .diagnosis.history import loop_findings
from .diagnosis.series import Series
from .run import read_run, settings_of

# --- A run in one row of a table: whether it is alive, its loss, spikes, findings, settings and cost ---

State = Literal["running", "silent", "ended", "empty", "unknown"]
#: Share of the last losses, and of the last steps' cost, that stands for now.
_NOW = 0.05
_NAMES = 30
#: A run has no more settings in its row.
_SETTINGS = 50
#: What follows the name of a layer, or of several, in the words of a spike.
_SIZES = re.compile(r" \(|, ")


class RunCard:
    """A run, read in about ten milliseconds; raises as :func:`load_run`. ``metrics``: keys of logged or whole-model values."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        diagnosis: Diagnosis | None = None,
        points: int = 120,
        metrics: Sequence[str] = (),
    ) -> None:
        self.name = printable(os.fspath(path) if name is None else name)
        with closing(read_run(path)) as run:
            self._take_state(run.status)
            self._take_losses(run, points)
            spikes = episodes(run.events, run.steps)
            self.spikes = len(spikes)
            # where: the layer that moved most, or what the layers did together; empty if it is unknown
            self.worst_spike, self.spike_step, self.spike_where = _described(largest(spikes, 1))
            self.last_spike, self.last_spike_step, self.last_spike_where = _described(spikes[-1:])
            steps, meta, scalars = run.steps, run.meta, run.scalars
            times = [float(run.context(step)["time"]) for step in (steps[:1] + steps[-1:])]
            self.steps = len(steps)
            self.began = times[0] if times else None  # when the first step ended, in seconds since the epoch
            self.seconds = times[-1] - times[0] if times else 0.0
            self.not_applied = int(max(_series(run, _whole("steps_not_applied")).values, default=0.0))
            # the learning rate over the critical one, the last that was measured
            self.headroom = next(reversed(_series(run, _whole("lr_over_critical")).values), None)
            # the median share of the time that monitoring took lately
            overhead = _series(run, _whole("overhead_fraction")).finite.part(0.5, 1)
            self.cost = overhead.median if len(overhead) else None
            # severity, rule and place, ranked, if the run was diagnosed; else what was found while it trained, without a severity
            self.findings = [("", fact.rule, next(iter(fact.where), "")) for fact in loop_findings(meta)]
            if diagnosis is not None:
                self.findings = [(finding.severity, finding.rule, finding.where) for finding in diagnosis.findings]
            self.is_diagnosed = diagnosis is not None
            self.settings = dict(islice(settings_of(meta).items(), _SETTINGS))
            # the last value of each of the metrics that were asked for, if the run has it
            self.metrics = {metric: values[-1] for metric in metrics if (values := _metric(run, metric).values)}
            self.logged = [key.name for key in scalars if not key.source][:_NAMES]

    def _take_state(self, status: RunStatus) -> None:
        # silent if its process is gone, or its last step is older than five usual intervals and a minute; ended if its monitor was
        # detached; empty without a step; unknown if there is only one, which shows no interval
        alive: dict[bool | None, State] = {True: "running", False: "silent", None: "unknown"}
        self.state: State = alive[status.looks_alive]
        if status.has_ended:
            self.state = "ended"
        elif status.step is None:
            self.state = "silent" if status.is_gone else "empty"
        self.raised = str(status.meta.get("raised") or "") if status.has_ended else ""
        # steps that could not be written, as on a full disk; of a run that has not ended 1 or more if the last steps are lost
        self.unwritten = int(status.meta.get("unwritten", 0)) if status.has_ended or status.lost else 0
        # the state as a sentence
        self.status = "no step was recorded: the run has ended" if status.step is None and status.has_ended else str(status)
        self.status += f", with {self.raised}" * bool(self.raised)
        if self.unwritten and status.has_ended:
            steps = f"{self.unwritten} step{'s' * (self.unwritten != 1)}"
            self.status += f"; {steps} could not be written, and what is said is about the others"
        self.step, self.age = status.step, status.age  # seconds since the last step
        # usual seconds between two steps, None if unknown; and the second-longest time between two, see RunStatus
        self.usual, self.pause = status.usual, status.pause

    def _take_losses(self, run: RunReader, points: int) -> None:
        key = loss_among(run.scalars)
        loss = _series(run, key)
        self.loss_key = "" if key is None else key.name
        # the median of the last twentieth; None if none was logged, NaN or infinite if the last one is
        self.loss: float | None = None
        if len(loss):
            self.loss = loss.finite.part(1 - _NOW, 1).median if math.isfinite(loss.values[-1]) else loss.values[-1]
        self.first_loss = loss.values[0] if len(loss) else None
        # step and loss for a small chart: evenly chosen ones with both ends; NaN and infinities are kept where they are
        places = sorted({*range(0, len(loss), max(1, math.ceil(len(loss) / points))), *range(len(loss))[-1:]})
        self.losses = [(loss.steps[place], float(f"{loss.values[place]:.4g}")) for place in places]

    @property
    def is_of_network(self) -> bool:
        """Whether the loss is that of one network of several, such as ``loss_d``: it is low where the others lose, and ranks no runs."""
        return is_loss_of_network(Key("", self.loss_key, ""))

    @property
    def has_stalled(self) -> bool:
        longest = _LONELY if self.usual is None else max(_TIMES * self.usual, _LEAST, PAUSES * self.pause)
        return self.state not in ("ended", "empty") and self.age > longest

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = strict(vars(self))
        return found


def differing(cards: Sequence[RunCard]) -> list[str]:
    """The settings that are not the same in all runs, those with most values first, which tell the runs apart."""
    names = dict.fromkeys(name for card in cards for name in card.settings)
    values = {name: len({card.settings.get(name) for card in cards}) for name in names}
    return sorted((name for name in names if values[name] > 1), key=lambda name: -values[name])


def _described(spikes: Sequence[Episode]) -> tuple[str, int | None, str]:
    """The first of ``spikes`` as a sentence, its step and its place."""
    return next(((str(spike), spike.worst.step, _SIZES.split(spike.worst.where)[0]) for spike in spikes), ("", None, ""))


def _whole(metric: str) -> Key:
    return Key(n.SUMMARY, "", metric)


def _series(run: RunReader, key: Key | None) -> Series:
    return Series() if key is None else Series.of(run.stored(key).items())


def _metric(run: RunReader, name: str) -> Series:
    logged = _series(run, Key("", name, ""))  # whose name may look like a key
    return logged if len(logged) else _series(run, parse_key(name))


# --- How a run is, and what to do next ---

#: States in which nothing is wrong with the process.
_FINE = ("running", "ended", "unknown")
_NUMBERS = ("step", "steps", "age", "seconds", "loss", "first_loss", "spikes", "not_applied", "headroom", "cost")
#: A run has stalled after this number of usual intervals, and of seconds, and after :data:`.liveness.PAUSES` of the pauses that it makes;
#: and after these seconds if it has one step only.
_TIMES, _LEAST, _LONELY = 10.0, 60.0, 600.0
_WIDTH, _INDENT, _MOST = 100, 10, 3


def next_action(card: RunCard, diagnosis: Diagnosis) -> str:
    if card.unwritten and card.state != "ended":
        return "Make room on the disk of the run directory: no step is recorded before."
    if card.state == "silent" or card.has_stalled:
        return "Look at the process: no step comes any more, and its monitor was not detached."
    if card.state == "empty":
        return "Wait for the first step."
    first = next(iter(diagnosis.findings), None)
    if first is not None and first.severity != "info":
        return first.advice
    if card.raised:
        name = card.raised.partition(":")[0]
        return f"Look at the traceback of {name}, unless it was raised to end the run, as for a trial that is pruned."
    rest = "Let it train." if card.state != "ended" else "Nothing."
    if first is None:
        return rest
    told = f"Of interest, {placed(first.rule, first.where)}: {first.advice}"
    return told if card.state == "ended" else f"{rest} {told}"


def status_dict(card: RunCard, diagnosis: Diagnosis) -> dict[str, Any]:
    """For JSON; ``next`` has the action, and the finding that it is for, if any, with the command that shows more of it."""
    first, rest = next(iter(diagnosis.findings), None), card.to_dict()
    is_recorded = card.state == "ended" or not card.unwritten
    is_fine = card.state in _FINE and is_recorded and not card.raised and not card.has_stalled
    command = f"diagnose {card.name}" if card.spike_step is None else f"why {card.name} --step {card.spike_step}"
    worst = {"step": card.spike_step, "where": card.spike_where, "text": card.worst_spike}
    return {
        "run": card.name,
        "state": card.state,
        "status": card.status,
        "raised": card.raised,
        "unwritten": card.unwritten,
        "healthy": is_fine and diagnosis.healthy,
        **{name: rest[name] for name in _NUMBERS},
        "loss_key": card.loss_key,
        "worst_spike": worst if card.spikes else None,
        "findings": [finding.to_dict() for finding in diagnosis.findings],
        "next": {
            "action": next_action(card, diagnosis),
            "rule": None if first is None else first.rule,
            "where": None if first is None else first.where,
            "command": f"gradmon {command}",
        },
        "settings": dict(card.settings),
    }


def status_text(card: RunCard, diagnosis: Diagnosis) -> Iterator[str]:
    yield f"{card.name}: {card.status}"
    lines: list[tuple[str, str]] = []
    if card.loss is not None:
        what = " (median of the last twentieth of the steps)" if math.isfinite(card.loss) else ""
        of_one = ""
        if card.is_of_network:
            of_one = f"; {card.loss_key} is that of one network, and low where the others lose"
        elif card.loss_key != "loss":
            what = f" of {card.loss_key}{what}"
        lines.append(("loss", f"{significant(card.loss)}{what}, at first {significant(card.first_loss)}{of_one}"))
    if card.headroom is not None:
        lines.append(("head-room", f"{card.headroom:.0%} of the critical learning rate is used"))
    if card.spikes:
        lines.append(("spikes", f"{card.spikes}, the largest: {card.worst_spike}"))
    lines += [(each.severity, f"{placed(each.rule, each.where)}: {each.cause}") for each in diagnosis.findings[:_MOST]]
    if (rest := len(diagnosis.findings) - _MOST) > 0:
        lines.append(("", f"and {rest} more: gradmon diagnose {card.name}"))
    lines.append(("next", next_action(card, diagnosis)))
    for title, text in lines:
        yield from textwrap.wrap(f"{title:<{_INDENT}}{text}", _WIDTH, subsequent_indent=" " * _INDENT, break_on_hyphens=False)

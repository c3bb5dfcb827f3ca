"""Scores of a detector's flags on a trace with known spikes.

*Hit*: any flag from an event's first sample to two samples after its last. *Alarm*: flags no more than five samples apart. An alarm
that touches such a window is true; one that touches none and touches grey is not counted; all others are false. A rule that never
stops flagging has few alarms and hits everything, so *falsely flagged steps* and the *longest run* of flags are listed beside them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .traces import Trace, groups

#: Samples after an event in which a flag still hits it.
AFTER = 2
#: The first samples of a run, whose false alarms are counted apart: the rule has seen few values.
WARMUP = 200
#: Rates are per this number of clean samples.
PER = 10_000


@dataclass(frozen=True)
class Counts:
    """The counts on one trace; they add up over traces.

    Attributes:
        events: spikes that are there.
        hits: of these, the ones that were flagged.
        true_alarms: that touch an event.
        false_alarms: in clean samples after the warm-up, by their first flag.
        warmup_alarms: false ones that begin in the warm-up.
        clean: samples after the warm-up that are neither near an event nor grey.
        false_steps: of these, the flagged ones.
        longest_run: flags in a row, anywhere.
        delays: samples from the start of each event that was hit to its first flag.
    """

    events: int = 0
    hits: int = 0
    true_alarms: int = 0
    false_alarms: int = 0
    warmup_alarms: int = 0
    clean: int = 0
    false_steps: int = 0
    longest_run: int = 0
    delays: tuple[int, ...] = ()

    def __add__(self, other: Counts) -> Counts:
        """Everything adds up, except that a run ends with its trace."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in asdict(self) if name != "longest_run"}
        return Counts(**sums, longest_run=max(self.longest_run, other.longest_run))

    @property
    def recall(self) -> float | None:
        """Share of the events that were hit; None without events."""
        return self.hits / self.events if self.events else None

    @property
    def precision(self) -> float | None:
        """Share of the counted alarms that are true, those of the warm-up too; None without alarms."""
        alarms = self.true_alarms + self.false_alarms + self.warmup_alarms
        return self.true_alarms / alarms if alarms else None

    @property
    def errors(self) -> int:
        """Events missed and steps falsely flagged; steps, since a rule that never stops has only one alarm."""
        return self.events - self.hits + self.false_steps

    def per_clean(self, count: int) -> float:
        """``count`` for 10,000 clean samples."""
        return PER * count / self.clean if self.clean else 0.0

    def as_json(self) -> dict[str, Any]:
        """The counts, and the rates that follow from them; of the delays median and most, None without hits."""
        return {
            **{name: count for name, count in asdict(self).items() if name != "delays"},
            "delay": {"median": statistics.median(self.delays), "most": max(self.delays)} if self.delays else None,
            "recall": self.recall,
            "precision": self.precision,
            "false_alarms_per_10000": self.per_clean(self.false_alarms),
            "false_steps_per_10000": self.per_clean(self.false_steps),
        }


def score(trace: Trace, flags: Sequence[bool], warmup: int = WARMUP) -> Counts:
    """Count hits and alarms.

    Args:
        trace: what was judged.
        flags: one verdict for each of its values.
        warmup: how many first samples are counted apart; 0 if the beginning matters.

    Raises:
        ValueError: there are not as many flags as values.
    """
    if len(flags) != len(trace.values):
        raise ValueError(f"{trace.name} has {len(trace.values)} values and {len(flags)} flags")
    windows = [range(first, min(last + AFTER + 1, len(flags))) for first, last in trace.events]
    near = {index for window in windows for index in window}
    delays = [next((index - window[0] for index in window if flags[index]), None) for window in windows]
    alarms = groups(index for index, flag in enumerate(flags) if flag)
    true = [alarm for alarm in alarms if not near.isdisjoint(alarm)]
    false = [alarm for alarm in alarms if near.isdisjoint(alarm) and trace.grey.isdisjoint(alarm)]
    early = sum(alarm[0] < warmup for alarm in false)
    clean = [index for index in range(warmup, len(flags)) if index not in near and index not in trace.grey]
    return Counts(
        events=len(windows),
        hits=sum(delay is not None for delay in delays),
        true_alarms=len(true),
        false_alarms=len(false) - early,
        warmup_alarms=early,
        clean=len(clean),
        false_steps=sum(bool(flags[index]) for index in clean),
        longest_run=_longest_run(flags),
        delays=tuple(delay for delay in delays if delay is not None),
    )


def worst(counts: Mapping[str, Counts]) -> tuple[str, Counts] | None:
    """The trace with most errors, the first of several; None without errors."""
    name = max(counts, key=lambda each: counts[each].errors, default=None)
    return None if name is None or not counts[name].errors else (name, counts[name])


def _longest_run(flags: Sequence[bool]) -> int:
    longest = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        longest = max(longest, run)
    return longest

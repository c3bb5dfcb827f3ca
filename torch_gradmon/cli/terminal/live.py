"""The last steps of an active run, read incrementally, and values over them on one line of characters. Needs no rich."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ...analysis.diagnosis.series import Matrix, Series, lower_median
from ...analysis.run import read_run
from ...core.keys import SUMMARY, Key
from ...core.records import SpikeEvent, StatsTable, StepRecord, loss_among
from ...runs.format import identity
from ...runs.reader import RunReader
from ...spikes.attribution import Baseline, ParameterAttribution, ranked
from ...spikes.hampel import REMEMBERED
from ...spikes.signals import Episode, episodes, largest
from .layer_table import gradient_source

#: The part of the shown steps that counts as recent, as a divisor.
_RECENT_PART = 6
#: Steps from which the speed is computed.
_PACE = 50


@dataclass(frozen=True)
class TopLayer:
    name: str
    series: Series  # the norms of its gradient, before clipping if they are known
    usual: float | None  # its usual norm in the last step; None if too few steps are known
    share: float  # of the squared norm of the whole gradient, mean over the recent steps


class LiveRun:
    """The last ``window`` steps of a run that may go on."""

    def __init__(self, run: RunReader, window: int) -> None:
        self.run, self._window, self._recent = run, window, max(window // _RECENT_PART, 1)
        self.records: list[StepRecord] = []  # without statistics, with the values of the whole model and the loss
        self.events: list[SpikeEvent] = run.events  # of the whole run
        self._tables: dict[int, StatsTable | None] = {}  # the gradients of each step that was looked at
        self._read(math.inf)

    def refresh(self) -> None:
        """Read what is new, if anything. Raises OSError."""
        since = self.run.refresh()
        if since is not None:
            self.events = [event for event in self.events if event.step < since]
            self._read(since)

    def _read(self, since: float) -> None:
        """Read what is missing, and everything from ``since`` on, in place of what was known of these steps."""
        steps = self.run.steps
        shown = steps[-self._window :]
        known = {record.step: record for record in self.records if record.step < since}
        # steps that had left the window are back in it where the run was rewound
        if (start := min([*(step for step in shown if step not in known), since])) < math.inf:
            for record in self.run.records(int(start), lambda key: key.source == SUMMARY or loss_among([key]) is not None):
                known[record.step] = record
                self.events += record.events if record.step >= since else ()
        self.records = [known[step] for step in shown]
        wanted = steps[-self._window - REMEMBERED :]  # earlier steps show what is usual in the first steps of the window
        tables = {step: self._tables[step] for step in wanted if step in self._tables and step < since}
        new = [step for step in wanted if step not in tables]
        source = gradient_source(self.run)
        self._tables = dict(sorted({**dict.fromkeys(new), **tables}.items()))
        for stack in () if source is None or not new else self.run.stacks(source, new[0]):
            for step, rows in zip(stack.steps, stack.rows, strict=True):
                self._tables[step] = StatsTable(stack.names, rows, stack.columns)
        found = [(step, table) for step, table in self._tables.items() if table is not None]
        norms, nonfinite = (Matrix.of_tables(found, metric) for metric in ("norm", "nonfinite_count"))
        known_names = set(norms.names)  # without those that hardly any step has, if there are too many
        names = [name for name in found[-1][1].names if name in known_names] if found else []
        self._norms, self._nonfinite = norms.of(norms.steps, names), nonfinite.of(norms.steps, names).values.nan_to_num(0.0)

    # --- the whole model -------------------------------------------------------------------------------------------------------

    @property
    def last(self) -> StepRecord | None:
        return self.records[-1] if self.records else None

    @property
    def steps(self) -> list[int]:
        return [record.step for record in self.records]

    @property
    def loss(self) -> Key | None:
        return loss_among({key for record in self.records for key in record.values})

    def series(self, key: Key) -> Series:
        return Series.of((record.step, record.values[key]) for record in self.records if key in record.values)

    @property
    def pace(self) -> float | None:
        """Median seconds per step of the last steps, so that an interruption does not count; None if too few are known."""
        pairs = pairwise(self.records[-_PACE:])
        median = lower_median((after.time - before.time) / (after.step - before.step) for before, after in pairs)
        return median if median > 0 else None

    def fact(self, name: str) -> float | None:
        """The median of a number in the context of the shown steps, such as ``overhead_fraction``; None without any."""
        found = [record.context[name] for record in self.records if isinstance(record.context.get(name), (int, float))]
        return lower_median(found) if found else None

    def total(self, name: str) -> int:
        """The last value of a counter of the whole run, such as ``steps_not_applied``; 0 if it is unknown."""
        values = self.series(Key(SUMMARY, "", name)).values
        return int(values[-1]) if values and math.isfinite(values[-1]) else 0

    @property
    def not_applied(self) -> list[int]:
        return [record.step for record in self.records if not record.applied]

    @property
    def spikes(self) -> list[Episode]:
        return episodes(self.events, self.run.steps)

    # --- layers ----------------------------------------------------------------------------------------------------------------

    def suspects(self, most: int) -> tuple[int | None, list[ParameterAttribution]]:
        """A step and its parameters, ranked by suspicion: the worst step of the largest recent spike, or the last step."""
        steps = self._norms.steps
        if not steps:
            return None, []
        recent = [spike for spike in self.spikes if spike.worst.step in steps[-self._recent :]]
        step = largest(recent, 1)[0].worst.step if recent else steps[-1]
        end = steps.index(step) + 1
        found = ranked(steps[:end], self._norms.names, self._norms.values[:end], self._nonfinite[:end])
        return step, [suspect for suspect in found if suspect.score is not None][:most]

    def top_layers(self, most: int) -> list[TopLayer]:
        """The parameters with the largest recent share of the squared norm; empty if no norms were measured."""
        names, norms, nonfinite = self._norms.names, self._norms.values, self._nonfinite
        if not len(norms):
            return []
        usual = [None if math.isnan(norm) else norm for norm in Baseline.of(norms[-REMEMBERED:-1]).norms.tolist()]
        squares = norms[-self._recent :].where(nonfinite[-self._recent :] == 0, math.nan).square().nan_to_num(nan=0.0)
        if not bool((squares > 0).any()):
            return []
        shares = (squares / squares.sum(1, keepdim=True)).nanmean(0).nan_to_num(nan=0.0)
        places = shares.topk(min(most, len(names))).indices.tolist()
        return [TopLayer(names[at], self.norms(names[at]), usual[at], float(shares[at])) for at in places]

    def norms(self, name: str) -> Series:
        """The gradient norms of a parameter over the shown steps; infinite where elements are NaN or infinite."""
        norms = replace(self._norms, values=self._norms.values.where(self._nonfinite == 0, math.inf))
        return norms.column(name).since(self.records[0].step)


class RunFollower:
    """Follows the last ``window`` steps of the run in a directory, which begins, continues, ends, or is replaced."""

    def __init__(self, path: str | os.PathLike[str], window: int) -> None:
        self.name, self._window = os.fspath(path), window
        self._file: tuple[int, int] | None = None
        self.live: LiveRun | None = None  # None until it exists
        self.problem = ""  # why there are no new steps, on one line

    def refresh(self) -> None:
        """Read what is new. An error is stored in ``problem``, and the next call tries again."""
        try:
            first = identity(self.name)
            if self.live is None or first != self._file:
                fresh = LiveRun(read_run(self.name), self._window)
                self.close()
                self.live, self._file = fresh, first
            else:
                self.live.refresh()
            self.problem = ""
        except FileNotFoundError:
            self.problem = f"there is no run in {self.name!r}" + (" any more" if self.live is not None else " yet")
        except (OSError, ValueError) as error:
            self.problem = " ".join(str(error).split())

    def close(self) -> None:
        if self.live is not None:
            self.live.run.close()


# --- sparklines ---

#: From low to high.
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", ".:-=+*#@"
#: NaN or infinite.
NONFINITE = "!"
#: A smaller range, of a logarithm or as a part of the values, is noise and drawn flat.
_LEAST_LOG, _LEAST_PART = math.log(2), 0.1


@dataclass(frozen=True)
class Columns:
    """The steps of each column. Columns begin at multiples of their size, so that they stay in place while steps are added."""

    first: int  # number of the first column, counted from step 0
    count: int  # number of columns
    size: int  # steps in each

    @classmethod
    def of(cls, steps: Sequence[int], most: int) -> Columns:
        """At most ``most`` columns for the last of ``steps``, ascending."""
        if not steps:
            return cls(0, 0, 1)
        stride = int(lower_median(after - before for before, after in pairwise(steps))) if len(steps) > 1 else 1
        size = stride * math.ceil(((steps[-1] - steps[0]) / stride + 1) / most)
        last = steps[-1] // size
        first = max(steps[0] // size, last - most + 1)
        return cls(first, last - first + 1, size)

    def place(self, step: int) -> int | None:
        """The column of ``step``; None if it is before the first."""
        place = step // self.size - self.first
        return place if 0 <= place < self.count else None

    def largest(self, steps: Iterable[int], values: Iterable[float]) -> list[float | None]:
        """The largest value of each column, NaN if one is not finite, None without any."""
        found: list[float | None] = [None] * self.count
        for step, value in zip(steps, values, strict=True):
            if (place := self.place(step)) is not None:
                known = found[place]
                if not math.isfinite(value):
                    found[place] = math.nan
                elif known is None or value > known:  # NaN stays
                    found[place] = value
        return found

    def marks(self, steps: Iterable[int], mark: str) -> str:
        """A mark in each column that has one of the steps."""
        places = set(map(self.place, steps))
        return "".join(mark if place in places else " " for place in range(self.count))


def sparkline(values: Sequence[float | None], letters: str = BLOCKS, span: tuple[float, float] | None = None) -> str:
    """One character for each value, scaled to their range or to ``span``. The scale is logarithmic unless a value is negative.

    >>> sparkline([0.0, 1.0, 2.0, 4.0, 8.0, None, math.nan], ASCII)
    '..-*@ !'
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    is_log = span is None and bool(known) and min(known) >= 0
    if is_log:
        known = [math.log(value) for value in known if value > 0]
    low, high = span or (min(known, default=0.0), max(known, default=1.0))
    least = 0.0 if span else _LEAST_LOG if is_log else _LEAST_PART * max(abs(low), abs(high)) or 1.0
    if high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2

    def letter(value: float) -> str:
        if not math.isfinite(value):
            return NONFINITE
        scaled = low if is_log and not value else math.log(value) if is_log else value
        return letters[min(max(round((scaled - low) / (high - low) * (len(letters) - 1)), 0), len(letters) - 1)]

    return "".join(" " if value is None else letter(value) for value in values)

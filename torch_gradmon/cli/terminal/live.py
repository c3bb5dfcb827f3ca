"""The last steps of an active run, read incrementally."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from itertools import pairwise

from ...analysis.diagnosis.series import Matrix, Series, lower_median
from ...analysis.run import read_run
from ...core.keys import SUMMARY, Key
from ...core.records import SpikeEvent, StatsTable, StepRecord, loss_among
from ...runs.format import identity
from ...runs.reader import RunReader
from ...spikes.attribution import REMEMBERED, Baseline, ParameterAttribution, ranked
from ...spikes.signals import Episode, episodes, largest
from .layer_table import gradient_source

#: The part of the shown steps that counts as recent, as a divisor.
_RECENT_PART = 6
#: Steps from which the speed is computed.
_PACE = 50


@dataclass(frozen=True)
class TopLayer:
    """A parameter with a large share of the gradient."""

    name: str
    series: Series  # the norms of its gradient, before clipping if they are known
    usual: float | None  # its usual norm in the last step; None if too few steps are known
    share: float  # of the squared norm of the whole gradient, mean over the recent steps


class LiveRun:
    """The last ``window`` steps of a run that may go on: their records, without statistics and with the values of the whole model and the
    loss, and the spikes of the whole run.
    """

    def __init__(self, run: RunReader, window: int) -> None:
        self.run = run
        self.window = window
        self.records: list[StepRecord] = []
        self.events: list[SpikeEvent] = run.events
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
        shown = steps[-self.window :]
        known = {record.step: record for record in self.records if record.step < since}
        # steps that had left the window are back in it where the run was rewound
        if (start := min([*(step for step in shown if step not in known), since])) < math.inf:
            for record in self.run.records(int(start), _is_shown):
                known[record.step] = record
                self.events += record.events if record.step >= since else ()
        self.records = [known[step] for step in shown]
        wanted = steps[-self.window - REMEMBERED :]  # earlier steps show what is usual in the first steps of the window
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
        usual = Baseline.of(norms[-REMEMBERED:-1]).norms.tolist()
        squares = norms[-self._recent :].where(nonfinite[-self._recent :] == 0, math.nan).square().nan_to_num(nan=0.0)
        if not bool((squares > 0).any()):
            return []
        shares = (squares / squares.sum(1, keepdim=True)).nanmean(0).nan_to_num(nan=0.0)
        places = shares.topk(min(most, len(names))).indices.tolist()
        return [
            TopLayer(names[at], self.norms(names[at]), None if math.isnan(usual[at]) else usual[at], float(shares[at]))
            for at in places
        ]

    def norms(self, name: str) -> Series:
        """The gradient norms of a parameter over the shown steps; infinite where elements are NaN or infinite."""
        norms = replace(self._norms, values=self._norms.values.where(self._nonfinite == 0, math.inf))
        return norms.column(name).since(self.records[0].step)

    @property
    def _recent(self) -> int:
        return max(self.window // _RECENT_PART, 1)


def _is_shown(key: Key) -> bool:
    return key.source == SUMMARY or loss_among([key]) is not None


# --- the run in a directory, which begins, continues, ends, or is replaced ---


class RunFollower:
    """Follows the last ``window`` steps of the run in a directory: ``live`` is None until it exists, and ``problem`` says on one line why
    there are no new steps.
    """

    def __init__(self, path: str | os.PathLike[str], window: int) -> None:
        self.name = os.fspath(path)
        self._path, self._window = path, window
        self._file: tuple[int, int] | None = None
        self.live: LiveRun | None = None
        self.problem = ""

    def refresh(self) -> None:
        """Read what is new. An error is stored in ``problem``, and the next call tries again."""
        try:
            first = identity(self._path)
            if self.live is None or first != self._file:
                fresh = LiveRun(read_run(self._path), self._window)
                self.close()
                self.live, self._file = fresh, first
            else:
                self.live.refresh()
            self.problem = ""
        except FileNotFoundError:
            self.problem = f"there is no run in {os.fspath(self._path)!r}" + (" any more" if self.live is not None else " yet")
        except (OSError, ValueError) as error:
            self.problem = " ".join(str(error).split())

    def close(self) -> None:
        if self.live is not None:
            self.live.run.close()

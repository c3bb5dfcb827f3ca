"""The last steps of an active run, read incrementally."""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ...analysis.diagnosis.series import Series, lower_median
from ...analysis.run import Run, load_run
from ...core.keys import SUMMARY, Key
from ...core.moments import Column
from ...core.records import SpikeEvent, StepRecord, loss_among
from ...runs.format import identity
from ...runs.reader import most_cells
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


@dataclass
class _Norms:
    """Of steps with the same parameters, the norms of their gradients, and the counts of non-finite elements."""

    steps: list[int]
    names: tuple[str, ...]
    values: Tensor  # float64 [steps, parameters, 2]

    @property
    def norms(self) -> Tensor:
        return self.values[..., 0]

    @property
    def nonfinite(self) -> Tensor:
        return self.values[..., 1]

    def between(self, begin: int, end: int | None = None) -> _Norms:
        part = slice(bisect_left(self.steps, begin), None if end is None else bisect_left(self.steps, end))
        return _Norms(self.steps[part], self.names, self.values[part])

    def of(self, names: tuple[str, ...]) -> Tensor:
        """The values of these parameters; NaN and 0 for those that it has not."""
        if names == self.names:
            return self.values
        place = {name: number for number, name in enumerate(self.names)}
        absent = self.values.new_tensor([math.nan, 0.0]).expand(len(self.steps), 1, 2)
        return torch.cat([self.values, absent], 1)[:, [place.get(name, -1) for name in names]]


class LiveRun:
    """The last ``window`` steps of a run that may go on: their records, without statistics and with the values of the whole model and the
    loss, and the spikes of the whole run.
    """

    def __init__(self, run: Run, window: int) -> None:
        self.run = run
        self.window = window
        self.records: list[StepRecord] = []
        self.events: list[SpikeEvent] = run.events
        self._norms: list[_Norms] = []
        self._earliest = math.inf  # the first step whose norms are known
        self._read(None)

    def refresh(self) -> None:
        """Read what is new, if anything. Raises OSError."""
        since = self.run.refresh()
        if since is not None:
            self.events = [event for event in self.events if event.step < since]
            self._read(since)

    def _read(self, since: int | None) -> None:
        """Read from ``since`` on, or at first the whole window, and drop what was known of these steps."""
        steps = self.run.steps
        begin = steps[max(len(steps) - self.window, 0)] if steps else 0
        # earlier steps show what is usual in the first steps of the window
        earliest = steps[max(len(steps) - self.window - REMEMBERED, 0)] if steps else 0
        start = begin if since is None else since
        self.records = [record for record in self.records if record.step < start]
        if not self.records or self.records[0].step > begin:  # the run was rewound: steps that had left the window are back in it
            self.records, start = [], min(start, begin)
        for record in self.run.records(start, _is_shown):
            self.records.append(record)
            if since is not None and record.step >= since:
                self.events += record.events
        self.records = self.records[-self.window :]
        if earliest < self._earliest:
            start = earliest
        self._earliest = earliest
        self._norms = [part.between(earliest, start) for part in self._norms]
        source = gradient_source(self.run)
        for stack in () if source is None else self.run.stacks(source, max(start, earliest)):
            values = torch.stack([stack.values("norm"), stack.rows[..., Column.NONFINITE]], -1)
            self._norms.append(_Norms(list(stack.steps), stack.names, values))
        self._norms = [part for part in self._norms if part.steps]
        self._joined = _joined(self._norms)

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
        steps, norms, nonfinite = self._joined.steps, self._joined.norms, self._joined.nonfinite
        if not steps:
            return None, []
        recent = [spike for spike in self.spikes if spike.worst.step in steps[-self._recent :]]
        step = largest(recent, 1)[0].worst.step if recent else steps[-1]
        end = steps.index(step) + 1
        found = ranked(steps[:end], self._joined.names, norms[:end], nonfinite[:end])
        return step, [suspect for suspect in found if suspect.score is not None][:most]

    def top_layers(self, most: int) -> list[TopLayer]:
        """The parameters with the largest recent share of the squared norm; empty if no norms were measured."""
        names, norms, nonfinite = self._joined.names, self._joined.norms, self._joined.nonfinite
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
        place, shown = self._joined.names.index(name), self._joined.between(self.records[0].step)
        column = torch.where(shown.nonfinite[:, place] > 0, math.inf, shown.norms[:, place]).tolist()
        return Series.of((step, norm) for step, norm in zip(shown.steps, column, strict=True) if not math.isnan(norm))

    @property
    def _recent(self) -> int:
        return max(self.window // _RECENT_PART, 1)


def _is_shown(key: Key) -> bool:
    return key.source == SUMMARY or loss_among([key]) is not None


def _joined(parts: Sequence[_Norms]) -> _Norms:
    """The steps together, with the parameters of the last one; without the earliest if most of these are in few of them."""
    names = parts[-1].names if parts else ()
    most = most_cells(sum(part.norms.numel() for part in parts)) // max(len(names), 1)
    skipped = max(sum(len(part.steps) for part in parts) - most, 0)
    if skipped:
        first = [step for part in parts for step in part.steps][skipped]
        parts = [part.between(first) for part in parts if part.steps[-1] >= first]
    empty = torch.empty(0, len(names), 2, dtype=torch.float64, device="cpu")
    steps = [step for part in parts for step in part.steps]
    return _Norms(steps, names, torch.cat([empty, *(part.of(names) for part in parts)]))


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
                fresh = LiveRun(load_run(self._path), self._window)
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

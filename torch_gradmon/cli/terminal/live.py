"""What is known of a run while it goes on: its last steps, by reading only what is new."""

from __future__ import annotations

import math
import os
import sqlite3
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ...analysis.diagnosis.series import Series, lower_median
from ...analysis.run import Run, load_run
from ...core.keys import SUMMARY, Key
from ...core.loss_keys import loss_among
from ...core.moments import Column
from ...core.records import SpikeEvent, StepRecord
from ...runs.writer import file_in
from ...spikes.episodes import Episode, episodes, largest
from ...spikes.suspects import REMEMBERED, ParameterAttribution, ranked
from ...spikes.usual import Baseline
from .layer_table import gradient_source

#: Of the steps shown, the last ones, which say what the layers do of late.
_RECENT_PART = 6
#: Steps that tell how fast the training goes.
_PACE = 50


@dataclass(frozen=True)
class Layer:
    """A parameter that stands out.

    Attributes:
        name: of the parameter.
        series: the norms of its gradient, before clipping where that is known.
        usual: its usual norm in the last step; None where too little is known.
        share: of the squared norm of the whole gradient, the mean over the last steps.
    """

    name: str
    series: Series
    usual: float | None
    share: float


@dataclass
class _Gradients:
    """Norms of some steps that have the same parameters, float64 ``[steps, parameters]``, and how many elements are NaN or infinite."""

    steps: list[int]
    names: tuple[str, ...]
    norms: Tensor
    spoiled: Tensor

    def part(self, first: int, last: int) -> _Gradients:
        return _Gradients(self.steps[first:last], self.names, self.norms[first:last], self.spoiled[first:last])


class Live:
    """The last steps of a run that may go on.

    Args:
        run: the run.
        window: so many steps.

    Attributes:
        records: of the last steps, ascending, without statistics, with the loss and the values of the whole model.
        events: what detectors found in the whole run.
    """

    def __init__(self, run: Run, window: int) -> None:
        self.run = run
        self.window = window
        self.records: list[StepRecord] = []
        self.events: list[SpikeEvent] = run.events
        self._gradients: list[_Gradients] = []
        self._earliest = math.inf  # the step from which on they are known
        self._read(None)

    def look(self) -> None:
        """Read what is new, if anything.

        Raises:
            sqlite3.Error: it cannot be read.
        """
        since = self.run.refresh()
        if since is not None:
            self.events = [event for event in self.events if event.step < since]
            self._read(since)

    def _read(self, since: int | None) -> None:
        """From ``since`` on, or at first what the window has; what was known of these steps is forgotten."""
        steps = self.run.steps
        begin = steps[max(len(steps) - self.window, 0)] if steps else 0
        earliest = (
            steps[max(len(steps) - self.window - REMEMBERED, 0)] if steps else 0
        )  # what is usual in the first of these steps
        start = begin if since is None else since
        self.records = [record for record in self.records if record.step < start]
        if not self.records or self.records[0].step > begin:  # far back: the window has steps again that had left it
            self.records, start = [], min(start, begin)
        for record in self.run.records(start, _is_shown):
            self.records.append(record)
            if since is not None and record.step >= since:
                self.events += record.events
        self.records = self.records[-self.window :]
        if earliest < self._earliest:
            start = earliest
        self._earliest = earliest
        self._gradients = [_cut(part, earliest, start) for part in self._gradients]
        source = gradient_source(self.run)
        for stack in () if source is None else self.run.stacks(source, max(start, earliest)):
            spoiled = stack.rows[..., Column.NONFINITE]
            self._gradients.append(_Gradients(list(stack.steps), stack.names, stack.values("norm"), spoiled))
        self._gradients = [part for part in self._gradients if part.steps]
        self._joined = _joined(self._gradients)

    # --- of the whole model ----------------------------------------------------------------------------------------------------

    @property
    def last(self) -> StepRecord | None:
        """The last step; None without any."""
        return self.records[-1] if self.records else None

    @property
    def steps(self) -> list[int]:
        """The steps that are shown."""
        return [record.step for record in self.records]

    @property
    def loss(self) -> Key | None:
        """The key of the loss; None where none is logged."""
        return loss_among({key for record in self.records for key in record.values})

    def series(self, key: Key) -> Series:
        """A value over the last steps; empty without any."""
        pairs = [(record.step, record.values[key]) for record in self.records if key in record.values]
        return Series(tuple(step for step, _ in pairs), tuple(value for _, value in pairs))

    @property
    def pace(self) -> float | None:
        """Seconds for a step, the median of the last ones, so that a break does not count; None where too little is known."""
        pairs = pairwise(self.records[-_PACE:])
        median = lower_median((after.time - before.time) / (after.step - before.step) for before, after in pairs)
        return median if median > 0 else None

    def fact(self, name: str) -> float | None:
        """A number in the context of the steps that are shown, such as ``overhead_pct``: the median, since one of them may say little of
        the others, as where hooks were installed in it; None without any.
        """
        found = [record.context[name] for record in self.records if isinstance(record.context.get(name), (int, float))]
        return lower_median(found) if found else None

    def total(self, name: str) -> int:
        """How many steps of the whole run had something, such as ``steps_not_applied``, as far as it was counted."""
        values = self.series(Key(SUMMARY, "", name)).values
        return int(values[-1]) if values and math.isfinite(values[-1]) else 0

    @property
    def not_applied(self) -> list[int]:
        """Of the steps that are shown, those that the optimizer did not apply."""
        return [record.step for record in self.records if not record.applied]

    @property
    def spikes(self) -> list[Episode]:
        """What detectors found in the whole run, ascending."""
        return episodes(self.events, self.run.steps)

    # --- of layers ---------------------------------------------------------------------------------------------------------------

    def suspects(self, most: int) -> tuple[int | None, list[ParameterAttribution]]:
        """The first parameters in the order of suspicion, and of which step: of the largest spike of late, else of the last step."""
        steps, norms, spoiled = self._joined.steps, self._joined.norms, self._joined.spoiled
        if not steps:
            return None, []
        late = [spike for spike in self.spikes if spike.worst.step in steps[-self._recent :]]
        step = largest(late, 1)[0].worst.step if late else steps[-1]
        end = steps.index(step) + 1
        found = ranked(steps[:end], self._joined.names, norms[:end], spoiled[:end])
        return step, [suspect for suspect in found if suspect.score is not None][:most]

    def holding(self, most: int) -> list[Layer]:
        """The parameters with the largest share of the squared norm of late; none where no norms were measured."""
        names, norms, spoiled = self._joined.names, self._joined.norms, self._joined.spoiled
        if not len(norms):
            return []
        usual = Baseline.of(norms[-REMEMBERED:-1]).norms.tolist()
        squares = norms[-self._recent :].where(spoiled[-self._recent :] == 0, math.nan).square().nan_to_num(nan=0.0)
        if not bool((squares > 0).any()):  # as where no norms were measured
            return []
        shares = (squares / squares.sum(1, keepdim=True)).nanmean(0).nan_to_num(nan=0.0)
        return [
            Layer(
                names[place], self.norms(names[place]), None if math.isnan(usual[place]) else usual[place], float(shares[place])
            )
            for place in shares.topk(min(most, len(names))).indices.tolist()
        ]

    def norms(self, name: str) -> Series:
        """The norms of a parameter's gradient over the steps that are shown; infinite where elements are NaN or infinite."""
        place, first = self._joined.names.index(name), bisect_left(self._joined.steps, self.records[0].step)
        last = self._joined.part(first, len(self._joined.steps))
        column = torch.where(last.spoiled[:, place] > 0, math.inf, last.norms[:, place]).tolist()
        pairs = [(step, norm) for step, norm in zip(last.steps, column, strict=True) if not math.isnan(norm)]
        return Series(tuple(step for step, _ in pairs), tuple(norm for _, norm in pairs))

    @property
    def _recent(self) -> int:
        return max(self.window // _RECENT_PART, 1)


def _is_shown(key: Key) -> bool:
    return key.source == SUMMARY or loss_among([key]) is not None


def _joined(parts: Sequence[_Gradients]) -> _Gradients:
    """All steps together, with the parameters of the last one."""
    names = parts[-1].names if parts else ()
    empty = torch.empty(0, len(names), dtype=torch.float64, device="cpu")
    return _Gradients(
        [step for part in parts for step in part.steps],
        names,
        torch.cat([empty, *(_aligned(part.norms, part.names, names, math.nan) for part in parts)]),
        torch.cat([empty, *(_aligned(part.spoiled, part.names, names, 0.0) for part in parts)]),
    )


def _cut(part: _Gradients, begin: int, end: int) -> _Gradients:
    """Its steps from ``begin`` on and before ``end``."""
    return part.part(bisect_left(part.steps, begin), bisect_left(part.steps, end))


def _aligned(values: Tensor, names: Sequence[str], wanted: Sequence[str], absent: float) -> Tensor:
    """The columns of ``wanted``."""
    if names == wanted:
        return values
    place = {name: number for number, name in enumerate(names)}
    padded = torch.cat([values, torch.full((len(values), 1), absent, dtype=torch.float64, device="cpu")], 1)
    return padded[:, [place.get(name, -1) for name in wanted]]


class Follower:
    """Follows the run in a directory, whether it has not begun, goes on, ended, or was made anew.

    Args:
        path: the directory.
        window: so many of the last steps are shown.

    Attributes:
        name: what it was called when it was asked for.
        live: the run; None until there is one.
        problem: why nothing new is seen, in a line; empty where all is well.
    """

    def __init__(self, path: str | os.PathLike[str], window: int) -> None:
        self.name = os.fspath(path)
        self._path, self._window = path, window
        self._file: tuple[int, int] | None = None
        self.live: Live | None = None
        self.problem = ""

    def look(self) -> None:
        """Read what is new. What may befall a run is no error here: it is told in ``problem``, and the next look tries again."""
        try:
            status = os.stat(file_in(self._path))
            if self.live is None or (status.st_dev, status.st_ino) != self._file:
                fresh = Live(load_run(self._path), self._window)
                self.close()
                self.live, self._file = fresh, (status.st_dev, status.st_ino)
            else:
                self.live.look()
            self.problem = ""
        except FileNotFoundError:
            self.problem = f"there is no run in {os.fspath(self._path)!r}" + (" any more" if self.live is not None else " yet")
        except (OSError, ValueError, sqlite3.Error) as error:
            self.problem = " ".join(str(error).split())

    def close(self) -> None:
        """Close the run's file."""
        if self.live is not None:
            self.live.run.close()

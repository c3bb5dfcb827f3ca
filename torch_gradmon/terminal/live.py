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

from ..diagnosis.series import Series, lower_median
from ..loss_names import loss_among
from ..names import SUMMARY, Key
from ..record import Event, StepRecord
from ..run import Run, load_run
from ..spikes.suspects import robust_scores
from ..statistics.moments import Column
from ..store import file_in
from .layers import gradient_source

#: Of the steps shown, a layer is judged by the last ones, by what all of them say is usual.
_RECENT_PART = 6
#: Steps that tell how fast the training goes.
_PACE = 50


@dataclass(frozen=True)
class Layer:
    """A parameter that stands out.

    Attributes:
        name: of the parameter.
        series: the norms of its gradient, before clipping where that is known.
        usual: the median norm; None where too little is known.
        worst: where it was farthest above that of late: step, norm and score; infinite for NaN and Inf.
        share: of the squared norm of the whole gradient, the mean over the last steps.
    """

    name: str
    series: Series
    usual: float | None
    worst: tuple[int, float, float]
    share: float


@dataclass
class _Gradients:
    """Norms of some steps that have the same parameters, float64 ``[steps, parameters]``, and whether they hold NaN or Inf."""

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
        self.events: list[Event] = run.events
        self._gradients: list[_Gradients] = []
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
        start = begin if since is None else since
        self.records = [record for record in self.records if record.step < start]
        if not self.records or self.records[0].step > begin:  # far back: the window has steps again that had left it
            self.records, start = [], min(start, begin)
        for record in self.run.records(start, _is_shown):
            self.records.append(record)
            if since is not None and record.step >= since:
                self.events += record.events
        self.records = self.records[-self.window :]
        self._gradients = [_cut(part, begin, start) for part in self._gradients]
        source = gradient_source(self.run)
        for stack in () if source is None else self.run.stacks(source, max(start, begin)):
            rows = stack.rows
            self._gradients.append(
                _Gradients(list(stack.steps), stack.names, rows[..., Column.SQUARE_SUM].sqrt(), rows[..., Column.NONFINITE] > 0)
            )
        self._gradients = [part for part in self._gradients if part.steps]

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
        """A number in the context of the last steps, their median, such as ``overhead_pct``; None without any."""
        found = [record.context[name] for record in self.records[-_PACE:] if isinstance(record.context.get(name), (int, float))]
        return lower_median(found) if found else None

    def total(self, name: str) -> int:
        """How many steps of the whole run had something, such as ``steps_not_applied``, as far as it was counted."""
        values = self.series(Key(SUMMARY, "", name)).values
        return int(values[-1]) if values and math.isfinite(values[-1]) else 0

    @property
    def not_applied(self) -> list[int]:
        """Of the steps that are shown, those that the optimizer did not apply."""
        return [record.step for record in self.records if not record.applied]

    # --- of layers ---------------------------------------------------------------------------------------------------------------

    def layers(self, most: int) -> tuple[list[Layer], list[Layer]]:
        """Parameters of the last step: those farthest above their own normal of late, NaN and Inf first, and those with the largest
        share of late; ``most`` of each.
        """
        if not self._gradients:
            return [], []
        names = self._gradients[-1].names
        steps = [step for part in self._gradients for step in part.steps]
        norms = torch.cat([_aligned(part.norms, part.names, names, math.nan) for part in self._gradients])
        spoiled = torch.cat([_aligned(part.spoiled.double(), part.names, names, 0.0) for part in self._gradients]) > 0
        norms = torch.where(spoiled, math.inf, norms)
        recent = max(len(steps) - max(self.window // _RECENT_PART, 1), 0)
        scores, usual = robust_scores(norms)
        worst = torch.where(spoiled, math.inf, scores.nan_to_num(nan=-math.inf))[recent:].max(0)
        squares = norms[recent:].square().nan_to_num(nan=0.0, posinf=0.0)
        totals = squares.sum(1, keepdim=True)
        shares = (squares / totals).nanmean(0).nan_to_num(nan=0.0)

        def layer(place: int) -> Layer:
            column, at = norms[:, place].tolist(), recent + int(worst.indices[place])
            pairs = [(step, norm) for step, norm in zip(steps, column, strict=True) if not math.isnan(norm)]
            return Layer(
                names[place],
                Series(tuple(step for step, _ in pairs), tuple(norm for _, norm in pairs)),
                None if math.isnan(usual[place]) else float(usual[place]),
                (steps[at], column[at], float(worst.values[place])),
                float(shares[place]),
            )

        count = min(most, len(names))
        known = [place for place in worst.values.topk(count).indices.tolist() if worst.values[place] > -math.inf]
        return list(map(layer, known)), list(map(layer, shares.topk(count).indices.tolist()))


def _is_shown(key: Key) -> bool:
    return key.source == SUMMARY or loss_among([key]) is not None


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

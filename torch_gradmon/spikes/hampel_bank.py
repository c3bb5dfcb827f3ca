"""The default rule for many signals at once, such as one norm for each layer: the same verdicts, in a few dozen tensor operations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .hampel import (
    ACCEPT_AT_ONCE,
    ACCEPT_IN_THE_END,
    EARLY_SPREAD,
    FAR_FROM,
    FEWEST_RESIDUALS,
    FIRST,
    LOG_OF_ZERO,
    MAD_TO_STD,
    RECENT,
    USUAL,
    Hampel,
)

#: Places of rows, each once, or all rows.
Rows = Tensor | slice
_ALL = slice(None)


def _rows(chosen: Tensor) -> Rows:
    """Where ``chosen`` is true; most of the time it is everywhere, and then nothing has to be picked out and put back."""
    return _ALL if bool(chosen.all()) else chosen.nonzero().squeeze(1)


class Windows:
    """For each of ``rows`` signals its last ``size`` values, in order of time and of size; float64 on the CPU."""

    def __init__(self, rows: int, size: int) -> None:
        self.size = size
        self.count = torch.zeros(rows, dtype=torch.int64, device="cpu")
        self._next = torch.zeros(rows, dtype=torch.int64, device="cpu")
        # what a window lacks is infinite and last in its order
        self._in_time = torch.full((rows, size), torch.inf, dtype=torch.float64, device="cpu")
        self._in_order = self._in_time.clone()
        self._same_count: int | None = 0  # that of all rows, where it is known to be the same

    def add(self, rows: Rows, values: Tensor) -> None:
        """Take ``values[i]`` for the oldest value of ``rows[i]``; each row once."""
        ordered, slots = self._in_order[rows], self._next[rows].unsqueeze(1)  # of all rows these are views
        values, in_time = values.unsqueeze(1), self._in_time[rows]
        oldest = in_time.gather(1, slots)  # infinite while the window is not full: a place that is free
        rest = torch.where(ordered[:, :-1] < oldest, ordered[:, :-1], ordered[:, 1:])
        # into an order, a value comes between the two neighbours that it lies between
        torch.minimum(rest[:, :1], values, out=ordered[:, :1])
        torch.minimum(rest[:, 1:], values, out=ordered[:, 1:-1])
        ordered[:, 1:-1].clamp_(min=rest[:, :-1])
        torch.maximum(rest[:, -1:], values, out=ordered[:, -1:])
        in_time.scatter_(1, slots, values)
        self._next[rows] = (slots.squeeze(1) + 1).remainder_(self.size)
        self.count[rows] += 1
        self.count.clamp_(max=self.size)
        if isinstance(rows, Tensor):
            self._in_order[rows], self._in_time[rows] = ordered, in_time
            self._same_count = None
        elif self._same_count is not None:
            self._same_count = min(self._same_count + 1, self.size)

    def median(self) -> Tensor:
        """``[rows]``; not finite where there is no value."""
        found = torch.empty_like(self._in_order[:, 0])
        for count, rows in self._by_count():
            ordered = self._in_order[rows]
            found[rows] = (ordered[:, max(count - 1, 0) // 2] + ordered[:, count // 2]) / 2
        return found

    def median_deviation(self, center: Tensor) -> Tensor:
        """The median of ``|x - center|``: ``[rows]``; zero where there is no value."""
        found = torch.zeros_like(center)
        for count, rows in self._by_count():
            if count:
                ordered, middle = self._in_order[rows], center[rows].unsqueeze(1)
                upper = _nearest(ordered, middle, count // 2 + 1, count)
                found[rows] = upper if count % 2 else (_nearest(ordered, middle, count // 2, count) + upper) / 2
        return found

    def _by_count(self) -> Iterator[tuple[int, Rows]]:
        """Rows by how many values they have; most of the time all are full."""
        if self._same_count is None and int(self.count.min()) == int(self.count.max()):
            self._same_count = int(self.count[0])
        if self._same_count is not None:
            yield self._same_count, _ALL
            return
        for count in sorted(set(self.count.tolist())):
            yield count, _rows(self.count == count)

    def values(self, row: int) -> list[float]:
        """The values of one row, oldest first."""
        count, start = int(self.count[row]), int(self._next[row]) if int(self.count[row]) == self.size else 0
        return self._in_time[row].roll(-start)[:count].tolist()

    def load(self, first: int, rows: Sequence[Sequence[float]]) -> None:
        """Begin anew with the last ``size`` of each of these values, for the rows from ``first`` on."""
        kept = [list(values)[-self.size :] for values in rows]
        padded = [values + [math.inf] * (self.size - len(values)) for values in kept]
        there = slice(first, first + len(kept))
        self._in_time[there] = torch.tensor(padded, dtype=torch.float64, device="cpu")
        self._in_order[there] = self._in_time[there].sort(dim=1).values
        self.count[there] = torch.tensor([len(values) for values in kept], device="cpu")
        self._next[there] = self.count[there] % self.size
        self._same_count = None


def _nearest(ordered: Tensor, center: Tensor, rank: int, count: int) -> Tensor:
    """The ``rank``-th smallest distance to ``center``: the nearest ``rank`` values are neighbours, so the best such run tells."""
    starts = count - rank + 1
    reach = torch.maximum(center - ordered[:, :starts], ordered[:, rank - 1 : rank - 1 + starts] - center)
    return reach.amin(dim=1)


def _put(target: Tensor, rows: Rows, places: Tensor, values: Tensor) -> None:
    """In each of ``rows`` of ``target`` one value at one place."""
    if isinstance(rows, Tensor):
        target[rows, places] = values
    else:
        target.scatter_(1, places.unsqueeze(1), values.unsqueeze(1))


class HampelBank:
    """:class:`Hampel` for a fixed number of signals that are never negative.

    Args:
        like: the rule whose settings these are; what it has learned plays no part.
        signals: how many.
    """

    def __init__(self, like: Hampel, signals: int) -> None:
        self.threshold, self._least, self._early = like.threshold, math.log(like.least), like.early
        sizes = self._sizes = like.sizes
        self._signals, self._lag = signals, sizes["lag"]
        self._near, self._far = Windows(signals, sizes["near"]), Windows(signals, sizes["far"])
        self._residuals = Windows(2 * signals, sizes["window"])  # to the near medians, then to the far ones
        self._between = torch.zeros(signals, self._lag, dtype=torch.float64, device="cpu")
        self._recent = torch.zeros(signals, RECENT, dtype=torch.float64, device="cpu")
        self._flags = torch.zeros(signals, RECENT, dtype=torch.bool, device="cpu")
        # what lay above the threshold, -inf for the others
        self._peaks = torch.full((signals, sizes["window"]), -torch.inf, dtype=torch.float64, device="cpu")
        self._turn = torch.zeros(signals, dtype=torch.int64, device="cpu")
        self._queued, self._seen, self._count = (torch.zeros(signals, dtype=torch.int64, device="cpu") for _ in range(3))

    def update(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Judge ``values``, float64 ``[signals]`` on the CPU, then learn them.

        Returns:
            Scores, infinite for NaN and Inf, NaN where there is none yet; which values are spikes; and the logarithms of what
            was usual before, infinite where nothing was. All ``[signals]``.
        """
        finite, positions, medians, scores, spikes = self._judge(values)
        rows = _rows(finite)
        _put(self._peaks, rows, self._turn[rows], torch.where(scores >= self.threshold, positions, -torch.inf)[rows])
        self._turn[rows] = (self._turn[rows] + 1) % self._peaks.shape[1]
        self._learn(finite & ~spikes, positions, medians)
        for row in self._remember(rows, positions, spikes):
            self._accept(row)
        return torch.where(finite, scores, torch.inf), spikes | ~finite, medians[0]

    def judged(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What :meth:`update` would return; nothing is learned."""
        finite, _, medians, scores, spikes = self._judge(values)
        return torch.where(finite, scores, torch.inf), spikes | ~finite, medians[0]

    def _judge(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        finite = values.isfinite()
        positions = torch.where(values > 0, values.log(), LOG_OF_ZERO)
        medians = torch.stack([self._near.median(), self._far.median()])
        scores = self._scores(positions, medians)
        self._excuse(scores, positions)
        return finite, positions, medians, scores, finite & (scores > self.threshold)

    def _scores(self, positions: Tensor, medians: Tensor) -> Tensor:
        count = self._count.double()
        deviations = self._residuals.median_deviation(self._residuals.median())
        deviations = torch.where(self._residuals.count >= FEWEST_RESIDUALS, deviations, 0.0).view(2, -1)
        spreads = MAD_TO_STD * deviations * (1 + EARLY_SPREAD / count)
        near, far = (positions - medians) / torch.maximum(spreads, (self._least + self._early / count) / self.threshold)
        scores = torch.where(self._count >= FAR_FROM, torch.maximum(near, far), near)
        return torch.where(self._count >= FIRST, scores, torch.nan)

    def _excuse(self, scores: Tensor, positions: Tensor) -> None:
        """Lower the scores of what is usual to the threshold."""
        high = (scores > self.threshold).nonzero().squeeze(1)
        if len(high):
            nearly = (positions[high] - self._least).unsqueeze(1)
            usual = (self._peaks[high] >= nearly).sum(dim=1) >= USUAL
            scores[high[usual]] = self.threshold

    def _learn(self, calm: Tensor, positions: Tensor, medians: Tensor) -> None:
        known = torch.stack([self._near.count, self._far.count]) >= FIRST
        rows = _rows((known & calm).view(-1))
        self._residuals.add(rows, (positions - medians).view(-1)[rows])
        slots = self._queued % self._lag
        waited = _rows(calm & (self._queued >= self._lag))
        self._far.add(waited, self._between.gather(1, slots.unsqueeze(1)).squeeze(1)[waited])
        rows = _rows(calm)
        self._near.add(rows, positions[rows])
        _put(self._between, rows, slots[rows], positions[rows])
        self._queued += calm
        self._count += calm

    def _remember(self, rows: Rows, positions: Tensor, spikes: Tensor) -> list[int]:
        """Note the last value of ``rows``; those that have a new level."""
        self._recent[rows] = torch.cat([self._recent[rows, 1:], positions[rows].unsqueeze(1)], dim=1)
        self._flags[rows] = torch.cat([self._flags[rows, 1:], spikes[rows].unsqueeze(1)], dim=1)
        self._seen[rows] = (self._seen[rows] + 1).clamp_(max=RECENT)
        number = self._flags.sum(dim=1)
        lasting = (number >= ACCEPT_IN_THE_END) & (self._seen == RECENT) & self._flags[:, 0]
        changed = lasting | (spikes & (number >= ACCEPT_AT_ONCE))
        touched = torch.zeros_like(changed)
        touched[rows] = True
        return (changed & touched).nonzero().squeeze(1).tolist()

    def _accept(self, row: int) -> None:
        start = RECENT - int(self._seen[row])
        flags = self._flags[row, start:].tolist()
        level = self._recent[row, start:].tolist()[flags.index(True) :]
        self._near.load(row, [level])
        self._far.load(row, [level])
        self._queued[row], self._seen[row], self._flags[row] = 0, 0, False

    # --- as single rules know it -------------------------------------------------------------------------------------------------

    def state(self, signal: int) -> dict[str, Any]:
        """What :meth:`Hampel.state_dict` of a rule for this signal alone would be."""
        seen, queued = int(self._seen[signal]), int(self._queued[signal])
        between = self._between[signal].roll(-(queued % self._lag)) if queued >= self._lag else self._between[signal][:queued]
        recent = zip(self._recent[signal].tolist(), self._flags[signal].tolist(), strict=True)
        return {
            "near": self._near.values(signal),
            "far": self._far.values(signal),
            "near_residuals": self._residuals.values(signal),
            "far_residuals": self._residuals.values(signal + self._signals),
            "between": between.tolist(),
            "recent": [[position, flag] for position, flag in recent][RECENT - seen :],
            "peaks": [None if p == -math.inf else p for p in self._peaks[signal].roll(-int(self._turn[signal])).tolist()],
            "count": int(self._count[signal]),
            "linear": False,
            "sizes": self._sizes,
        }

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """The inverse of :meth:`state`, of all signals."""
        self._near.load(0, [state["near"] for state in states])
        self._far.load(0, [state["far"] for state in states])
        self._residuals.load(0, [state["near_residuals"] for state in states])
        self._residuals.load(self._signals, [state["far_residuals"] for state in states])
        peaks = [[-math.inf if peak is None else peak for peak in state["peaks"]] for state in states]
        self._peaks, self._turn[:] = torch.tensor(peaks, dtype=torch.float64, device="cpu"), 0
        for signal, state in enumerate(states):
            between = torch.tensor(state["between"], dtype=torch.float64, device="cpu")
            self._between[signal, : len(between)] = between
            self._queued[signal], self._count[signal], self._seen[signal] = len(between), state["count"], len(state["recent"])
            self._flags[signal] = False
            for place, (position, flag) in enumerate(reversed(state["recent"]), start=1):
                self._recent[signal, -place], self._flags[signal, -place] = position, flag

"""Sorted windows of many signals at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

#: Places of rows, each once, or all rows.
Rows = Tensor | slice
_ALL = slice(None)


def chosen_rows(chosen: Tensor) -> Rows:
    """Where ``chosen`` is true. Usually it is true everywhere, and a slice avoids gather and scatter."""
    return _ALL if bool(chosen.all()) else chosen.nonzero().squeeze(1)


class SortedWindowBank:
    """The last ``size`` values of each of ``rows`` signals, in order of time and of size; float64 on the CPU."""

    def __init__(self, rows: int, size: int) -> None:
        self.size = size
        self.count = torch.zeros(rows, dtype=torch.int64, device="cpu")
        self._next = torch.zeros(rows, dtype=torch.int64, device="cpu")
        # free places are infinite and therefore last in the order
        self._in_time = torch.full((rows, size), torch.inf, dtype=torch.float64, device="cpu")
        self._in_order = self._in_time.clone()
        self._same_count: int | None = 0  # the count of all rows, if it is known to be equal

    def add(self, rows: Rows, values: Tensor) -> None:
        """Replace the oldest value of ``rows[i]`` by ``values[i]``; each row at most once."""
        ordered, slots = self._in_order[rows], self._next[rows].unsqueeze(1)  # views, if all rows are chosen
        values, in_time = values.unsqueeze(1), self._in_time[rows]
        oldest = in_time.gather(1, slots)  # infinite, that is free, while the window is not full
        rest = torch.where(ordered[:, :-1] < oldest, ordered[:, :-1], ordered[:, 1:])
        # a value is inserted between its two neighbours in the order
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
        """Groups of rows with equal counts; usually one group, since all windows are full."""
        if self._same_count is None and int(self.count.min()) == int(self.count.max()):
            self._same_count = int(self.count[0])
        if self._same_count is not None:
            yield self._same_count, _ALL
            return
        for count in sorted(set(self.count.tolist())):
            yield count, chosen_rows(self.count == count)

    def values(self, row: int) -> list[float]:
        """The values of one row, oldest first."""
        count, start = int(self.count[row]), int(self._next[row]) if int(self.count[row]) == self.size else 0
        return self._in_time[row].roll(-start)[:count].tolist()

    def load(self, first: int, rows: Sequence[Sequence[float]]) -> None:
        """Replace the contents of the rows from ``first`` on by the last ``size`` of these values."""
        kept = [list(values)[-self.size :] for values in rows]
        padded = [values + [math.inf] * (self.size - len(values)) for values in kept]
        there = slice(first, first + len(kept))
        self._in_time[there] = torch.tensor(padded, dtype=torch.float64, device="cpu")
        self._in_order[there] = self._in_time[there].sort(dim=1).values
        self.count[there] = torch.tensor([len(values) for values in kept], device="cpu")
        self._next[there] = self.count[there] % self.size
        self._same_count = None


def _nearest(ordered: Tensor, center: Tensor, rank: int, count: int) -> Tensor:
    """The ``rank``-th smallest distance to ``center``: the nearest ``rank`` values are neighbours, so the best such run has it."""
    starts = count - rank + 1
    reach = torch.maximum(center - ordered[:, :starts], ordered[:, rank - 1 : rank - 1 + starts] - center)
    return reach.amin(dim=1)

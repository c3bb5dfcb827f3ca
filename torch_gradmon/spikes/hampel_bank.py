"""The default rule for many signals at once, such as one norm per layer: the same verdicts in a few dozen tensor operations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .hampel import Hampel
from .level import (
    ACCEPT_AT_ONCE,
    ACCEPT_IN_THE_END,
    EARLY_SPREAD,
    FAR_FROM,
    FEWEST_RESIDUALS,
    FIRST,
    JUDGES,
    LOG_OF_ZERO,
    MAD_TO_STD,
    RECENT,
    USUAL,
)
from .sorted_window_bank import Rows, SortedWindowBank, chosen_rows


class _RingBuffers:
    """The last ``size`` values of each of ``rows`` signals; free places hold ``empty``."""

    def __init__(self, rows: int, size: int, empty: float) -> None:
        self._empty = empty
        self.values = torch.full((rows, size), empty, dtype=torch.float64, device="cpu")
        self._next = torch.zeros(rows, dtype=torch.int64, device="cpu")

    def oldest(self) -> Tensor:
        """The value that the next one replaces: ``[rows]``."""
        return self.values.gather(1, self._next.unsqueeze(1)).squeeze(1)

    def add(self, rows: Rows, values: Tensor) -> None:
        """Replace the oldest value of ``rows[i]`` by ``values[i]``."""
        places = self._next[rows]
        if isinstance(rows, Tensor):
            self.values[rows, places] = values
            self._next[rows] = (places + 1) % self.values.shape[1]
        else:  # a view
            self.values.scatter_(1, places.unsqueeze(1), values.unsqueeze(1))
            places.add_(1).remainder_(self.values.shape[1])

    def ordered(self, row: int) -> list[float]:
        """The places of one row, oldest first."""
        return self.values[row].roll(-int(self._next[row])).tolist()

    def load(self, first: int, rows: Sequence[Sequence[float]]) -> None:
        """Replace the contents of the rows from ``first`` on; each sequence begins with the oldest value."""
        size = self.values.shape[1]
        padded, there = [[*values, *[self._empty] * (size - len(values))] for values in rows], slice(first, first + len(rows))
        self.values[there] = torch.tensor(padded, dtype=torch.float64, device="cpu")
        self._next[there] = torch.tensor([len(values) % size for values in rows], device="cpu")


class _LevelShifts:
    """The most recent values of each signal, and which of them were spikes: lasting ones are a new level."""

    def __init__(self, signals: int) -> None:
        self._values = torch.zeros(signals, RECENT, dtype=torch.float64, device="cpu")
        self._flags = torch.zeros(signals, RECENT, dtype=torch.bool, device="cpu")
        self._count = torch.zeros(signals, dtype=torch.int64, device="cpu")

    def add(self, rows: Rows, positions: Tensor, spikes: Tensor) -> list[int]:
        """Store the last value of ``rows``; return the rows with a new level."""
        self._values[rows] = torch.cat([self._values[rows, 1:], positions[rows].unsqueeze(1)], dim=1)
        self._flags[rows] = torch.cat([self._flags[rows, 1:], spikes[rows].unsqueeze(1)], dim=1)
        self._count[rows] = (self._count[rows] + 1).clamp_(max=RECENT)
        number = self._flags.sum(dim=1)
        lasting = (number >= ACCEPT_IN_THE_END) & (self._count == RECENT) & self._flags[:, 0]
        changed = lasting | (spikes & (number >= ACCEPT_AT_ONCE))
        touched = torch.zeros_like(changed)
        touched[rows] = True
        return (changed & touched).nonzero().squeeze(1).tolist()

    def take(self, row: int) -> list[float]:
        """The values of the new level of one signal, whose values are then forgotten."""
        values, flags = zip(*self.values(row), strict=True)
        self.load(row, [])
        return list(values[flags.index(True) :])

    def values(self, row: int) -> list[list[Any]]:
        """The values of one signal with their flags, oldest first."""
        recent = zip(self._values[row].tolist(), self._flags[row].tolist(), strict=True)
        return [[position, flag] for position, flag in recent][RECENT - int(self._count[row]) :]

    def load(self, row: int, values: Sequence[Sequence[Any]]) -> None:
        """The inverse of :meth:`values`."""
        self._count[row], self._flags[row] = len(values), False
        for place, (position, flag) in enumerate(reversed(values), start=1):
            self._values[row, -place], self._flags[row, -place] = position, flag


class HampelBank:
    """:class:`Hampel` for a fixed number of signals that are never negative.

    Args:
        like: a rule with the settings to use; its state is ignored.
        signals: number of signals.
    """

    def __init__(self, like: Hampel, signals: int) -> None:
        self.threshold, self._least, self._early = like.threshold, math.log(like.least), like.early
        sizes, self._signals = like.sizes, signals
        self._sizes = sizes
        self._near, self._far = SortedWindowBank(signals, sizes["near"]), SortedWindowBank(signals, sizes["far"])
        self._residuals = SortedWindowBank(2 * signals, sizes["window"])  # to the near medians, then to the far ones
        self._between = _RingBuffers(signals, sizes["lag"], torch.inf)  # of the near window and the far one
        self._peaks = _RingBuffers(signals, sizes["window"], -torch.inf)  # values above the threshold, -inf for the others
        self._shifts = _LevelShifts(signals)
        self._count = torch.zeros(signals, dtype=torch.int64, device="cpu")

    def update(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Score ``values``, float64 ``[signals]`` on the CPU, then learn them.

        Returns:
            The scores, infinite for NaN and Inf, NaN if there is none yet; which values are spikes; and the logarithms of the usual
            values before, infinite if unknown. All ``[signals]``.
        """
        finite, positions, medians, scores, spikes = self._judge(values)
        judged, calm = chosen_rows(finite), finite & ~spikes
        self._peaks.add(judged, torch.where(scores >= self.threshold, positions, -torch.inf)[judged])
        known = torch.stack([self._near.count, self._far.count]) >= FIRST
        rows = chosen_rows((known & calm).view(-1))
        self._residuals.add(rows, (positions - medians).view(-1)[rows])
        leaving = self._between.oldest()
        rows = chosen_rows(calm & (leaving < torch.inf))
        self._far.add(rows, leaving[rows])
        rows = chosen_rows(calm)
        self._near.add(rows, positions[rows])
        self._between.add(rows, positions[rows])
        self._count += calm
        for row in self._shifts.add(judged, positions, spikes):
            level = self._shifts.take(row)
            self._near.load(row, [level])
            self._far.load(row, [level])
            self._between.load(row, [[]])
        return torch.where(finite, scores, torch.inf), spikes | ~finite, medians[0]

    def predict(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What :meth:`update` would return. Nothing is learned."""
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
        return torch.where(self._count >= JUDGES, scores, torch.nan)

    def _excuse(self, scores: Tensor, positions: Tensor) -> None:
        """Lower the scores of usual heights to the threshold."""
        high = (scores > self.threshold).nonzero().squeeze(1)
        if len(high):
            nearly = (positions[high] - self._least).unsqueeze(1)
            usual = (self._peaks.values[high] >= nearly).sum(dim=1) >= USUAL
            scores[high[usual]] = self.threshold

    # --- the state of single rules ------------------------------------------------------------------------------------------------

    def state(self, signal: int) -> dict[str, Any]:
        """The :meth:`Hampel.state_dict` of one signal."""
        return {
            "near": self._near.values(signal),
            "far": self._far.values(signal),
            "near_residuals": self._residuals.values(signal),
            "far_residuals": self._residuals.values(signal + self._signals),
            "between": [value for value in self._between.ordered(signal) if value < math.inf],
            "recent": self._shifts.values(signal),
            "peaks": [None if peak == -math.inf else peak for peak in self._peaks.ordered(signal)],
            "count": int(self._count[signal]),
            "linear": False,
            "sizes": self._sizes,
        }

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """The inverse of :meth:`state`, for all signals."""
        self._near.load(0, [state["near"] for state in states])
        self._far.load(0, [state["far"] for state in states])
        self._residuals.load(0, [state["near_residuals"] for state in states])
        self._residuals.load(self._signals, [state["far_residuals"] for state in states])
        self._between.load(0, [state["between"] for state in states])
        self._peaks.load(0, [[-math.inf if peak is None else peak for peak in state["peaks"]] for state in states])
        for signal, state in enumerate(states):
            self._shifts.load(signal, state["recent"])
            self._count[signal] = state["count"]

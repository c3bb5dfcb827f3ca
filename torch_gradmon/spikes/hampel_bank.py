"""The default rule for many signals at once, such as one norm per layer: the same verdicts in a few dozen tensor operations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from .sorted_window_bank import Rows, SortedWindowBank, chosen_rows


def _put(target: Tensor, rows: Rows, places: Tensor, values: Tensor) -> None:
    """Set one value per row of ``target``."""
    if isinstance(rows, Tensor):
        target[rows, places] = values
    else:
        target.scatter_(1, places.unsqueeze(1), values.unsqueeze(1))


class HampelBank:
    """:class:`Hampel` for a fixed number of signals that are never negative.

    Args:
        like: a rule with the settings to use; its state is ignored.
        signals: number of signals.
    """

    def __init__(self, like: Hampel, signals: int) -> None:
        self.threshold, self._least, self._early = like.threshold, math.log(like.least), like.early
        sizes = self._sizes = like.sizes
        self._signals, self._lag = signals, sizes["lag"]
        self._near, self._far = SortedWindowBank(signals, sizes["near"]), SortedWindowBank(signals, sizes["far"])
        self._residuals = SortedWindowBank(2 * signals, sizes["window"])  # to the near medians, then to the far ones
        self._between = torch.zeros(signals, self._lag, dtype=torch.float64, device="cpu")
        self._recent = torch.zeros(signals, RECENT, dtype=torch.float64, device="cpu")
        self._flags = torch.zeros(signals, RECENT, dtype=torch.bool, device="cpu")
        # values above the threshold, -inf for the others
        self._peaks = torch.full((signals, sizes["window"]), -torch.inf, dtype=torch.float64, device="cpu")
        self._turn = torch.zeros(signals, dtype=torch.int64, device="cpu")
        self._queued, self._seen, self._count = (torch.zeros(signals, dtype=torch.int64, device="cpu") for _ in range(3))

    def update(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Score ``values``, float64 ``[signals]`` on the CPU, then learn them.

        Returns:
            The scores, infinite for NaN and Inf, NaN if there is none yet; which values are spikes; and the logarithms of the usual
            values before, infinite if unknown. All ``[signals]``.
        """
        finite, positions, medians, scores, spikes = self._judge(values)
        rows = chosen_rows(finite)
        _put(self._peaks, rows, self._turn[rows], torch.where(scores >= self.threshold, positions, -torch.inf)[rows])
        self._turn[rows] = (self._turn[rows] + 1) % self._peaks.shape[1]
        self._learn(finite & ~spikes, positions, medians)
        for row in self._remember(rows, positions, spikes):
            self._accept(row)
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
        return torch.where(self._count >= FIRST, scores, torch.nan)

    def _excuse(self, scores: Tensor, positions: Tensor) -> None:
        """Lower the scores of usual heights to the threshold."""
        high = (scores > self.threshold).nonzero().squeeze(1)
        if len(high):
            nearly = (positions[high] - self._least).unsqueeze(1)
            usual = (self._peaks[high] >= nearly).sum(dim=1) >= USUAL
            scores[high[usual]] = self.threshold

    def _learn(self, calm: Tensor, positions: Tensor, medians: Tensor) -> None:
        known = torch.stack([self._near.count, self._far.count]) >= FIRST
        rows = chosen_rows((known & calm).view(-1))
        self._residuals.add(rows, (positions - medians).view(-1)[rows])
        slots = self._queued % self._lag
        waited = chosen_rows(calm & (self._queued >= self._lag))
        self._far.add(waited, self._between.gather(1, slots.unsqueeze(1)).squeeze(1)[waited])
        rows = chosen_rows(calm)
        self._near.add(rows, positions[rows])
        _put(self._between, rows, slots[rows], positions[rows])
        self._queued += calm
        self._count += calm

    def _remember(self, rows: Rows, positions: Tensor, spikes: Tensor) -> list[int]:
        """Store the last value of ``rows``; return the rows with a new level."""
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

    # --- the state of single rules ------------------------------------------------------------------------------------------------

    def state(self, signal: int) -> dict[str, Any]:
        """The :meth:`Hampel.state_dict` of one signal."""
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
        """The inverse of :meth:`state`, for all signals."""
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

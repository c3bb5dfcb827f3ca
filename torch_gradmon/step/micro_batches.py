"""The gradients of single micro-batches: which one stands out, and how noisy they are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from ..core.formatting import times
from ..core.moments import Column
from ..core.records import StatsTable

#: What each whole-model value means.
DOCUMENTATION = {
    "noise_scale": (
        "gradient noise scale: the batch size, in examples, from which on larger batches bring less than they cost; smoothed over "
        "some hundred steps"
    ),
    "batch_norm_max": "largest L2 norm among the gradients of single micro-batches, of all ranks",
}
#: Decay of the running means whose quotient is the noise scale.
_DECAY = 0.99
#: Factor above the median of the others from which on a micro-batch stands out.
_STANDS_OUT = 3.0
_NOT_SEEN = (
    "no gradient of a micro-batch was seen: it takes a backward pass, the hooks that attach() installs, and the whole model on "
    "each rank"
)


class MicroBatchStats:
    """Compares the gradients of micro-batches with that of the whole batch.

    From the squared gradient norms of a batch of ``b`` examples, as a mean, and of one of ``B``, unbiased estimates are
    ``G2 = (B norm2(B) - b norm2(b)) / (B - b)`` of the squared norm of the true gradient and
    ``S = (norm2(b) - norm2(B)) / (1 / b - 1 / B)`` of the trace of the covariance of single examples' gradients. Both are averaged over
    steps, and ``S / G2`` is the noise scale (McCandlish and others 2018, An Empirical Model of Large-Batch Training, arXiv 1812.06162,
    appendix A). The small batches are the micro-batches of all ranks, the large one is all of them together.

    Args:
        batch_size: examples in a micro-batch of one rank.
    """

    def __init__(self, batch_size: int) -> None:
        self._size = batch_size
        self._signal = self._noise = self._weight = 0.0

    def compute(
        self, norms: Mapping[str, Sequence[float]], whole: float | None, ranks: int, absent: MutableMapping[str, str]
    ) -> dict[str, float]:
        """The values of one step by name.

        Args:
            norms: of the gradients of micro-batches, by rank.
            whole: norm of the gradient of all of them; None if unknown.
            ranks: number of ranks.
            absent: gets a reason for each missing value.
        """
        every = [norm for each in norms.values() for norm in each]
        if ranks == 1 and not every:
            absent.update(dict.fromkeys(DOCUMENTATION, _NOT_SEEN))
            return {}
        if len(norms) != ranks or not every:
            reason = (
                "not every rank has reported its micro-batches: where ranks have parts of the model, gradients are measured only once they "
                "are reduced"
            )
            absent.update(dict.fromkeys(DOCUMENTATION, reason))
            return {}
        values = {"batch_norm_max": max(every) if not any(map(math.isnan, every)) else math.nan}
        if len(every) == 1:
            absent["noise_scale"] = "there is only one micro-batch, and nothing smaller to compare with"
        elif whole is None or not math.isfinite(whole) or not all(map(math.isfinite, every)):
            absent["noise_scale"] = "a gradient is not finite, or was not measured"
        else:
            # the whole gradient is the mean over ranks of the sums over micro-batches, whatever the loss is divided by
            share = len(every) / ranks
            self._learn(statistics.fmean((share * norm) ** 2 for norm in every), whole**2, len(every))
            if self._signal > 0:
                values["noise_scale"] = self._noise / self._signal
            else:
                absent["noise_scale"] = "so far the noise of the micro-batches hides the gradient"
        return values

    def _learn(self, small: float, large: float, count: int) -> None:
        few, many = self._size, self._size * count
        signal = (many * large - few * small) / (many - few)
        noise = (small - large) / (1 / few - 1 / many)
        self._weight = _DECAY * self._weight + (1 - _DECAY)
        step = (1 - _DECAY) / self._weight
        self._signal += step * (signal - self._signal)
        self._noise += step * (noise - self._noise)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"signal": self._signal, "noise": self._noise, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._signal, self._noise, self._weight = (float(state[name]) for name in ("signal", "noise", "weight"))


def norms_by_rank(table: StatsTable) -> dict[str, list[float]]:
    """The norms of each rank in the order of its micro-batches, from rows named by rank and number, such as ``1/0``."""
    found: dict[str, dict[int, float]] = {}
    for name, square in zip(table.names, table.rows[:, Column.SQUARE_SUM].tolist(), strict=True):
        rank, _, number = name.partition("/")
        found.setdefault(rank, {})[int(number)] = math.sqrt(square) if square == square else math.nan
    return {
        rank: [each[number] for number in sorted(each)] for rank, each in sorted(found.items(), key=lambda item: int(item[0]))
    }


def rank_norms_text(norms: Mapping[str, Sequence[float]]) -> str:
    """Which micro-batch stands out, as part of a sentence about a spike; empty with fewer than two."""
    every = [(number, int(rank), norm) for rank, each in norms.items() for number, norm in enumerate(each)]
    if len(every) < 2:
        return ""
    spoiled = sorted((number, rank) for number, rank, norm in every if not math.isfinite(norm))
    if spoiled:
        number, rank = spoiled[0]
        return f"of {len(every)} micro-batches {len(spoiled)} brought NaN or Inf, first number {number} of rank {rank}"
    number, rank, worst = max(every, key=lambda each: each[2])
    usual = statistics.median(norm for *where, norm in every if where != [number, rank])
    if worst < _STANDS_OUT * usual or not usual:
        return f"all {len(every)} micro-batches are alike"
    return f"micro-batch {number} of rank {rank} has {times(worst / usual)} the norm of the {len(every) - 1} others"

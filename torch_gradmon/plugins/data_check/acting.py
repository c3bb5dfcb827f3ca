"""Whether a model acts between the steps of its training, as a policy does: its data then depend on it, and its loss need not fall."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: The least share of rows in calls without gradients among all rows, and of steps before which there were some.
_ROWS, _STEPS = 1 / 12, 1 / 32
#: Elements of an input that are compared with those of earlier ones, and how many of these are kept.
_COMPARED, _KEPT = 16, 4096


class Acting:
    """Counts calls in training mode without gradients, of fewer rows of floating point than a batch of the training has.

    A validation on the same rows each time is none, nor are tokens, which a language model samples.
    """

    def __init__(self) -> None:
        self._small: dict[int, int] = {}  # calls by number of rows
        self._trained = self._batch = self._steps = self._repeats = self._calls = 0
        self._before = 0  # steps that such calls came before
        self._seen: set[tuple[float, ...]] = set()
        self._is_new = False

    def trained(self, tensors: Sequence[Tensor]) -> None:
        """A step of the training begins, with these inputs."""
        rows = _rows(tensors)
        self._trained, self._batch, self._steps = self._trained + rows, max(self._batch, rows), self._steps + 1
        self._before, self._is_new = self._before + self._is_new, False

    def called(self, tensors: Sequence[Tensor]) -> None:
        """The model is called without gradients. Synchronises nothing: inputs on a device are taken for new ones."""
        first = next((tensor for tensor in tensors if torch.is_floating_point(tensor)), None)
        if first is None or not first.ndim:
            return
        self._calls, self._is_new = self._calls + 1, True
        self._small[len(first)] = self._small.get(len(first), 0) + 1
        if first.device.type == "cpu":
            beginning = tuple(first.detach().reshape(-1)[:_COMPARED].tolist())
            self._repeats += beginning in self._seen
            if len(self._seen) < _KEPT:
                self._seen.add(beginning)

    @property
    def is_so(self) -> bool:
        """Whether it acts, as far as is known."""
        rows = sum(rows * calls for rows, calls in self._small.items() if 2 * rows < self._batch)
        is_often = rows > _ROWS * (rows + self._trained) and self._before > max(1.0, _STEPS * self._steps)
        return is_often and 10 * self._repeats < self._calls


def _rows(tensors: Sequence[Tensor]) -> int:
    return max((len(tensor) for tensor in tensors if tensor.ndim), default=0)

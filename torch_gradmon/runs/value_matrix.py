"""Values of several steps as a matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.keys import Key

#: A matrix of steps by names may have so many cells, or so many for each value that is stored: a run of a few bytes can have one step with
#: thousands of tensors, and thousands of steps with another one.
_CELLS, _PER_VALUE = 1 << 22, 16


def most_cells(values: int) -> int:
    """How many cells a matrix of so many values may have."""
    return max(_CELLS, _PER_VALUE * values)


def fitting(values: Mapping[str, int], steps: int) -> tuple[str, ...]:
    """The columns of a matrix of so many steps, in the order of ``values``, which has how many values each has.

    These are all, unless nearly all cells were empty and there are more than :func:`most_cells`; then those with the most values.
    """
    most = most_cells(sum(values.values())) // max(steps, 1)
    if len(values) <= most:
        return tuple(values)
    kept = set(sorted(values, key=lambda name: -values[name])[:most])
    return tuple(name for name in values if name in kept)


@dataclass(frozen=True)
class ValueMatrix:
    """Values of some steps.

    Attributes:
        keys: of the columns.
        values: float64 ``[steps, keys]``; NaN where absent.
        there: bool ``[steps, keys]``; which values are present. A present value may be NaN.
    """

    keys: tuple[Key, ...]
    values: Tensor
    there: Tensor

    def columns(self, chosen: Sequence[int]) -> ValueMatrix:
        """The columns ``chosen``."""
        if tuple(chosen) == tuple(range(len(self.keys))):
            return self
        return ValueMatrix(tuple(self.keys[column] for column in chosen), self.values[:, chosen], self.there[:, chosen])

    def with_absent(self, keys: Sequence[Key]) -> ValueMatrix:
        """With empty columns for ``keys`` appended."""
        if not keys:
            return self
        count = len(keys)
        return ValueMatrix((*self.keys, *keys), _padded(self.values, count, torch.nan), _padded(self.there, count, False))

    def overlaid(self, other: ValueMatrix) -> ValueMatrix:
        """With the values of ``other`` in place of its own; keys that only ``other`` has are appended."""
        place = {key: column for column, key in enumerate(dict.fromkeys((*self.keys, *other.keys)))}
        new = len(place) - len(self.keys)
        values, there = _padded(self.values, new, torch.nan), _padded(self.there, new, False)
        columns = torch.tensor([place[key] for key in other.keys], dtype=torch.int64, device="cpu")
        values[:, columns] = torch.where(other.there, other.values, values[:, columns])
        there[:, columns] |= other.there
        return ValueMatrix(tuple(place), values, there)


def empty_matrix(*shape: int) -> tuple[Tensor, Tensor]:
    """Absent values of a shape: NaN, float64, and which of them are present: none."""
    return torch.full(shape, torch.nan, dtype=torch.float64, device="cpu"), torch.zeros(shape, dtype=torch.bool, device="cpu")


def _padded(values: Tensor, columns: int, fill: float) -> Tensor:
    return torch.cat([values, values.new_full((len(values), columns), fill)], dim=1)

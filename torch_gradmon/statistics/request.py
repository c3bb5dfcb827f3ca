"""What is to be measured: tensors, what to do to them first, and what is wanted of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..core.errors import NotMeasurable
from ..core.moments import Column
from .tensor_access import LARGEST_SQUARED, NARROW, SMALLEST_SQUARED, are_plain, flat_pair, flat_values, is_plain


@dataclass(frozen=True)
class Request:
    """What is wanted of tensors.

    Attributes:
        columns: those that are needed.
        eps: an element counts as near zero when ``|x| <= eps``.
        inverse_scale: 0-d tensor that multiplies every element first, or None.
    """

    columns: frozenset[Column]
    eps: float
    inverse_scale: Tensor | None

    @cached_property
    def squares(self) -> bool:
        """Whether squares are to be summed."""
        return Column.SQUARE_SUM in self.columns

    @cached_property
    def magnitudes(self) -> bool:
        """Whether a column of magnitudes is needed."""
        return not self.columns.isdisjoint((Column.ABS_SUM, Column.NEAR_ZERO))

    @cached_property
    def near_zero(self) -> bool:
        """Whether small magnitudes are to be counted."""
        return Column.NEAR_ZERO in self.columns

    def zeros_by_squares(self, dtype: torch.dtype) -> bool:
        """Whether small magnitudes can be counted by squares, which are there anyway, and nothing else needs magnitudes."""
        by_squares = self.near_zero and self.squares and Column.ABS_SUM not in self.columns
        return by_squares and dtype == torch.float32 and SMALLEST_SQUARED <= self.eps <= LARGEST_SQUARED

    @cached_property
    def extremes(self) -> bool:
        """Whether an extreme is needed."""
        return not self.columns.isdisjoint((Column.MIN, Column.MAX))

    @cached_property
    def sums(self) -> bool:
        """Whether elements are to be summed: also where nothing else would show that one is not finite."""
        return Column.SUM in self.columns or not (self.squares or self.magnitudes or self.extremes)

    def unscaled(self, values: Tensor) -> Tensor:
        """``values`` times the inverse scale: in float32 as ``GradScaler.unscale_`` does, float64 for wider input."""
        if self.inverse_scale is None:
            return values
        dtype = torch.float32 if values.dtype in NARROW else torch.float64
        return values.to(dtype) * self.inverse_scale.to(dtype)


@dataclass
class Batch:
    """Tensors to be measured together; where one is not plain, its numbers as one dimension.

    Attributes:
        values: the tensors.
        minus: what is to be subtracted from each, of the same shape, or None for nothing.
        wide: whether float32 would lose numbers of the tensor, for each.
        zeros: how many zeros a sparse tensor implies, by position.
    """

    values: list[Tensor]
    minus: list[Tensor] | None
    wide: list[bool]
    zeros: dict[int, int]

    @classmethod
    def read(cls, tensors: Sequence[Tensor], minus: Sequence[Tensor] | None) -> Batch:
        """The batch of these tensors.

        Raises:
            NotMeasurable: a tensor without readable local values.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise NotMeasurable("inside a torch.func transform")
        values = list(tensors)
        others = None if minus is None else list(minus)
        zeros: dict[int, int] = {}
        if not (are_plain(values) and (others is None or are_plain(others))):
            for index, tensor in enumerate(values):
                if others is not None:
                    if not (is_plain(tensor) and is_plain(others[index])):
                        values[index], others[index] = flat_pair(tensor, others[index])
                elif not is_plain(tensor):
                    values[index], implied = flat_values(tensor)
                    if implied:
                        zeros[index] = implied
        wide = [tensor.dtype not in NARROW for tensor in values]
        if others is not None:
            wide = [one or other.dtype not in NARROW for one, other in zip(wide, others, strict=True)]
        return cls(values, others, wide, zeros)

    def take(self, members: Sequence[int], widened: bool = False) -> Batch:
        """Some of the tensors, on request all of them to be measured in float64."""
        return Batch(
            [self.values[i] for i in members],
            None if self.minus is None else [self.minus[i] for i in members],
            [widened or self.wide[i] for i in members],
            {place: self.zeros[i] for place, i in enumerate(members) if i in self.zeros},
        )

    def flat(self, index: int) -> tuple[Tensor, Tensor | None]:
        """The numbers of one tensor as one dimension, and beside them what is to be subtracted."""
        if self.minus is None:
            return flat_values(self.values[index])[0], None
        return flat_pair(self.values[index], self.minus[index])

    def add_implicit_zeros(self, rows: Tensor) -> Tensor:
        """``rows`` of the stored numbers, ``[n, 8]``, with the zeros that sparse tensors imply; changed in place."""
        for index, count in self.zeros.items():
            rows[index, [Column.COUNT, Column.NEAR_ZERO]] += count
            rows[index, Column.MIN].clamp_(max=0)
            rows[index, Column.MAX].clamp_(min=0)
        return rows

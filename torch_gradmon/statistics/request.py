"""The interface of the backends: the request, the tensors as a batch, and ``measure``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..core.errors import NotMeasurable
from ..core.moments import ALL_COLUMNS, Column
from .tensor_access import (
    LARGEST_SQUARED,
    NARROW,
    SMALLEST_SQUARED,
    as_plain,
    dtypes_of,
    flat_pair,
    flat_values,
    is_plain,
)

DEFAULT_EPS = 1e-8


@dataclass(frozen=True)
class Request:
    """What to compute.

    Attributes:
        columns: needed columns; the others hold their identity, or values that cost nothing extra. COUNT and NONFINITE are always exact.
        eps: an element counts as near zero when ``|x| <= eps``.
        inverse_scale: 0-d tensor that multiplies every element first, in float32 as ``GradScaler.unscale_`` does, or None.
    """

    columns: frozenset[Column] = ALL_COLUMNS
    eps: float = DEFAULT_EPS
    inverse_scale: Tensor | None = None

    @cached_property
    def squares(self) -> bool:
        """Whether to sum squares."""
        return Column.SQUARE_SUM in self.columns

    @cached_property
    def magnitudes(self) -> bool:
        """Whether any column needs magnitudes."""
        return not self.columns.isdisjoint((Column.ABS_SUM, Column.NEAR_ZERO))

    @cached_property
    def near_zero(self) -> bool:
        """Whether to count small magnitudes."""
        return Column.NEAR_ZERO in self.columns

    def zeros_by_squares(self, dtype: torch.dtype) -> bool:
        """Whether squares can count small magnitudes, so that no magnitudes are needed."""
        by_squares = self.near_zero and self.squares and Column.ABS_SUM not in self.columns
        return by_squares and dtype == torch.float32 and SMALLEST_SQUARED <= self.eps <= LARGEST_SQUARED

    @cached_property
    def extremes(self) -> bool:
        """Whether any column needs extremes."""
        return not self.columns.isdisjoint((Column.MIN, Column.MAX))

    @cached_property
    def sums(self) -> bool:
        """Whether to sum elements; also if nothing else would show a non-finite one."""
        return Column.SUM in self.columns or not (self.squares or self.magnitudes or self.extremes)

    def unscaled(self, values: Tensor) -> Tensor:
        """``values`` times the inverse scale: in float32 as ``GradScaler.unscale_`` does, float64 for wider input."""
        if self.inverse_scale is None:
            return values
        dtype = torch.float32 if values.dtype in NARROW else torch.float64
        return values.to(dtype) * self.inverse_scale.to(dtype)


class Backend:
    """Measures tensors on one device."""

    def measure(
        self,
        tensors: Sequence[Tensor],
        columns: frozenset[Column] = ALL_COLUMNS,
        *,
        eps: float = DEFAULT_EPS,
        inverse_scale: Tensor | None = None,
        minus: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """:meth:`rows` with the fields of the :class:`Request` as arguments."""
        return self.rows(tensors, Request(columns, eps, inverse_scale), minus)

    def rows(self, tensors: Sequence[Tensor], request: Request, minus: Sequence[Tensor] | None = None) -> Tensor:
        """Statistics of each tensor.

        Args:
            tensors: on one device; any floating, integer or complex dtype, dense or sparse, any strides, any size. Complex tensors count as
                twice as many real numbers; a sparse tensor counts its implicit zeros.
            request: what to compute.
            minus: tensors to subtract, of the same shapes; the difference is rounded once, to float32 (float64 for float64).

        Returns:
            ``[len(tensors), 8]`` on the tensors' device, float64 (float32 if the device has none). Does not synchronise.

        Raises:
            NotMeasurable: a tensor without readable local values (meta, nested, sharded, inside a functorch transform).
        """
        raise NotImplementedError

    def inner_products(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
        """The sum of ``a * b`` of each pair of tensors of one shape, all on one device: ``[n]``, in float64 if the device has it. Does not
        synchronise.

        Raises:
            NotMeasurable: one of them has no readable local values.
        """
        raise NotImplementedError


@dataclass
class Batch:
    """Tensors to be measured together. A tensor that is not plain is flattened.

    Attributes:
        values: the tensors.
        minus: tensors of the same shapes to subtract, or None.
        wide: for each tensor, whether float32 cannot hold its numbers.
        zeros: number of implicit zeros of sparse tensors, by position.
    """

    values: list[Tensor]
    minus: list[Tensor] | None
    wide: list[bool]
    zeros: dict[int, int]

    @classmethod
    def read(cls, tensors: Sequence[Tensor], minus: Sequence[Tensor] | None) -> Batch:
        """The batch of ``tensors``.

        Raises:
            NotMeasurable: a tensor without readable local values.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise NotMeasurable("inside a torch.func transform")
        plain = as_plain(tensors)
        values = list(tensors) if plain is None else plain
        others = None if minus is None else list(minus)
        zeros: dict[int, int] = {}
        if plain is None or (others is not None and as_plain(others) is None):
            for index, tensor in enumerate(values):
                if others is not None:
                    if not (is_plain(tensor) and is_plain(others[index])):
                        values[index], others[index] = flat_pair(tensor, others[index])
                elif not is_plain(tensor):
                    values[index], implied = flat_values(tensor)
                    if implied:
                        zeros[index] = implied
        wide = [False] * len(values)
        if not (dtypes_of(values) if plain is None else plain.dtypes) <= NARROW:
            wide = [tensor.dtype not in NARROW for tensor in values]
        if others is not None:
            wide = [one or other.dtype not in NARROW for one, other in zip(wide, others, strict=True)]
        return cls(values, others, wide, zeros)

    def take(self, members: Sequence[int], widened: bool = False) -> Batch:
        """Some of the tensors; ``widened`` measures all of them in float64."""
        return Batch(
            [self.values[i] for i in members],
            None if self.minus is None else [self.minus[i] for i in members],
            [widened or self.wide[i] for i in members],
            {place: self.zeros[i] for place, i in enumerate(members) if i in self.zeros},
        )

    def flat(self, index: int) -> tuple[Tensor, Tensor | None]:
        """One tensor flattened, with what to subtract."""
        if self.minus is None:
            return flat_values(self.values[index])[0], None
        return flat_pair(self.values[index], self.minus[index])

    def add_implicit_zeros(self, rows: Tensor) -> Tensor:
        """Count the implicit zeros of sparse tensors in ``rows`` ``[n, 8]``, in place."""
        for index, count in self.zeros.items():
            rows[index, [Column.COUNT, Column.NEAR_ZERO]] += count
            rows[index, Column.MIN].clamp_(max=0)
            rows[index, Column.MAX].clamp_(min=0)
        return rows

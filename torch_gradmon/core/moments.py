"""Sufficient statistics: the contents of a row, how rows merge, and the built-in metrics as views of a row.

A row describes one tensor in eight numbers. Each column has one associative operation with an identity, so micro-batches, shards and ranks
merge in the same few lines, and a built-in metric is arithmetic on a row, never another pass over the tensor. Extremes and the near-zero
count are of the finite elements. Sums are of all elements, so they become NaN or infinite exactly when torch's own would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Column(IntEnum):
    """The columns of a row, float64 if the device has it."""

    COUNT = 0  #: number of elements
    SUM = 1  #: sum of x
    ABS_SUM = 2  #: sum of |x|
    SQUARE_SUM = 3  #: sum of x * x
    NEAR_ZERO = 4  #: number of elements with |x| <= eps
    NONFINITE = 5  #: number of NaN and infinite elements
    MIN = 6  #: smallest finite element
    MAX = 7  #: largest finite element


#: Columns below this one merge by SUM; then come MIN and MAX.
SUMMED = Column.MIN
WIDTH = len(Column)
ALL_COLUMNS = frozenset(Column)
#: Exact in every row, whatever was requested.
ALWAYS = frozenset({Column.COUNT, Column.NONFINITE})
#: Columns of the parameters that updates are compared with.
SQUARES = frozenset({Column.COUNT, Column.SQUARE_SUM})


_IDENTITY = torch.tensor([0.0] * SUMMED + [torch.inf, -torch.inf], dtype=torch.float64, device="cpu")


def identity(rows: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows of empty tensors, the identity of :func:`merge`: shape ``[rows, 8]``."""
    if dtype == torch.float64 and torch.device(device).type == "cpu":
        return _IDENTITY.repeat(rows, 1)
    empty = torch.zeros(rows, WIDTH, dtype=dtype, device=device)
    empty[:, Column.MIN] = torch.inf
    empty[:, Column.MAX] = -torch.inf
    return empty


def merge(stacked: Tensor) -> Tensor:
    """Merge rows along the first dimension: ``[k, ..., 8]`` becomes ``[..., 8]``. Associative and commutative."""
    merged = stacked.sum(dim=0)
    merged[..., Column.MIN] = stacked[..., Column.MIN].amin(dim=0)
    merged[..., Column.MAX] = stacked[..., Column.MAX].amax(dim=0)
    return merged


def merge_by_group(rows: Tensor, groups: Sequence[int] | Tensor, count: int) -> Tensor:
    """Merge rows ``[n, 8]`` with equal group numbers into ``[count, 8]``; an empty group gives the identity."""
    return from_columns(dict(zip(Column, rows.unbind(1), strict=True)), groups, count)


def from_columns(columns: Mapping[Column, Tensor], groups: Sequence[int] | Tensor | None, count: int) -> Tensor:
    """Rows ``[count, 8]`` from columns ``[n]``, merged by group, or without groups one row per element.

    A missing column is that of the identity. float64 on the CPU, elsewhere the dtype of the columns.
    """
    some = next(iter(columns.values()))
    wide = torch.float64 if some.device.type == "cpu" else some.dtype
    merged = dict(zip(Column, identity(count, some.device, wide).unbind(1), strict=True))
    if groups is None:
        merged.update(columns)
        return torch.stack([column.to(wide) for column in merged.values()], dim=1)
    index = groups if isinstance(groups, Tensor) else torch.tensor(groups, dtype=torch.int64, device=some.device)
    for column, values in columns.items():
        if column < SUMMED:
            merged[column] = merged[column].index_add(0, index, values.to(wide))
        else:
            how = "amin" if column is Column.MIN else "amax"
            merged[column] = merged[column].scatter_reduce(0, index, values.to(wide), how)
    return torch.stack(list(merged.values()), dim=1)


@dataclass(frozen=True)
class StatView:
    """A built-in metric: arithmetic on a row."""

    columns: frozenset[Column]  # those that it needs
    of: Callable[[Sequence[Tensor]], Tensor]  # the columns of rows on the host, each ``[n]``, to values ``[n]``
    needs: str  # ``""``, ``"elements"`` or ``"finite elements"``; without them the value is undefined and its key absent
    unit: str  # of the value, for axes
    documentation: str  # one line

    def compute(self, rows: Tensor) -> Tensor:
        """The values ``[n]`` of rows ``[n, 8]`` on the host."""
        return self.of(rows.unbind(1))

    def defined(self, rows: Tensor) -> Tensor:
        """Which rows ``[n, 8]`` have this value: bool ``[n]``."""
        return have(self.needs, rows.unbind(1))


#: What a view may need of a tensor, from less to more, and the columns that tell whether it is there.
NEEDS: dict[str, tuple[Column, ...]] = {"": (), "elements": (Column.COUNT,), "finite elements": (Column.COUNT, Column.NONFINITE)}


def have(needs: str, columns: Sequence[Tensor]) -> Tensor:
    """Which rows, given by their columns, have what a view ``needs``: bool ``[n]``."""
    if not needs:
        return torch.ones_like(columns[Column.COUNT], dtype=torch.bool)
    return columns[Column.COUNT] > (0 if needs == "elements" else columns[Column.NONFINITE])


def _mean(columns: Sequence[Tensor]) -> Tensor:
    return columns[Column.SUM] / columns[Column.COUNT]


def _std(columns: Sequence[Tensor]) -> Tensor:
    # E[x^2] - E[x]^2 is accurate enough with float64 sums: the error is about 3e-8 of rms, and 1e-7 is allowed
    squares = columns[Column.SQUARE_SUM]
    variance = squares / columns[Column.COUNT] - _mean(columns).square()
    # squares of finite elements may overflow, and that of their mean as well
    variance.masked_fill_((squares == torch.inf) & (columns[Column.NONFINITE] == 0), torch.inf)
    return variance.clamp_(min=0).sqrt()


def _view(
    columns: Iterable[Column], needs: str, unit: str, documentation: str, of: Callable[[Sequence[Tensor]], Tensor]
) -> StatView:
    return StatView(frozenset((*NEEDS[needs], *columns)), of, needs, unit, documentation)


_C = Column
#: All built-in metrics of a tensor. A complex tensor counts as twice as many real numbers.
VIEWS: dict[str, StatView] = {
    "norm": _view([_C.SQUARE_SUM], "", "1", "L2 norm", lambda c: c[_C.SQUARE_SUM].sqrt()),
    "rms": _view([_C.SQUARE_SUM], "elements", "1", "root of the mean square", lambda c: (c[_C.SQUARE_SUM] / c[_C.COUNT]).sqrt()),
    "mean": _view([_C.SUM], "elements", "1", "mean", _mean),
    "std": _view([_C.SUM, _C.SQUARE_SUM, _C.NONFINITE], "elements", "1", "population standard deviation", _std),
    "max": _view(
        [_C.MIN, _C.MAX],
        "finite elements",
        "1",
        "largest |x| of the finite elements",
        lambda c: torch.maximum(c[_C.MAX].abs(), c[_C.MIN].abs()),
    ),
    "min_value": _view([_C.MIN], "finite elements", "1", "smallest finite x", lambda c: c[_C.MIN]),
    "max_value": _view([_C.MAX], "finite elements", "1", "largest finite x", lambda c: c[_C.MAX]),
    "l1_norm": _view([_C.ABS_SUM], "", "1", "sum of |x|", lambda c: c[_C.ABS_SUM]),
    "sparsity": _view(
        [_C.NEAR_ZERO],
        "finite elements",
        "share",
        "share of the finite elements with |x| <= zero_threshold",
        lambda c: c[_C.NEAR_ZERO] / (c[_C.COUNT] - c[_C.NONFINITE]),
    ),
    "zero_count": _view([_C.NEAR_ZERO], "", "count", "number of elements with |x| <= zero_threshold", lambda c: c[_C.NEAR_ZERO]),
    "nonfinite_count": _view([_C.NONFINITE], "", "count", "number of NaN and infinite elements", lambda c: c[_C.NONFINITE]),
}

"""Pack statistics into blobs of float32.

The blob of a source and step has for each tensor: count (if it can change between steps), mean, spread (population standard deviation, or
rms if no sum was measured), mean of |x|, near-zero count, non-finite count, smallest and largest value. float32 keeps seven digits of each;
of raw sums it would lose the spread.
"""

from __future__ import annotations

import ctypes
import math
import sys
from array import array
from collections.abc import Mapping
from functools import cache, lru_cache

import torch

from ..core.keys import PARAMETER_SOURCES
from ..core.moments import ALWAYS, WIDTH, Column, identity
from ..core.records import StatsTable

#: The columns that are stored as means.
_TOTALS = slice(Column.SUM, Column.SQUARE_SUM + 1)


def fixed_counts(source: str, table: StatsTable) -> bytes:
    """The counts of a source whose tensors keep their size, as little-endian int64, to be stored once; empty for other sources."""
    return _integers(tuple(table.rows[:, Column.COUNT].tolist())) if source in PARAMETER_SOURCES else b""


@lru_cache(maxsize=8)  # in most steps they are those of the last one
def _integers(numbers: tuple[float, ...]) -> bytes:
    packed = array("q", map(int, numbers))
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _stored(columns: frozenset[Column], counted: bool) -> list[Column]:
    return sorted((columns | ALWAYS) - ({Column.COUNT} if counted else set()))


def pack(tables: Mapping[str, tuple[StatsTable, bool]]) -> dict[str, bytes]:
    """Each table, with its rows, as little-endian float32, tensor after tensor, measured columns in the order of :class:`Column`.

    All tables are packed together, since each operation on small tensors costs the same. Each comes with whether to leave out its counts,
    which are then stored with the layout.
    """
    if not tables:
        return {}
    rows = torch.cat([table.rows for table, _ in tables.values()])
    sizes = [len(table.names) for table, _ in tables.values()]
    for part, (table, _) in zip(torch.split(rows, sizes), tables.values(), strict=True):
        if Column.SUM not in table.columns:
            part[:, Column.SUM] = 0.0  # which makes the spread the rms
    rows[:, _TOTALS].div_(rows[:, : Column.COUNT + 1])
    columns = rows.unbind(1)
    count, mean, square = (columns[column] for column in (Column.COUNT, Column.SUM, Column.SQUARE_SUM))
    variance = (square - mean.square()).clamp_(min=0)
    if not all(math.isfinite(table.sums[Column.SQUARE_SUM]) for table, _ in tables.values()):
        # if the spread is not finite, store the mean square, which keeps NaN and infinity apart
        variance = torch.where(square.isfinite(), variance, square)
    torch.sqrt(variance, out=square)
    rows.masked_fill_((count <= 0).unsqueeze(1), 0.0)
    parts = torch.split(rows.to(torch.float32), sizes)
    return {
        source: _bytes_of(part.index_select(1, _index(table.columns, counted)))
        for part, (source, (table, counted)) in zip(parts, tables.items(), strict=True)
    }


@cache
def _index(columns: frozenset[Column], counted: bool) -> torch.Tensor:
    """The columns that are stored, as an index."""
    return torch.tensor(_stored(columns, counted), device="cpu")


def _bytes_of(numbers: torch.Tensor) -> bytes:
    """float32 in order, little-endian."""
    if sys.byteorder == "big":
        found = array("f", numbers.flatten().tolist())
        found.byteswap()
        return found.tobytes()
    return ctypes.string_at(numbers.data_ptr(), 4 * numbers.numel()) if numbers.numel() else b""


def unpack_steps(data: bytes, steps: int, tensors: int, columns: frozenset[Column], counts: bytes) -> torch.Tensor:
    """The inverse of :func:`pack` for the concatenated blobs of ``steps`` steps: rows ``[steps, tensors, 8]``, float64."""
    present = _stored(columns, bool(counts))
    rows = identity(steps * tensors).reshape(steps, tensors, WIDTH)
    if not rows.numel():
        return rows
    stored = _numbers("f", data, torch.float32).reshape(steps, tensors, len(present))
    rows[..., present] = stored.to(torch.float64)
    if counts:
        rows[..., Column.COUNT] = _numbers("q", counts, torch.int64).to(torch.float64)
    count, spread = rows[..., Column.COUNT].clone(), rows[..., Column.SQUARE_SUM].clone()
    mean = rows[..., Column.SUM].clone() if Column.SUM in columns else torch.zeros_like(count)
    rows[..., Column.SUM] *= count
    rows[..., Column.ABS_SUM] *= count
    rows[..., Column.SQUARE_SUM] = count * torch.where(spread.isfinite(), mean.square() + spread.square(), spread)
    empty = count == 0
    rows[empty] = identity(int(empty.sum()))
    return rows


def _numbers(code: str, data: bytes, dtype: torch.dtype) -> torch.Tensor:
    """Decode little-endian numbers, at least one."""
    numbers = array(code)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return torch.frombuffer(numbers, dtype=dtype)

"""Pack statistics into blobs of float32.

The blob of a source and step has for each tensor: count (if it can change between steps), mean, spread (population standard deviation, or
rms if no sum was measured), mean of |x|, near-zero count, non-finite count, smallest and largest value. float32 keeps seven digits of each;
of raw sums it would lose the spread.
"""

from __future__ import annotations

import sys
from array import array

import torch

from ..core.keys import PARAMETER_SOURCES
from ..core.moments import ALWAYS, WIDTH, Column, identity
from ..core.records import StatsTable


def fixed_counts(source: str, table: StatsTable) -> bytes:
    """The counts of a source whose tensors keep their size, as little-endian int64, to be stored once; empty for other sources."""
    if source not in PARAMETER_SOURCES:
        return b""
    counts = array("q", table.rows[:, Column.COUNT].to(torch.int64).tolist())
    if sys.byteorder == "big":
        counts.byteswap()
    return counts.tobytes()


def _stored(columns: frozenset[Column], counted: bool) -> list[Column]:
    return sorted((columns | ALWAYS) - ({Column.COUNT} if counted else set()))


def pack(table: StatsTable, counted: bool) -> bytes:
    """``table`` as little-endian float32, tensor after tensor, measured columns in the order of :class:`Column`.

    ``counted``: leave out the counts, which are stored with the layout.
    """
    rows, columns = table.rows, _stored(table.columns, counted)
    count = rows[:, Column.COUNT]
    per_element = rows.clone()
    per_element[:, Column.SUM] = rows[:, Column.SUM] / count
    per_element[:, Column.ABS_SUM] = rows[:, Column.ABS_SUM] / count
    mean_square = rows[:, Column.SQUARE_SUM] / count
    if Column.SUM in table.columns:
        variance = (mean_square - per_element[:, Column.SUM].square()).clamp(min=0)
        # if the spread is not finite, store the mean square, which keeps NaN and infinity apart
        per_element[:, Column.SQUARE_SUM] = torch.where(mean_square.isfinite(), variance, mean_square).sqrt()
    else:
        per_element[:, Column.SQUARE_SUM] = mean_square.sqrt()
    per_element = torch.where(count.unsqueeze(1) > 0, per_element, 0.0)
    packed = array("f", per_element[:, columns].to(torch.float32).flatten().tolist())
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


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

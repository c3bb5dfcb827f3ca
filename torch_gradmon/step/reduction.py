"""Values of one key: what a micro-batch contributes, how contributions merge, and the final number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.keys import UNDEFINED, Key
from ..core.moments import Column, identity
from ..statistics.tensor_access import accumulator_dtype, refusal

Aggregation = str | Callable[..., Any]


@dataclass
class PendingValue:
    """Values of one key until the end of the step."""

    aggregation: Aggregation
    parts: list[Tensor]  # per micro-batch: [sum, count], one value, or all values, by aggregation


def as_tensor(value: Any, key: Key) -> Tensor:
    """A number or a tensor as one dimension, in the widest floating dtype of its device.

    Raises:
        TypeError: it is neither, or not real.
        ValueError: it has no elements.
    """
    if isinstance(value, Tensor):
        if (reason := refusal(value)) is not None:
            raise TypeError(f"the value of {'/'.join(filter(None, key))} cannot be read: {reason}")
        if value.is_complex():
            raise TypeError(f"the value of {'/'.join(filter(None, key))} is complex; return a real number, such as its abs()")
        if value.numel() == 0:
            raise ValueError(f"the value of {'/'.join(filter(None, key))} has no elements")
        flat: Tensor = value.detach().to(accumulator_dtype(value.device)).reshape(-1)
        return flat
    try:
        return torch.tensor([float(value)], dtype=torch.float64, device="cpu")
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the value of {'/'.join(filter(None, key))} must be a number or a tensor, got {type(value).__name__}"
        ) from error


def part_of(values: Tensor, aggregation: Aggregation, weight: int = 1) -> Tensor:
    """The contribution of one micro-batch, reduced immediately, because the tensor may be modified later. In a mean, a single value counts
    ``weight`` times.
    """
    if aggregation == "mean":
        return torch.stack([values.sum(), torch.full_like(values[0], values.numel())]) * (weight if values.numel() == 1 else 1)
    if aggregation == "sum":
        return values.sum().reshape(1)
    if aggregation == "min":
        return values.amin().reshape(1)
    if aggregation == "max":
        return values.amax().reshape(1)
    return values.clone()  # it may be a view of its source


def merged_parts(parts: list[Tensor], aggregation: str) -> Tensor:
    """Merge several contributions into one."""
    stacked = torch.stack(parts)
    if aggregation in ("mean", "sum"):
        return stacked.sum(dim=0)
    return stacked.amin(dim=0) if aggregation == "min" else stacked.amax(dim=0)


def cosine(product: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The cosine of two vectors from their inner products. Infinite if one is zero: that marks an undefined value on the device."""
    lengths = (first * second).sqrt()
    return torch.where(lengths == 0, UNDEFINED, product / lengths)


def turn(own: Tensor, product: Tensor, change: Tensor) -> Tensor:
    """The angle in radians between a vector and its sum with a change, from the inner products of the vector with itself, of both, and of
    the change with itself: exact for small angles too. Infinite if the vector or the sum is zero: that marks an undefined value.
    """
    across = (own * change - product.square()).clamp(min=0).sqrt()
    along = own + product
    return torch.where((own == 0) | ((across == 0) & (along == 0)), UNDEFINED, torch.atan2(across, along))


def growth(own: Tensor, product: Tensor, change: Tensor) -> Tensor:
    """How much longer a vector's sum with a change is, relative to the vector, from the same products. Infinite for a zero vector."""
    relative = (2 * product + change) / own
    return torch.where(own == 0, UNDEFINED, relative / ((1 + relative).clamp(min=0).sqrt() + 1))


def row_of_sums(sums: Tensor) -> Tensor:
    """Up to three sums that add up over ranks, as a row of statistics ``[8]``."""
    row = identity(1, sums.device, sums.dtype)[0]
    row[Column.COUNT] = 1
    row[Column.SUM : Column.SUM + len(sums)] = sums
    return row


def contribution(key: Key, pending: PendingValue, reducer: str) -> Tensor | None:
    """This rank's contribution to a value that ranks merge by ``reducer``, as a row of statistics ``[8]``; None if the aggregation function
    returned several values.
    """
    if pending.aggregation == reducer == "mean":  # weighted by how many values each rank has
        total, count = merged_parts(pending.parts, "mean").unbind()
    else:
        found = finished(key, pending)
        if list(found) != [key]:
            return None
        total, count = found[key], torch.ones_like(found[key])
    row = identity(1, total.device, total.dtype)[0]
    row[Column.COUNT] = count
    if reducer in _EXTREMES:  # min and max ignore NaN, so it is counted separately
        row[Column.NONFINITE] = total.isnan()
        row[_EXTREMES[reducer]] = torch.where(total.isnan(), row[_EXTREMES[reducer]], total)
    else:
        row[Column.SUM] = total
    return row


def part_from(row: Tensor, reducer: str) -> Tensor:
    """The inverse of :func:`contribution`: one part of a pending value, from the merged rows."""
    if reducer == "mean":
        return torch.stack([row[Column.SUM], row[Column.COUNT]])
    if reducer == "norm":
        return row[Column.SUM].sqrt().reshape(1)
    if reducer == "rms":
        return (row[Column.SUM] / row[Column.SUM + 1]).sqrt().reshape(1)
    if reducer in _OF_PRODUCTS:
        return _OF_PRODUCTS[reducer](*row[Column.SUM : Column.SUM + 3].unbind()).reshape(1)
    if reducer in _EXTREMES:
        return torch.where(row[Column.NONFINITE] > 0, torch.nan, row[_EXTREMES[reducer]]).reshape(1)
    return row[Column.SUM].reshape(1)


_OF_PRODUCTS = {"cosine": cosine, "angle": turn, "growth": growth}
_EXTREMES = {"min": Column.MIN, "max": Column.MAX}


def finished(key: Key, pending: PendingValue) -> dict[Key, Tensor]:
    """The final scalar of a key, or several if the aggregation function returned a dict."""
    if isinstance(pending.aggregation, str):
        merged = merged_parts(pending.parts, pending.aggregation)
        return {key: merged[0] / merged[1] if pending.aggregation == "mean" else merged[0]}
    result = pending.aggregation(torch.cat(pending.parts))
    if not isinstance(result, Mapping):
        return {key: _scalar(result, key)}
    field = "metric" if key.metric else "name"
    return {
        (sub := key._replace(**{field: f"{getattr(key, field)}.{str(name).replace('/', '.')}"})): _scalar(value, sub)
        for name, value in result.items()
    }


def _scalar(value: Any, key: Key) -> Tensor:
    tensor = as_tensor(value, key)
    if tensor.numel() != 1:
        raise ValueError(f"{'/'.join(filter(None, key))} must be one number, got {tensor.numel()} of them")
    return tensor[0]

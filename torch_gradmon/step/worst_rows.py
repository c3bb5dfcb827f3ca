"""The rows of a batch with the largest losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.formatting import listed, percent
from ..statistics.tensor_access import accumulator_dtype

#: Rows that are kept of each step.
KEPT = 8
#: A row stands out if it has more than the mean loss, and this many times the mean of the rows with smaller ones.
_STANDS_OUT = 5.0
_NAMED = 3
#: Identities on a device travel in three parts of as many bits, which float32 holds exactly.
_PARTS, _BITS = 3, 22

#: Identities of the rows of one call: on the host all of them, on a device those of the largest losses, behind the numbers.
Identities = Sequence[Any] | Tensor


@torch.no_grad()
def largest_of(losses: Tensor, identities: Identities) -> Tensor:
    """Numbers about the losses of rows, ``[n]``, on their device. Does not synchronise.

    Returns:
        The sum of finite losses, the numbers of others and of negative ones, the :data:`KEPT` largest losses, those that are not finite
        first, their places, and the parts of their identities where these are a tensor.
    """
    values = losses.detach().to(accumulator_dtype(losses.device))
    is_finite = values.isfinite()
    places = torch.where(is_finite, values, math.inf).topk(min(KEPT, len(values))).indices
    counts = [(~is_finite).sum(), (is_finite & (values < 0)).sum()]
    numbers = [torch.where(is_finite, values, 0.0).sum().view(1), torch.stack(counts), values[places], places]
    if isinstance(identities, Tensor):
        named = identities.detach().to(values.device, torch.int64)[places]
        numbers += [named >> 2 * _BITS, named >> _BITS & 2**_BITS - 1, named & 2**_BITS - 1]
    return torch.cat([each.to(values.dtype) for each in numbers])


def merged(calls: Sequence[tuple[Identities, int, Tensor]]) -> dict[str, Any]:
    """The worst rows of a step, for its context: ``ids`` and ``losses``, the largest first, their ``sum``, the ``count`` of all rows,
    and how many losses are ``nonfinite`` and ``negative``. A row of several calls has the sum of its losses.

    Args:
        calls: identities, number of rows, and the numbers of :func:`largest_of` on the host, for each call in the step.
    """
    found: dict[Any, float] = {}
    for identities, _, numbers in calls:
        is_here = not isinstance(identities, Tensor)
        count = (len(numbers) - 3) // (2 if is_here else 2 + _PARTS)
        losses, places, *parts = numbers[3:].view(-1, count).tolist()
        names = [_plain(identities[int(place)]) for place in places] if is_here else list(map(_joined, *parts))
        for loss, name in zip(losses, names, strict=True):
            found[name] = found.get(name, 0.0) + loss
    largest = sorted(found.items(), key=lambda row: -row[1] if math.isfinite(row[1]) else -math.inf)[:KEPT]
    total, nonfinite, negative = (sum(float(numbers[place]) for *_, numbers in calls) for place in range(3))
    return {
        "ids": [name for name, _ in largest],
        "losses": [loss for _, loss in largest],
        "sum": total,
        "nonfinite": int(nonfinite),
        "negative": int(negative),
        "count": sum(count for _, count, _ in calls),
    }


def rows_text(rows: Mapping[str, Any]) -> str:
    """Which rows stand out, as part of a sentence about a spike; empty without any."""
    if not rows or rows["count"] < 2:
        return ""
    ids, losses, count, total = list(map(str, rows["ids"])), rows["losses"], rows["count"], rows["sum"]
    if rows["nonfinite"]:
        odd = [name for name, loss in zip(ids, losses, strict=True) if not math.isfinite(loss)][:_NAMED]
        more = rows["nonfinite"] - len(odd)
        names = ", ".join(odd) + (f" and {more} more" if more > 0 else "")
        return f"of {count} rows {rows['nonfinite']} have a loss that is NaN or infinite: {names}"
    if not total > 0 or rows.get("negative"):
        return ""
    far = 0
    for place, loss in enumerate(losses[: count - 1], 1):
        others = max(total - sum(losses[:place]), 0.0) / (count - place)
        far = place if loss > max(_STANDS_OUT * others, total / count) else far
    shares = [loss / total for loss in losses]
    if not far:
        return f"no row of {count} stands out: the largest share of the loss, of row {ids[0]}, is {percent(shares[0])}"
    named = listed([f"{name} ({percent(share)})" for name, share in zip(ids[:far], shares, strict=False)], _NAMED)
    return f"of {count} rows the largest shares of the loss are those of {named}"


def _joined(high: float, middle: float, low: float) -> int:
    """An identity of its parts."""
    return (int(high) << 2 * _BITS) + (int(middle) << _BITS) + int(low)


def _plain(name: Any) -> Any:
    """As JSON has it."""
    return int(name) if hasattr(name, "__index__") else str(name)

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
#: A row stands out if it holds this many equal shares of the loss.
_STANDS_OUT = 5.0
_NAMED = 3

#: Identities of the rows of one call: on the host all of them, on a device those of the largest losses.
Identities = Sequence[Any] | Tensor


@torch.no_grad()
def largest_of(losses: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers about the losses of rows, ``[n]``, on their device, and the places of the largest ones. Does not synchronise.

    The numbers are the sum of finite losses, the number of others, the :data:`KEPT` largest losses, those that are not finite first, and
    their places.
    """
    values = losses.detach().to(accumulator_dtype(losses.device))
    is_finite = values.isfinite()
    places = torch.where(is_finite, values, math.inf).topk(min(KEPT, len(values))).indices
    total, others = torch.where(is_finite, values, 0.0).sum(), (~is_finite).sum()
    return torch.cat([torch.stack([total, others.to(values.dtype)]), values[places], places.to(values.dtype)]), places


def merged(calls: Sequence[tuple[Identities, int, Tensor]]) -> dict[str, Any]:
    """The worst rows of a step, for its context: ``ids`` and ``losses``, the largest first, their ``sum`` and the ``count`` of all rows.

    Args:
        calls: identities, number of rows, and the numbers of :func:`largest_of` on the host, for each call in the step. Identities that
            were on a device come behind the numbers.
    """
    found: list[tuple[float, Any]] = []
    for identities, _, numbers in calls:
        total = len(numbers) - 2
        is_here = not isinstance(identities, Tensor)
        count = total // 2 if is_here else total // 3
        losses, places = numbers[2 : 2 + count].tolist(), numbers[2 + count : 2 + 2 * count].tolist()
        names = [_plain(identities[int(place)]) for place in places] if is_here else map(int, numbers[2 + 2 * count :].tolist())
        found += zip(losses, names, strict=True)
    found.sort(key=lambda row: -row[0] if math.isfinite(row[0]) else -math.inf)
    return {
        "ids": [name for _, name in found[:KEPT]],
        "losses": [loss for loss, _ in found[:KEPT]],
        "sum": sum(float(numbers[0]) for *_, numbers in calls),
        "nonfinite": sum(int(numbers[1]) for *_, numbers in calls),
        "count": sum(count for _, count, _ in calls),
    }


def rows_text(rows: Mapping[str, Any]) -> str:
    """Which rows stand out, as part of a sentence about a spike; empty without any."""
    if not rows or rows["count"] < 2:
        return ""
    ids, count = list(map(str, rows["ids"])), rows["count"]
    if rows["nonfinite"]:
        names = listed(ids[: rows["nonfinite"]], _NAMED)
        return f"of {count} rows {rows['nonfinite']} have a loss that is NaN or infinite: {names}"
    if not rows["sum"] > 0 or min(rows["losses"]) < 0:
        return ""
    shares = [loss / rows["sum"] for loss in rows["losses"]]
    far = sum(share * count > _STANDS_OUT for share in shares)
    if not far:
        return f"all {count} rows are alike: the largest share of the loss, of row {ids[0]}, is {percent(shares[0])}"
    named = listed([f"{name} ({percent(share)})" for name, share in zip(ids[:far], shares, strict=False)], _NAMED)
    return f"of {count} rows the largest shares of the loss are those of {named}"


def _plain(name: Any) -> Any:
    """As JSON has it."""
    return int(name) if hasattr(name, "__index__") else str(name)

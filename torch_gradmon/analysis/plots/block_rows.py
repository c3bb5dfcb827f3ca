"""Layers by blocks: a thousand rows are more than anybody reads, and a few dozen blocks that open are not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from .downsampling import Squeezed
from .panels import Panel

#: More rows than these are shown by blocks.
ROWS = 48
#: So many times as many blocks are still shown one by one.
_SCROLLED = 4


def blocks(names: Sequence[str], most: int = ROWS) -> dict[str, list[int]]:
    """The places of ``names`` by block, in order: each name its own where there are no more than ``most``.

    A block is what a name begins with, up to its first number (``blocks.3``), or its first part. Where these are more than
    anybody scrolls through, neighbours stand together (``blocks.0 to blocks.3``).
    """
    if len(names) <= most:
        return {name: [place] for place, name in enumerate(names)}
    found: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        found.setdefault(_block(name), []).append(place)
    if len(found) == 1:  # all in one: by what tells them apart
        prefix = next(iter(found))
        found = {}
        for place, name in enumerate(names):
            rest = name[len(prefix) :].lstrip(".")
            found.setdefault(f"{prefix}.{_block(rest)}" if rest else name, []).append(place)
    return found if len(found) <= _SCROLLED * most else _neighbours(found, most)


def _neighbours(found: Mapping[str, list[int]], most: int) -> dict[str, list[int]]:
    names, size = list(found), -(-len(found) // most)
    together = [names[at : at + size] for at in range(0, len(names), size)]
    return {
        some[0] if len(some) == 1 else f"{some[0]} to {some[-1]}": [place for name in some for place in found[name]]
        for some in together
    }


def _block(name: str) -> str:
    parts = name.split(".")
    at = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    if at is None:
        return parts[0]
    return ".".join(parts[: at + 1])


def together(panel: Panel, cells: Squeezed, groups: Mapping[str, Sequence[int]]) -> torch.Tensor:
    """One column for each block: the root of the sum of squares of its layers, or the largest; infinite where one of them is not finite.

    Returns:
        float64 ``[columns, blocks]``.
    """
    found = []
    for places in groups.values():
        values = cells.values[:, list(places)]
        absent = values.isnan().all(1)
        known = values.nan_to_num(nan=0.0, posinf=math.inf)
        one = known.square().sum(1).sqrt() if panel.view.adds_up else known.amax(1)
        found.append(torch.where(absent, math.nan, one))
    return torch.stack(found, 1)

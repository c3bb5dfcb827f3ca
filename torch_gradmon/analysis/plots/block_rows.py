"""Layers grouped by block: a thousand rows are unreadable, a few dozen blocks are not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from ...core.keys import blocks_of
from .downsampling import Downsampled
from .views import Panel

#: More rows than this are grouped by block.
ROWS = 48
#: Up to this many times as many blocks each have a row of their own.
_SCROLLED = 4


def blocks(names: Sequence[str], most: int = ROWS) -> dict[str, list[int]]:
    """The places of ``names`` by block, in order. Each name is a block of its own if there are at most ``most``.

    Blocks are those of :func:`~torch_gradmon.core.keys.blocks_of`. Too many are merged with their neighbours
    (``blocks.0 to blocks.3``).
    """
    if len(names) <= most:
        return {name: [place] for place, name in enumerate(names)}
    found: dict[str, list[int]] = {}
    block_of = blocks_of(names, of_modules=True)
    for place, name in enumerate(names):
        found.setdefault(block_of[name], []).append(place)
    if len(found) == 1:  # a single block: split it further
        prefix = next(iter(found))
        rests = [name[len(prefix) :].lstrip(".") for name in names]
        block_of = blocks_of(rests, of_modules=True)
        found = {}
        for place, rest in enumerate(rests):
            found.setdefault(f"{prefix}.{block_of[rest]}" if rest else names[place], []).append(place)
    return found if len(found) <= _SCROLLED * most else _neighbours(found, most)


def _neighbours(found: Mapping[str, list[int]], most: int) -> dict[str, list[int]]:
    names, size = list(found), -(-len(found) // most)
    runs = [names[at : at + size] for at in range(0, len(names), size)]
    return {
        some[0] if len(some) == 1 else f"{some[0]} to {some[-1]}": [place for name in some for place in found[name]]
        for some in runs
    }


def by_block(panel: Panel, cells: Downsampled, groups: Mapping[str, Sequence[int]]) -> torch.Tensor:
    """One column for each block: the root of the sum of squares of its layers, or the largest value. Infinite if one layer is not
    finite.

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

"""Per-layer values for the dashboard: of all parameters, those matching a pattern, the top ones, or sums over blocks and groups."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from ..core import keys as n
from ..core.errors import nearest, warn_user
from ..core.keys import blocks_of, compile_pattern, shared_key
from ..core.moments import Column, merge_by_group
from ..core.records import StatsTable
from ..core.step_values import Block

TOP = 10
SHARE = "share"


class LayerSelection:
    """Chooses which per-layer values a dashboard gets in addition to the metrics requested individually.

    Args:
        choice: None; ``"all"``; ``"blocks"``: norms over blocks (``h.0``) and optimizer parameter groups; ``"top"``: the ten parameters
            with the largest share of the squared norm; else a pattern for parameter names.

    The values are the norm before clipping, and the update ratio on steps that measure updates for a preset or a metric.
    """

    def __init__(self, choice: str | re.Pattern[str] | None) -> None:
        self.choice = choice
        self._pattern = compile_pattern(choice, "layers") if choice not in (None, "all", "blocks", "top") else None
        self._names: Sequence[str] = ()
        self._blocks: dict[str, str] = {}

    def warn_of_idle(self, names: Iterable[str]) -> None:
        """Warn if the pattern matches none of the parameters."""
        names = list(names)
        if self._pattern is not None and not any(self._pattern.search(name) for name in names):
            pattern = self._pattern.pattern
            warn_user(f"layers={pattern!r} matches no parameter of the model{nearest(pattern, names)}")

    @property
    def needs(self) -> dict[str, frozenset[Column]]:
        """The statistics of all parameters that the values of every step need, by source."""
        return {} if self.choice is None else {n.GRADIENT_BEFORE_CLIP: frozenset({Column.COUNT, Column.SQUARE_SUM})}

    @property
    def takes_sums(self) -> bool:
        """Whether values combine several parameters, so that all of these have to be measured."""
        return self.choice in ("blocks", "top")

    def members(self, names: Sequence[str]) -> dict[str, list[str]]:
        """The parameters of each value that is always requested: single parameters, those of a pattern, or blocks."""
        found: dict[str, list[str]] = {}
        if self.choice == "blocks":
            for name, block in self._blocks_of(names).items():
                found.setdefault(block, []).append(name)
            return found
        for name in names if self.choice not in (None, "top") else ():
            if self._pattern is None or self._pattern.search(name):
                found[name] = [name]
        return found

    def _blocks_of(self, names: Sequence[str]) -> dict[str, str]:
        if names is not self._names:  # the same until the model changes
            self._names, self._blocks = names, blocks_of(names)
        return self._blocks

    def values(
        self,
        tables: Mapping[str, StatsTable],
        base: StatsTable | None,
        groups: Sequence[tuple[str, frozenset[str]]],
        names: Sequence[str],
    ) -> list[Block]:
        """The chosen values of one step; ``groups`` are the optimizers' parameter groups by name, ``names`` all parameters."""
        if self.choice is None:
            return []
        squares = {source: table for source, table in tables.items() if table.has("norm")}
        gradients, updates = squares.get(n.GRADIENT_BEFORE_CLIP), squares.get(n.UPDATE)
        if self.choice == "top":
            return [_block(n.GRADIENT_BEFORE_CLIP, SHARE, top_shares(gradients, TOP))]
        found = []
        if gradients is not None:
            norms = [(name, float(row[Column.SQUARE_SUM].sqrt())) for name, row in self._rows(gradients, groups, names)]
            tensors = frozenset(gradients.names)  # a block may be a single one
            views, sums = [one for one in norms if one[0] in tensors], [one for one in norms if one[0] not in tensors]
            found += [_block(n.GRADIENT_BEFORE_CLIP, "norm", views, are_views=True), _block(n.GRADIENT_BEFORE_CLIP, "norm", sums)]
        if updates is not None and base is not None:
            pairs = zip(self._rows(updates, groups, names), self._rows(base, groups, names), strict=True)
            ratios = [
                (name, float((row[Column.SQUARE_SUM] / before[Column.SQUARE_SUM]).sqrt()))
                for (name, row), (_, before) in pairs
                if before[Column.SQUARE_SUM] > 0
            ]
            found.append(_block(n.UPDATE, "ratio", ratios))
        return [block for block in found if block.keys]

    def _rows(
        self, table: StatsTable, groups: Sequence[tuple[str, frozenset[str]]], names: Sequence[str]
    ) -> list[tuple[str, Tensor]]:
        if self.choice == "blocks":
            return sums_over_blocks(table, self._blocks_of(names)) + sums_over_groups(table, groups)
        return [
            (name, row)
            for name, row in zip(table.names, table.rows, strict=True)
            if self._pattern is None or self._pattern.search(name)
        ]


def _block(source: str, metric: str, values: Sequence[tuple[str, float]], are_views: bool = False) -> Block:
    keys = tuple(shared_key(source, name, metric) for name, _ in values)
    return Block(keys, array("d", [value for _, value in values]), source if are_views else "")


def sums_over_blocks(table: StatsTable, block_of: Mapping[str, str]) -> list[tuple[str, Tensor]]:
    """One merged row per block, in model order. Exact, since rows are additive."""
    blocks = list(dict.fromkeys(block_of[name] for name in table.names))
    position = {block: index for index, block in enumerate(blocks)}
    merged = merge_by_group(table.rows, [position[block_of[name]] for name in table.names], len(blocks))
    return list(zip(blocks, merged, strict=True))


def sums_over_groups(table: StatsTable, groups: Sequence[tuple[str, frozenset[str]]]) -> list[tuple[str, Tensor]]:
    """One merged row per parameter group of the optimizers, for the parameters in ``table``."""
    number = {name: index for index, (_, members) in enumerate(groups) for name in members}
    rows = [row for row, name in enumerate(table.names) if name in number]
    merged = merge_by_group(table.rows[rows], [number[table.names[row]] for row in rows], len(groups))
    return [(label, row) for (label, _), row in zip(groups, merged, strict=True) if row[Column.COUNT] > 0]


def top_shares(table: StatsTable | None, count: int) -> list[tuple[str, float]]:
    """The parameters with the largest share of the model's squared norm, largest first; empty if that is unknown, zero or not finite."""
    if table is None or table.is_part or not table.has("norm"):
        return []
    squares = table.rows[:, Column.SQUARE_SUM]
    total = float(squares.sum())
    if not 0 < total < float("inf"):
        return []
    best = squares.topk(min(count, len(squares)))
    return [(table.names[i], s / total) for s, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)]

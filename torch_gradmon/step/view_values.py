"""Values of built-in metrics, which are views of measured rows of statistics."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.keys import Key
from ..core.moments import NEEDS, VIEWS, Column, StatView, have
from ..core.records import StatsTable
from ..core.step_values import Block


class ViewGroup(NamedTuple):
    """Metrics of a table whose values are one block.

    Attributes:
        found: each metric with its keys, and the rows of their tensors; None for all rows.
        keys: all of them; a table with the same tensors has the same tuple.
        table: the source whose table the values are views of; empty for ratios, which no table has.
    """

    found: Sequence[tuple[str, Sequence[Key], Sequence[int] | None]]
    keys: tuple[Key, ...]
    table: str


def view_group(found: Iterable[tuple[str, Sequence[Key], Sequence[int]]], rows: int, table: str) -> ViewGroup:
    """The group of metrics that are ``found``, each with keys and rows, in a table with this number of ``rows``."""
    all_rows = list(range(rows))
    placed = [(metric, keys, None if places == all_rows else places) for metric, keys, places in found]
    return ViewGroup(placed, tuple(key for _, keys, _ in placed for key in keys), table)


def blocks_of(groups: Sequence[ViewGroup], table: StatsTable, base: StatsTable | None = None) -> list[Block]:
    """The values of ``groups`` for the rows of ``table``, undefined ones left out; ``base`` holds the denominators of ratios."""
    if not groups:
        return []
    columns = table.rows.unbind(1)
    finite = have("finite elements", columns)
    # where all rows have finite elements, as in nearly every step, they have all that a view needs
    there = dict.fromkeys(NEEDS, finite) if bool(finite.all()) else {"finite elements": finite}
    return [_block(group, table.rows, columns, there, base) for group in groups]


def _block(
    group: ViewGroup, rows: Tensor, columns: tuple[Tensor, ...], there: dict[str, Tensor], base: StatsTable | None
) -> Block:
    """The values of ``group``; ``there`` has for each need of a view the rows that meet it, as far as that is known."""
    values: list[Tensor] = []
    defined: list[Tensor] = []
    for metric, wanted, places in group.found:
        if metric == "ratio":
            value, exists = _ratios(rows if places is None else rows[places], base, [key.name for key in wanted])
        else:
            view = VIEWS[metric]
            of, known = (columns, there) if places is None else (rows[places].unbind(1), {})
            if view.needs not in known:
                known[view.needs] = have(view.needs, of)
            value, exists = view.of(of), known[view.needs]
        values.append(value)
        defined.append(exists)
    numbers = _numbers(values[0] if len(values) == 1 else torch.cat(values))
    if all(exists.all() for exists in set(defined)):  # views with the same needs share one tensor
        return Block(group.keys, numbers, group.table)
    chosen = torch.cat(defined).tolist()
    return Block(tuple(compress(group.keys, chosen)), array("d", compress(numbers, chosen)), group.table)


def _numbers(values: Tensor) -> array[float]:
    """float64, copied: a list of Python's numbers takes four times the memory, which a history of many steps shows."""
    values = values.contiguous()
    return array("d", ctypes.string_at(values.data_ptr(), 8 * len(values)))


def evaluate_view(view: StatView, rows: Tensor) -> tuple[list[bool], list[float]]:
    """For each row ``[n, 8]`` whether the value exists, and the value."""
    return view.defined(rows).tolist(), view.compute(rows).tolist()


def _ratios(rows: Tensor, base: StatsTable | None, found: list[str]) -> tuple[Tensor, Tensor]:
    if base is None:
        return rows.new_zeros(len(found)), torch.zeros(len(found), dtype=torch.bool, device=rows.device)
    where = {name: row for row, name in enumerate(base.names)}
    denominators = base.rows[[where[name] for name in found]][:, Column.SQUARE_SUM].sqrt()
    ratios = rows[:, Column.SQUARE_SUM].sqrt() / denominators
    return ratios, denominators > 0


def value_in(table: StatsTable | None, key: Key) -> float | None:
    """The value of ``key`` if it is a built-in metric of a tensor in ``table``, else None."""
    if table is None or key.name not in table.row_of or not table.has(key.metric):
        return None
    return values_in(key.metric, table, [table.row_of[key.name]])[0]


def values_in(metric: str, table: StatsTable, rows: list[int]) -> list[float | None]:
    """The values of a built-in metric in these rows; None if undefined."""
    there, values = evaluate_view(VIEWS[metric], table.rows[rows])
    return [value if defined else None for defined, value in zip(there, values, strict=True)]

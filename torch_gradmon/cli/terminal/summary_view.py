"""How ``gradmon summary`` is drawn, in whatever width the terminal has. Needs rich."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ...spikes.episodes import counted, largest
from .formatting import cut, number, percent, printable, span
from .layer_table import Row
from .overview import Line
from .run_facts import Summary
from .spikes import Spike

_LOUD, _TITLE, _DIM = "bold red", "bold cyan", "dim"
#: Columns of numbers are so wide; names have at least so much, if they need it, before a column is left out.
_NUMBER, _NAME = 7, 24


@dataclass(frozen=True)
class Column:
    """A column of the table of layers."""

    heading: str
    cell: Callable[[Row], str]
    meaning: str


#: By the name by which it can be sorted.
COLUMNS = {
    "norm": Column("norm", lambda row: number(_known(row.norm)), "median gradient norm before clipping"),
    "largest": Column("largest", lambda row: number(_known(row.largest)), "the largest one"),
    "at": Column("at step", lambda row: "-" if row.at is None else str(row.at), "and when"),
    "share": Column("share", lambda row: percent(_known(row.share)), "of the squared norm"),
    "clipped": Column("clipped", lambda row: number(_known(row.clipped)), "median norm after clipping"),
    "update": Column("update", lambda row: number(_known(row.update)), "median norm over that of the weights"),
    "zeros": Column("zeros", lambda row: percent(_known(row.zeros)), "median share of elements near zero"),
    "nonfinite": Column("NaN/Inf", lambda row: str(row.nonfinite) if row.nonfinite else "-", "steps that are not finite"),
}
#: What is left out first where there is no room.
_LEAST = ("zeros", "clipped", "at", "update", "share")


def show(console: Console, summary: Summary) -> None:
    """Print all of it."""
    for part in parts(summary, console.width):
        console.print(part)


def parts(summary: Summary, width: int) -> Iterator[RenderableType]:
    """What is printed, one below the other."""
    yield Text(printable(summary.name), style=_TITLE, overflow="fold")
    yield _facts(summary)
    if summary.lines:
        yield _title("Whole model")
        yield _values(summary.lines, width)
        if summary.unshown:
            yield Text(f"and {summary.unshown} more that were logged; --all shows them", style=_DIM)
    if summary.rows:
        yield from _layers(summary, width)
    elif summary.overview.steps:
        yield Text("\nNo gradients of layers were measured in these steps.")
    if summary.spikes:
        yield from _spikes(summary, width)


def _title(text: str) -> Text:
    return Text(f"\n{text}", style=_TITLE)


def _facts(summary: Summary) -> Table:
    told = summary.overview
    table = Table.grid(padding=(0, 2))
    table.add_column(style=_DIM, no_wrap=True)
    table.add_column(overflow="fold")
    if told.first is None or told.last is None:
        table.add_row("steps", "none yet")
        return table
    count = told.last - told.first + 1
    in_all = "" if told.steps == count else f" of {count}"
    table.add_row("steps", f"{told.steps}{in_all} monitored, {told.first} to {told.last}")
    if told.began > 0:
        table.add_row("time", span(told.began, told.ended))
    if told.rates is not None:
        low, high, now = told.rates
        table.add_row("lr", f"{now:.3g}" if low == high else f"{low:.3g} to {high:.3g}, {now:.3g} at the end")
    if len(summary.segments) > 1:
        begins = [str(first) for first, _ in summary.segments[1:]]
        shown = f"{'..., ' if len(begins) > 5 else ''}{', '.join(begins[-5:])}"
        table.add_row("went back", f"to step {shown} (resumed or rolled back; the later values count)")
    if told.not_applied:
        skipped = f", {told.skipped} of them skipped because of a spike" if told.skipped else ""
        table.add_row("not applied", Text(f"{told.not_applied} steps{skipped}", style="yellow"))
    bad = [row for row in summary.rows if row.nonfinite]
    if bad:
        first = min(row.since for row in bad if row.since is not None)
        table.add_row(
            "NaN/Inf",
            Text(f"in the gradients of {len(bad)} of {len(summary.rows)} rows below, first in step {first}", style=_LOUD),
        )
    return table


def _values(lines: Sequence[Line], width: int) -> Table:
    columns = {
        "first": [number(line.first) for line in lines],
        "median": [number(_known(line.median)) for line in lines],
        "last": [number(line.last) for line in lines],
        "largest": [number(_known(line.largest)) for line in lines],
        "at step": ["-" if line.at is None else str(line.at) for line in lines],
    }
    if any(line.nonfinite for line in lines):
        columns["NaN/Inf"] = [str(line.nonfinite) if line.nonfinite else "-" for line in lines]
    longest = max(len(line.name) for line in lines)
    if _room(width, _widths(columns), longest) < min(longest, _NAME):
        del columns["first"]
    room = _room(width, _widths(columns), longest)
    table = _table(columns, room)
    for line, *cells in zip(lines, *columns.values(), strict=True):
        table.add_row(_name(line.name, room), *map(Text, cells), style=_LOUD if line.nonfinite else None)
    return table


def _layers(summary: Summary, width: int) -> Iterator[RenderableType]:
    rows = summary.rows
    count = sum(row.parameters for row in rows)
    by = (
        f"{count} parameters"
        if count == len(rows)
        else f"{count} parameters in {len(rows)} rows (--all: each; --depth N: other rows)"
    )
    yield _title(f"Layers: {by}")
    shown, left_out = columns(rows, width)
    cells = {COLUMNS[name].heading: [COLUMNS[name].cell(row) for row in rows] for name in shown}
    room = _room(width, _widths(cells), max(len(row.name) for row in rows))
    table = _table(cells, room)
    for row, *each in zip(rows, *cells.values(), strict=True):
        table.add_row(_name(row.name, room), *map(Text, each), style=_LOUD if row.nonfinite else None)
    yield table
    yield Text("; ".join(f"{COLUMNS[name].heading}: {COLUMNS[name].meaning}" for name in shown), style=_DIM)
    if left_out:
        yield Text(f"no room for {', '.join(left_out)}", style=_DIM)


def columns(rows: Sequence[Row], width: int) -> tuple[list[str], list[str]]:
    """Which columns are shown in so wide a terminal, and which have values and no room."""
    shown = [name for name, column in COLUMNS.items() if any(column.cell(row) != "-" for row in rows)]
    needed = min(max((len(row.name) for row in rows), default=0), _NAME)
    left_out = []
    for name in _LEAST:
        if width - len(shown) * (_NUMBER + 1) >= needed:
            break
        if name in shown:
            shown.remove(name)
            left_out.append(name)
    return shown, left_out


def _spikes(summary: Summary, width: int) -> Iterator[RenderableType]:
    yield _title(f"Spikes: {counted(summary.spiked)}")
    if len(summary.spiked) > len(summary.spikes):
        yield Text(f"the {len(summary.spikes)} largest of them:", style=_DIM)
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for spike in summary.spikes:
        words = Text(printable(spike.words))
        if spike.moved:
            words.append(f"; {_moved(spike, width)}", style=_DIM)
        row = "" if spike.first == spike.last else f", of {spike.first} to {spike.last}"
        table.add_row(f"step {spike.step}{row}", words)
    yield table
    worst = largest(summary.spiked, 1)[0].worst.step
    is_one = "its story" if len(summary.spiked) == 1 else "the story of the largest"
    yield Text(f"gradmon why {printable(summary.name)} --step {worst} tells {is_one}", style=_DIM, overflow="fold")


def _moved(spike: Spike, width: int) -> str:
    return f"{cut(printable(spike.layer), max(width // 2, _NAME))} {printable(spike.moved)}".strip()


def _table(columns: Mapping[str, Sequence[str]], room: int) -> Table:
    """A table of names and of these columns, which are filled in later."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style=_DIM)
    table.add_column("", no_wrap=True, min_width=room, max_width=room)
    for heading, width in zip(columns, _widths(columns), strict=True):
        table.add_column(heading, justify="right", no_wrap=True, min_width=width, max_width=width)
    return table


def _widths(columns: Mapping[str, Sequence[str]]) -> list[int]:
    return [max(_NUMBER, *map(len, cells)) for cells in columns.values()]


def _room(width: int, widths: Sequence[int], longest: int) -> int:
    """For the names."""
    return max(min(width - sum(widths) - len(widths), longest), 8)


def _name(name: str, room: int) -> Text:
    return Text(cut(printable(name), room), no_wrap=True)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value

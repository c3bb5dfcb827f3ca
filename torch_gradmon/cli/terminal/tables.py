"""The drawing of ``gradmon summary`` and ``gradmon compare``, for any terminal width. Needs rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ...analysis.many_runs import RunCard, differing
from ...core.formatting import cut_start, duration, listed, number, percent
from ...core.keys import Key
from ...core.records import loss_among
from ...spikes.signals import counted, largest
from .layer_table import LayerRow, RunSummary, ValueSummary

# --- the console that commands print to ---


class QuietConsole(Console):
    """Raises for a closed pipe, which the command line handles, and does not colour numbers."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


# --- the summary, for any terminal width ---

_LOUD, _TITLE, _DIM = "bold red", "bold cyan", "dim"
#: The width of numbers, and the width that names keep, if they need it, before a column is left out.
_NUMBER, _NAME = 7, 24


#: By the name for sorting: the heading of a column, how its values are written, and what they are.
COLUMNS: dict[str, tuple[str, Callable[[Any], str], str]] = {
    "norm": ("norm", number, "median gradient norm before clipping"),
    "largest": ("largest", number, "the largest one"),
    "at": ("at step", str, "and when"),
    "share": ("share", percent, "of the squared norm"),
    "clipped": ("clipped", number, "median norm after clipping"),
    "update": ("update", number, "median norm over that of the weights"),
    "zeros": ("zeros", percent, "median share of elements near zero"),
    "nonfinite": ("NaN/Inf", lambda steps: str(steps or "-"), "steps that are not finite"),
}
#: Left out in this order if there is too little room for names.
_LEAST = ("zeros", "clipped", "at step", "update", "share")


def show_summary(console: Console, summary: RunSummary) -> None:
    for part in parts(summary, console.width):
        console.print(part)


def parts(summary: RunSummary, width: int) -> Iterator[RenderableType]:
    yield Text(summary.name, style=_TITLE, overflow="fold")
    yield _facts(summary)
    if summary.lines:
        yield _title("Whole model")
        yield _values(summary.lines, width)
        if summary.unshown:
            yield Text(f"and {summary.unshown} more logged values; --all shows them", style=_DIM)
    if summary.rows:
        yield from _layers(summary, width)
    elif summary.overview.steps:
        yield Text("\nNo gradients of layers were measured in these steps.")
    if summary.spikes:
        yield from _spikes(summary, width)


def _title(text: str) -> Text:
    return Text(f"\n{text}", style=_TITLE)


def _time_span(start: float, end: float) -> str:
    """The local start and end time, and the duration between them; both times are in seconds since the epoch."""
    first, last = (datetime.fromtimestamp(time) for time in (start, end))
    until = last.strftime("%H:%M:%S" if first.date() == last.date() else "%Y-%m-%d %H:%M:%S")
    return f"{first.strftime('%Y-%m-%d %H:%M:%S')} to {until}, {duration(end - start)}"


def _facts(summary: RunSummary) -> Table:
    overview = summary.overview
    table = Table.grid(padding=(0, 2))
    table.add_column(style=_DIM, no_wrap=True)
    table.add_column(overflow="fold")
    if overview.first is None or overview.last is None:
        table.add_row("steps", "none yet")
        return table
    count = overview.last - overview.first + 1
    in_all = "" if overview.steps == count else f" of {count}"
    table.add_row("steps", f"{overview.steps}{in_all} monitored, {overview.first} to {overview.last}")
    if overview.began > 0:
        table.add_row("time", _time_span(overview.began, overview.ended))
    if overview.rates is not None:
        low, high, now = overview.rates
        table.add_row("lr", f"{now:.3g}" if low == high else f"{low:.3g} to {high:.3g}, {now:.3g} at the end")
    table.add_row("model", summary.model)
    for place, part in enumerate(summary.parts):
        table.add_row("" if place else "trains", str(part))
    if len(summary.segments) > 1:
        begins = [str(first) for first, _ in summary.segments[1:]]
        shown = f"{'..., ' if len(begins) > 5 else ''}{', '.join(begins[-5:])}"
        table.add_row("went back", f"to step {shown} (resumed or rolled back; the later values count)")
    if overview.not_applied:
        skipped = f", {overview.skipped} of them skipped because of a spike" if overview.skipped else ""
        table.add_row("not applied", Text(f"{overview.not_applied} steps{skipped}", style="yellow"))
    bad = [row for row in summary.rows if row.nonfinite]
    if bad:
        first = min(row.since for row in bad if row.since is not None)
        table.add_row(
            "NaN/Inf",
            Text(f"in the gradients of {len(bad)} of {len(summary.rows)} rows below, first in step {first}", style=_LOUD),
        )
    return table


def _values(lines: Sequence[ValueSummary], width: int) -> Table:
    columns = {
        "first": [number(line.first) for line in lines],
        "median": [number(line.median) for line in lines],
        "last": [number(line.last) for line in lines],
        "largest": [number(line.largest) for line in lines],
        "at step": ["-" if line.at is None else str(line.at) for line in lines],
    }
    if any(line.nonfinite for line in lines):
        columns["NaN/Inf"] = [str(line.nonfinite or "-") for line in lines]
    return _table(lines, columns, ["first"], width)[0]


def _layers(summary: RunSummary, width: int) -> Iterator[RenderableType]:
    rows = summary.rows
    count = sum(row.parameters for row in rows)
    by = (
        f"{count} parameters"
        if count == len(rows)
        else f"{count} parameters in {len(rows)} rows (--all: each; --depth N: other rows)"
    )
    yield _title(f"Layers: {by}")
    cells = {}
    for name, (heading, text, _) in COLUMNS.items():
        values = [getattr(row, name) for row in rows]
        texts = ["-" if value is None else text(value) for value in values]
        if any(text != "-" for text in texts):
            cells[heading] = texts
    table, left_out = _table(rows, cells, _LEAST, width)
    yield table
    shown = cells.keys() - set(left_out)
    yield Text("; ".join(f"{heading}: {meaning}" for heading, _, meaning in COLUMNS.values() if heading in shown), style=_DIM)
    if left_out:
        yield Text(f"no room for {', '.join(title.split()[0] for title in left_out)}", style=_DIM)


def _spikes(summary: RunSummary, width: int) -> Iterator[RenderableType]:
    yield _title(f"Spikes: {counted(summary.spiked)}")
    if len(summary.spiked) > len(summary.spikes):
        yield Text(f"the {len(summary.spikes)} largest of them:", style=_DIM)
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for spike in summary.spikes:
        words = Text(spike.words)
        if spike.moved:
            layer = cut_start(spike.layer, max(width // 2, _NAME))
            words.append(f"; {f'{layer} {spike.moved}'.strip()}", style=_DIM)
        row = "" if spike.first == spike.last else f", of {spike.first} to {spike.last}"
        table.add_row(f"step {spike.step}{row}", words)
    yield table
    worst = largest(summary.spiked, 1)[0].worst.step
    what = "it" if len(summary.spiked) == 1 else "the largest"
    yield Text(f"gradmon why {summary.name} --step {worst} explains {what}", style=_DIM, overflow="fold")


def _table(
    rows: Sequence[ValueSummary | LayerRow], columns: Mapping[str, Sequence[str]], least: Sequence[str], width: int
) -> tuple[Table, list[str]]:
    """The columns beside the names of the rows, and which of the ``least`` columns, in this order, are left out to make room for names."""
    widths = {heading: max(_NUMBER, *map(len, cells)) for heading, cells in columns.items()}
    longest, left_out = max(len(row.name) for row in rows), []
    for heading in least:
        if heading in widths and width - sum(widths.values()) - len(widths) < min(longest, _NAME):
            left_out.append(heading)
            del widths[heading]
    room = max(min(width - sum(widths.values()) - len(widths), longest), 8)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style=_DIM)
    table.add_column("", no_wrap=True, min_width=room, max_width=room)
    for heading, wide in widths.items():
        table.add_column(heading, justify="right", no_wrap=True, min_width=wide, max_width=wide)
    for row, *cells in zip(rows, *(columns[heading] for heading in widths), strict=True):
        name = Text(cut_start(row.name, room), no_wrap=True)
        table.add_row(name, *map(Text, cells), style=_LOUD if row.nonfinite else None)
    return table, left_out


# --- many runs ---

#: Settings in which the runs differ that have a column; the others are in the JSON and on the page of gradmon serve.
_MOST = 4
#: Logged values that are named below the table.
_NAMED_VALUES = 8
#: Width of settings where there is room, and where they are folded; the least of the columns of words; and these.
_SETTING, _FOLDED, _LEAST_WORDS, _WORDS = 32, 12, 16, ("state", "findings", "spikes")
#: Terminals with room for the cost.
_WIDE = 100
_STYLES = {"running": "green", "silent": "bold red", "unknown": "yellow"}
_LEVELS = {"error": "bold red", "warning": "yellow"}


def show_runs(console: Console, cards: Sequence[RunCard]) -> None:
    """Print a row for each run. Columns without a value in any run are left out.

    What does not fit makes room in this order: long settings are folded, all settings but the first are named below instead, spikes are
    only counted, and then the first setting goes as well.
    """
    some = differing(cards)
    metrics = dict.fromkeys(name for card in cards for name in card.metrics)
    columns: dict[str, Callable[[RunCard], Text | str | float | None]] = {
        "state": _state,
        "step": lambda card: card.step,
        "loss": lambda card: card.loss,
        **{name: lambda card, name=name: card.metrics.get(name) for name in metrics},  # type: ignore[misc]
        "findings": _findings,
        "spikes": lambda card: f"{card.spikes}: step {card.spike_step} {card.spike_where}".rstrip() if card.spikes else "",
        "head-room used": lambda card: card.headroom,
        "cost": lambda card: "" if card.cost is None or console.width < _WIDE else f"{100 * card.cost:.2g} %",
        **{name: lambda card, name=name: card.settings.get(name) for name in some[:_MOST]},  # type: ignore[misc]
    }
    cells = {title: [_cell(cell(card)) for card in cards] for title, cell in columns.items()}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    names = [card.name for card in cards]
    longest = min(max(map(len, [*names, "run"])), max(_NAME, console.width // 3))
    table.add_column("run", overflow="fold", width=longest)
    shown = [title for title, texts in cells.items() if any(texts)]
    settings = [title for title in shown if title in some]

    def fits(of_settings: int) -> bool:
        most = {**dict.fromkeys(_WORDS, _LEAST_WORDS), **dict.fromkeys(settings, of_settings)}
        each = (2 + min(max(len(title), *map(len, cells[title])), most.get(title, console.width)) for title in shown)
        return longest + sum(each) <= console.width

    widest = _SETTING if fits(_SETTING) else _FOLDED
    while len(settings) > 1 and not fits(widest):
        shown.remove(settings.pop())
    if not fits(widest):
        cells["spikes"] = [Text(str(card.spikes or "")) for card in cards]
    if settings and not fits(widest):
        shown.remove(settings.pop())
    for title in shown:
        side: Literal["left", "right"] = "left" if title in _WORDS else "right"
        table.add_column(title, justify=side, overflow="fold", max_width=widest if title in settings else None)
    for place in range(len(cards)):
        table.add_row(Text(names[place]), *(cells[title][place] for title in shown))
    console.print(table)
    if left := [name for name in some if name not in settings]:
        console.print(Text(f"They also differ in {', '.join(left)}.", style=_DIM))
    if others := [name for name in _not_shown(cards) if name not in metrics]:
        console.print(Text(f"Logged: {listed(others, _NAMED_VALUES)}; --sort NAME shows one and sorts by it.", style=_DIM))
    if of_one := dict.fromkeys(card.loss_key for card in cards if card.is_of_network):
        text = f"{', '.join(of_one)}: the loss of one network is low where the others lose, so it ranks no runs."
        console.print(Text(text, style=_DIM))
    if not any(card.findings or card.is_diagnosed for card in cards):
        console.print(Text("The trainings found no mistake themselves; --diagnose applies all rules.", style=_DIM))


def _not_shown(cards: Sequence[RunCard]) -> dict[str, None]:
    """Logged values but the loss of each run."""
    found: dict[str, None] = {}
    for card in cards:
        loss = loss_among(Key("", name, "") for name in card.logged)
        found.update((name, None) for name in card.logged if loss is None or name != loss.name)
    return found


def _cell(found: Text | str | float | None) -> Text:
    if isinstance(found, Text):
        return found
    return Text(number(found) if isinstance(found, float) else "" if found is None else str(found))


def _state(card: RunCard) -> Text:
    if card.raised:
        return Text(f"{card.state}, {card.raised.partition(':')[0]}", "yellow")
    return Text(card.state, _STYLES.get(card.state, ""))


def _findings(card: RunCard) -> Text:
    found = [(level, rule, where) for level, rule, where in card.findings if level != "info"]
    if not found and card.findings:
        return Text(f"{len(card.findings)} info", "cyan")
    if not found:
        return Text("none" if card.is_diagnosed else "")
    level, rule, where = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return Text.assemble((rule, _LEVELS.get(level, "")), f" in {where}" if where else "", more)

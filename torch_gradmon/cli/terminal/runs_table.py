"""The drawing of ``gradmon compare``. Needs rich."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...analysis.many_runs.card import RunCard, differing
from ...core.formatting import number, printable

#: Settings in which the runs differ that have a column; the others are in the JSON and on the page of gradmon serve.
_MOST = 4
#: Width that names keep; that of settings where there is room, and where they are folded; the least of the columns of words; and these.
_NAME, _SETTING, _FOLDED, _LEAST, _WORDS = 24, 32, 12, 16, ("state", "findings", "spikes")
#: Terminals with room for the cost.
_WIDE = 100
_STYLES = {"running": "green", "silent": "bold red", "unknown": "yellow"}
_LEVELS = {"error": "bold red", "warning": "yellow"}


def show(console: Console, cards: Sequence[RunCard]) -> None:
    """Print a row for each run. Columns without a value in any run are left out."""
    some = differing(cards)
    columns: dict[str, Callable[[RunCard], Text]] = {
        "state": _state,
        "step": lambda card: Text("" if card.step is None else str(card.step)),
        "loss": lambda card: Text("" if card.loss is None else number(card.loss)),
        "findings": _findings,
        "spikes": _spikes,
        "head-room used": lambda card: Text("" if card.headroom is None else number(card.headroom)),
        "cost": lambda card: Text("" if card.cost is None else f"{card.cost:.2g} %"),
        **{name: _setting(name) for name in some[:_MOST]},
    }
    cells = {title: [cell(card) for card in cards] for title, cell in columns.items()}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    names = [printable(card.name) for card in cards]
    longest = min(max(map(len, [*names, "run"])), max(_NAME, console.width // 3))
    table.add_column("run", overflow="fold", width=longest)
    shown = [title for title, texts in cells.items() if any(texts) and (title != "cost" or console.width >= _WIDE)]
    settings = [title for title in shown if title in some]

    def widths(of_settings: int) -> int:
        most = {**dict.fromkeys(_WORDS, _LEAST), **dict.fromkeys(settings, of_settings)}
        return sum(2 + min(max(len(title), *map(len, cells[title])), most.get(title, console.width)) for title in shown)

    widest = _SETTING if longest + widths(_SETTING) <= console.width else _FOLDED
    while settings and longest + widths(widest) > console.width:
        shown.remove(settings.pop())  # what does not fit is named below
    for title in shown:
        side: Literal["left", "right"] = "left" if title in _WORDS else "right"
        table.add_column(title, justify=side, overflow="fold", max_width=widest if title in settings else None)
    for place in range(len(cards)):
        table.add_row(Text(names[place]), *(cells[title][place] for title in shown))
    console.print(table)
    if left := [name for name in some if name not in settings]:
        console.print(Text(f"They also differ in {', '.join(left)}.", style="dim"))
    if of_one := dict.fromkeys(card.loss_key for card in cards if card.is_of_network):
        text = f"{', '.join(of_one)}: the loss of one network is low where the others lose, so it ranks no runs."
        console.print(Text(printable(text), style="dim"))
    if not any(card.findings or card.is_diagnosed for card in cards):
        console.print(Text("The trainings found no mistake themselves; --diagnose applies all rules.", style="dim"))


def _state(card: RunCard) -> Text:
    if card.raised:
        return Text(printable(f"{card.state}, {card.raised.partition(':')[0]}"), "yellow")
    return Text(card.state, _STYLES.get(card.state, ""))


def _setting(name: str) -> Callable[[RunCard], Text]:
    return lambda card: Text(printable(card.settings.get(name, "")))


def _findings(card: RunCard) -> Text:
    found = [(level, rule, where) for level, rule, where in card.findings if level != "info"]
    if not found and card.findings:
        return Text(f"{len(card.findings)} info", "cyan")
    if not found:
        return Text("none" if card.is_diagnosed else "")
    level, rule, where = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return Text.assemble((rule, _LEVELS.get(level, "")), printable(f" in {where}" if where else ""), more)


def _spikes(card: RunCard) -> Text:
    return Text(f"{card.spikes}: step {card.spike_step} {printable(card.spike_where)}".rstrip() if card.spikes else "")

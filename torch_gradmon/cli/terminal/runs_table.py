"""The drawing of ``gradmon compare``. Needs rich."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...analysis.many_runs import RunCard, differing
from ...core.formatting import listed, number
from ...core.keys import Key
from ...core.records import loss_among

#: Settings in which the runs differ that have a column; the others are in the JSON and on the page of gradmon serve.
_MOST = 4
#: Logged values that are named below the table.
_LOGGED = 8
#: Width that names keep; that of settings where there is room, and where they are folded; the least of the columns of words; and these.
_NAME, _SETTING, _FOLDED, _LEAST, _WORDS = 24, 32, 12, 16, ("state", "findings", "spikes")
#: Terminals with room for the cost.
_WIDE = 100
_STYLES = {"running": "green", "silent": "bold red", "unknown": "yellow"}
_LEVELS = {"error": "bold red", "warning": "yellow"}


def show(console: Console, cards: Sequence[RunCard]) -> None:
    """Print a row for each run. Columns without a value in any run are left out.

    What does not fit makes room in this order: long settings are folded, all settings but the first are named below instead, spikes are
    only counted, and then the first setting goes as well.
    """
    some = differing(cards)
    metrics = dict.fromkeys(name for card in cards for name in card.metrics)
    columns: dict[str, Callable[[RunCard], Text]] = {
        "state": _state,
        "step": lambda card: Text("" if card.step is None else str(card.step)),
        "loss": _number(lambda card: card.loss),
        **{name: _number(partial(_metric, name)) for name in metrics},
        "findings": _findings,
        "spikes": _spikes,
        "head-room used": _number(lambda card: card.headroom),
        "cost": lambda card: Text("" if card.cost is None else f"{100 * card.cost:.2g} %"),
        **{name: _setting(name) for name in some[:_MOST]},
    }
    cells = {title: [cell(card) for card in cards] for title, cell in columns.items()}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    names = [card.name for card in cards]
    longest = min(max(map(len, [*names, "run"])), max(_NAME, console.width // 3))
    table.add_column("run", overflow="fold", width=longest)
    shown = [title for title, texts in cells.items() if any(texts) and (title != "cost" or console.width >= _WIDE)]
    settings = [title for title in shown if title in some]

    def fits(of_settings: int) -> bool:
        most = {**dict.fromkeys(_WORDS, _LEAST), **dict.fromkeys(settings, of_settings)}
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
        console.print(Text(f"They also differ in {', '.join(left)}.", style="dim"))
    if others := [name for name in _not_shown(cards) if name not in metrics]:
        console.print(Text(f"Logged: {listed(others, _LOGGED)}; --sort NAME shows one and sorts by it.", style="dim"))
    if of_one := dict.fromkeys(card.loss_key for card in cards if card.is_of_network):
        text = f"{', '.join(of_one)}: the loss of one network is low where the others lose, so it ranks no runs."
        console.print(Text(text, style="dim"))
    if not any(card.findings or card.is_diagnosed for card in cards):
        console.print(Text("The trainings found no mistake themselves; --diagnose applies all rules.", style="dim"))


def _not_shown(cards: Sequence[RunCard]) -> dict[str, None]:
    """Logged values but the loss of each run."""
    found: dict[str, None] = {}
    for card in cards:
        loss = loss_among(Key("", name, "") for name in card.logged)
        found.update((name, None) for name in card.logged if loss is None or name != loss.name)
    return found


def _number(of: Callable[[RunCard], float | None]) -> Callable[[RunCard], Text]:
    return lambda card: Text("" if (found := of(card)) is None else number(found))


def _metric(name: str, card: RunCard) -> float | None:
    return card.metrics.get(name)


def _state(card: RunCard) -> Text:
    if card.raised:
        return Text(f"{card.state}, {card.raised.partition(':')[0]}", "yellow")
    return Text(card.state, _STYLES.get(card.state, ""))


def _setting(name: str) -> Callable[[RunCard], Text]:
    return lambda card: Text(card.settings.get(name, ""))


def _findings(card: RunCard) -> Text:
    found = [(level, rule, where) for level, rule, where in card.findings if level != "info"]
    if not found and card.findings:
        return Text(f"{len(card.findings)} info", "cyan")
    if not found:
        return Text("none" if card.is_diagnosed else "")
    level, rule, where = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return Text.assemble((rule, _LEVELS.get(level, "")), f" in {where}" if where else "", more)


def _spikes(card: RunCard) -> Text:
    return Text(f"{card.spikes}: step {card.spike_step} {card.spike_where}".rstrip() if card.spikes else "")

"""The live view of ``gradmon live``. Needs rich."""

from __future__ import annotations

import contextlib
import math
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.live import Live as Display
from rich.text import Text

from ...analysis.diagnosis.series import Series
from ...core.formatting import cut_start, duration, factor_text, number, percent
from ...core.keys import SUMMARY, Key
from .layer_table import rates_in
from .live import LiveRun, RunFollower
from .sparkline import ASCII, BLOCKS, NONFINITE, Columns, sparkline
from .tables import QuietConsole

_LOUD, _WARN, _TITLE, _DIM, _GOOD = "bold red", "bold yellow", "bold cyan", "dim", "green"
#: The run is idle after this many of its usual steps, and after this many seconds at least.
_IDLE_STEPS, _IDLE_SECONDS = 20, 10.0
#: Whole-model values: the shown name, the metric, and the range of the sparkline if it is fixed.
_SIGNALS: tuple[tuple[str, str, tuple[float, float] | None], ...] = (
    ("grad norm", "grad_norm", None),
    ("after clip", "grad_norm_after_clip", None),
    ("clip share", "clip_fraction", (0.0, 1.0)),
)
#: Widths of the cells after a sparkline; the second one only in a terminal with at least this many columns.
_CELLS, _WIDE = (8, 8, 8, 9), 100
_LEAST_NAME = 10
#: Layers of each kind if the screen has no limit, and at most.
_LAYERS, _MOST_LAYERS = 5, 12


@dataclass(frozen=True)
class Screen:
    columns: int  # of the terminal
    rows: int | None  # of the terminal; None for no limit
    unicode: bool = True  # whether it can show blocks of different heights

    @property
    def letters(self) -> str:
        return BLOCKS if self.unicode else ASCII

    @property
    def spikes(self) -> int:
        return 3 if self.has_room else 2 if self.rows is None or self.rows >= 20 else 1

    @property
    def has_room(self) -> bool:
        return self.rows is None or self.rows >= 30

    def shown(self, text: str) -> str:
        """``text``, which may contain anything, as this terminal can show it on one line."""
        return text if self.unicode else text.encode("ascii", "replace").decode()

    def name(self, name: str, width: int) -> str:
        return cut_start(self.shown(name), width, "…" if self.unicode else "~")


def frame(follower: RunFollower, screen: Screen, now: float) -> list[Text]:
    """The lines of the screen at the time ``now``, no wider and no more than fit."""
    lines = list(_lines(follower, screen, now))[: screen.rows]
    for line in lines:
        line.truncate(screen.columns, overflow="crop")
        line.no_wrap = True
    return lines


def _lines(follower: RunFollower, screen: Screen, now: float) -> Iterator[Text]:
    live = follower.live
    head = Text.assemble((screen.name(follower.name, max(screen.columns - 36, 12)), _TITLE), "  ")
    if live is None or live.last is None:
        head.append(screen.shown(follower.problem) or "no step yet", _WARN if follower.problem else _DIM)
        yield head
        return
    head.append(f"step {live.last.step}  ", "bold")
    head.append_text(_state(live, now))
    yield head
    yield _facts(live)
    if follower.problem:
        yield Text(screen.shown(follower.problem), style=_WARN)
    spikes = list(_spikes(live, screen))
    yield from _SparklineTable(live, screen, taken=2 + bool(follower.problem) + len(spikes)).lines()
    yield from spikes


def _state(live: LiveRun, now: float) -> Text:
    assert live.last is not None, "there is a step"
    pace, silence = live.pace, max(now - live.last.time, 0.0)
    if silence > max(_IDLE_SECONDS, _IDLE_STEPS * (pace or 0.0)):
        return Text(f"no new step for {duration(silence)}", style=_WARN)
    return Text("live" if pace is None else f"live, {number(1 / pace)} steps/s", style=_GOOD)


def _facts(live: LiveRun) -> Text:
    assert live.last is not None, "there is a step"
    rates = rates_in(live.last.context)
    overhead, scale = live.fact("overhead_fraction"), live.last.context.get("amp_scale")
    skipped, not_applied = live.total("steps_skipped"), max(live.total("steps_not_applied"), len(live.not_applied))
    spiked, segments = len(live.spikes), live.run.segments
    facts = [
        (f"lr {max(rates):.3g}" if rates else "", ""),
        (f"overhead {overhead:.1%} (median)" if overhead is not None else "", ""),
        (f"loss scale {scale:g}" if isinstance(scale, (int, float)) else "", ""),
        (f"{spiked} spike{'s' if spiked > 1 else ''}" if spiked else "no spikes", _WARN if spiked else ""),
        (f"{not_applied} not applied" + (f" ({skipped} skipped)" if skipped else "") if not_applied else "", _WARN),
        (f"went back to step {segments[-1][0]}" if len(segments) > 1 else "", _WARN),
    ]
    line = Text()
    for text, style in facts:
        if text:
            line.append(", " if line else "").append(text, style)
    return line


class _SparklineTable:
    """The sparklines. All have the same columns, so that simultaneous values are aligned. Other parts need ``taken`` lines."""

    def __init__(self, live: LiveRun, screen: Screen, taken: int) -> None:
        self._live, self._screen = live, screen
        self._is_wide = screen.columns >= _WIDE
        loss = live.loss
        keys: list[tuple[str, Key, tuple[float, float] | None]] = [] if loss is None else [(loss.name, loss, None)]
        keys += [(name, Key(SUMMARY, "", key), span) for name, key, span in _SIGNALS]
        self._signals = [(name, series, span) for name, key, span in keys if (series := live.series(key)).steps]
        taken += len(self._signals) + 4 + (3 if screen.has_room else 0)  # headings, marks and gaps
        most = _LAYERS if screen.rows is None else min(max((screen.rows - taken) // 2, 1), _MOST_LAYERS)
        (self._step, self._suspects), self._top_layers = live.suspects(most), live.top_layers(most)
        room = screen.columns - sum(self._cell_widths)
        names = [name for name, *_ in self._signals] + [each.name for each in self._suspects]
        names += [each.name for each in self._top_layers]
        self._label = min(max([_LEAST_NAME, *map(len, names)]), max(room * 2 // 5, _LEAST_NAME))
        self._width = max(room - self._label - 1, 4)
        self._columns = Columns.of(live.steps, self._width)

    @property
    def _cell_widths(self) -> list[int]:
        return [width for place, width in enumerate(_CELLS) if place != 1 or self._is_wide]

    def lines(self) -> Iterator[Text]:
        steps = self._live.steps
        if self._signals:
            yield from self._heading(f"{'':{self._label}} steps {steps[0]} to {steps[-1]}", "now", "median", "largest", "at")
        for name, series, span in self._signals:
            form = percent if span else number
            cells = [form(series.values[-1]), form(series.median if series.finite.values else None), *_largest(series, form)]
            yield self._row(name, series, cells, span, "" if math.isfinite(series.values[-1]) else _LOUD)
        yield from self._marks()
        if self._suspects:
            yield from self._heading(f"by suspicion in step {self._step}", "score", "share", "times", "since")
        for suspect in self._suspects:
            score = "-" if suspect.score is None or suspect.nonfinite else number(suspect.score)
            factor = "NaN/Inf" if suspect.nonfinite else "-" if suspect.factor is None else factor_text(suspect.factor)
            cells = [score, percent(suspect.share), factor, "-" if suspect.since is None else str(suspect.since)]
            style = _LOUD if suspect.nonfinite else "" if suspect.since is None else _WARN
            yield self._row(suspect.name, self._live.norms(suspect.name), cells, None, style)
        if self._top_layers:
            yield from self._heading("largest share of the squared norm", "share", "usual", "largest", "at")
        for layer in self._top_layers:
            cells = [percent(layer.share), number(layer.usual), *_largest(layer.series, number)]
            yield self._row(layer.name, layer.series, cells, None, "")

    def _heading(self, title: str, *cells: str) -> Iterator[Text]:
        if self._screen.has_room:
            yield Text()
        room = self._label + 1 + self._width
        yield Text(f"{title[:room]:<{room}}{self._cells(cells)}", style=_DIM)

    def _row(self, name: str, series: Series, cells: Sequence[str], span: tuple[float, float] | None, style: str) -> Text:
        drawn = sparkline(self._columns.largest(series.steps, series.values), self._screen.letters, span)
        line = Text(f"{self._screen.name(name, self._label):<{self._label}} ")
        sparks = Text(f"{drawn:<{self._width}}", style=_GOOD)
        sparks.highlight_regex(NONFINITE, _LOUD)
        return line.append_text(sparks).append(self._cells(cells), style)

    def _cells(self, cells: Sequence[str]) -> str:
        shown = [cell for place, cell in enumerate(cells) if place != 1 or self._is_wide]
        return "".join(f"{cell:>{width}}" for cell, width in zip(shown, self._cell_widths, strict=True))

    def _marks(self) -> Iterator[Text]:
        spikes = self._columns.marks([event.step for event in self._live.events], "▲" if self._screen.unicode else "^")
        not_applied = self._columns.marks(self._live.not_applied, "x")
        both = "".join(skip if spike == " " else spike for spike, skip in zip(spikes, not_applied, strict=True))
        if both.strip():
            line = Text(f"{'spikes':<{self._label}} ").append(f"{both:<{self._width}}", _WARN)
            yield line.append("  x: not applied" if "x" in both else "", _DIM)


def _largest(series: Series, form: Callable[[float | None], str]) -> tuple[str, str]:
    values = series.finite.values
    if not values:
        return "-", "-"
    return form(max(values)), str(series.finite.steps[values.index(max(values))])


def _spikes(live: LiveRun, screen: Screen) -> Iterator[Text]:
    if live.events and screen.has_room:
        yield Text()
    for spike in reversed(live.spikes[-screen.spikes :]):
        events = spike.of_worst
        parts = [event.reason.partition(" (")[0] for event in events]
        parts += [next((event.where for event in events if event.where), ""), events[0].action]
        head = f"{'' if spike.first == spike.last else f'{spike.when}, largest '}step {spike.worst.step}  "
        text, width = screen.shown("; ".join(filter(None, parts))), max(screen.columns - len(head), 10)
        for place, line in enumerate(textwrap.wrap(text, width, max_lines=2, placeholder=" ...")):
            yield Text.assemble((f"{'' if place else head:{len(head)}}", _WARN), line)


def print_frame(console: QuietConsole, follower: RunFollower) -> None:
    screen = Screen(console.width, None, _has_unicode(console))
    for line in frame(follower, screen, time.time()):
        console.print(line, soft_wrap=True)


def follow(console: QuietConsole, follower: RunFollower, interval: float) -> None:
    """Show a frame every ``interval`` seconds until Ctrl-C, then leave the last one on the terminal."""
    display = Display(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with contextlib.suppress(KeyboardInterrupt), display:
        while True:
            follower.refresh()
            width, height = console.size
            lines = frame(follower, Screen(width, height - 1, _has_unicode(console)), time.time())
            lines += [Text()] * (height - 1 - len(lines))
            lines.append(Text(f"Ctrl-C ends; every {interval:g} s", style="dim"))
            display.update(Group(*lines), refresh=True)
            time.sleep(interval)
    print_frame(console, follower)


def wait(follower: RunFollower, interval: float) -> None:
    while follower.live is None or follower.live.last is None:
        time.sleep(interval)
        follower.refresh()


def _has_unicode(console: QuietConsole) -> bool:
    return console.encoding.lower().startswith("utf")

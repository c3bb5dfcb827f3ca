"""The live view of ``gradmon live``. Needs rich."""

from __future__ import annotations

import contextlib
import math
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Group
from rich.live import Live as Display
from rich.text import Text

from ...analysis.diagnosis.series import Series
from ...core.formatting import cut_start, duration, factor_text, number, percent
from ...core.keys import SUMMARY, Key
from ...core.records import StepRecord
from ...spikes.attribution import ParameterAttribution
from .layer_table import rates_in
from .live import ASCII, BLOCKS, NONFINITE, Columns, LiveRun, RunFollower, sparkline
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
    pace, silence = live.pace, max(now - live.last.time, 0.0)
    head.append(f"step {live.last.step}  ", "bold")
    if silence > max(_IDLE_SECONDS, _IDLE_STEPS * (pace or 0.0)):
        yield head.append(f"no new step for {duration(silence)}", _WARN)
    else:
        yield head.append("live" if pace is None else f"live, {number(1 / pace)} steps/s", _GOOD)
    yield _facts(live, live.last)
    if follower.problem:
        yield Text(screen.shown(follower.problem), style=_WARN)
    spikes = list(_spikes(live, screen))
    yield from _sparklines(live, screen, taken=2 + bool(follower.problem) + len(spikes))
    yield from spikes


def _facts(live: LiveRun, last: StepRecord) -> Text:
    rates, overhead, scale = rates_in(last.context), live.fact("overhead_fraction"), last.context.get("amp_scale")
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
    separated = [part for text, style in facts if text for part in (", ", (text, style))]
    return Text.assemble(*separated[1:])


class _Row(NamedTuple):
    name: str
    series: Series
    cells: Sequence[str]
    style: str
    span: tuple[float, float] | None = None


def _sparklines(live: LiveRun, screen: Screen, taken: int) -> Iterator[Text]:
    """The sparklines. All have the same columns, so that simultaneous values are aligned. Other parts need ``taken`` lines."""
    signals = list(_signals(live))
    taken += len(signals) + 4 + (3 if screen.has_room else 0)  # headings, marks and gaps
    most = _LAYERS if screen.rows is None else min(max((screen.rows - taken) // 2, 1), _MOST_LAYERS)
    step, suspects = live.suspects(most)
    top = [
        _Row(layer.name, layer.series, (percent(layer.share), number(layer.usual), *_largest(layer.series, number)), "")
        for layer in live.top_layers(most)
    ]
    sections = [
        ("", ("now", "median", "largest", "at"), signals),
        (f"by suspicion in step {step}", ("score", "share", "times", "since"), [_suspected(live, each) for each in suspects]),
        ("largest share of the squared norm", ("share", "usual", "largest", "at"), top),
    ]
    widths = [width for place, width in enumerate(_CELLS) if place != 1 or screen.columns >= _WIDE]
    room = screen.columns - sum(widths)
    longest = max([_LEAST_NAME, *(len(row.name) for _, _, rows in sections for row in rows)])
    label = min(longest, max(room * 2 // 5, _LEAST_NAME))
    room = max(room, label + 5)
    columns = Columns.of(live.steps, room - label - 1)

    def joined(cells: Sequence[str]) -> str:
        shown = [cell for place, cell in enumerate(cells) if place != 1 or screen.columns >= _WIDE]
        return "".join(f"{cell:>{width}}" for cell, width in zip(shown, widths, strict=True))

    for title, headings, rows in sections:
        if rows and screen.has_room:
            yield Text()
        if rows:
            title = title or f"{'':{label}} steps {live.steps[0]} to {live.steps[-1]}"
            yield Text(f"{title[:room]:<{room}}{joined(headings)}", style=_DIM)
        for row in rows:
            drawn = sparkline(columns.largest(row.series.steps, row.series.values), BLOCKS if screen.unicode else ASCII, row.span)
            sparks = Text(f"{drawn:<{room - label - 1}}", style=_GOOD)
            sparks.highlight_regex(NONFINITE, _LOUD)
            yield Text.assemble(f"{screen.name(row.name, label):<{label}} ", sparks, (joined(row.cells), row.style))
        if rows is signals:
            yield from _marks(live, screen, columns, label, room)


def _signals(live: LiveRun) -> Iterator[_Row]:
    loss = live.loss
    keys: list[tuple[str, Key, tuple[float, float] | None]] = [] if loss is None else [(loss.name, loss, None)]
    for name, key, span in keys + [(name, Key(SUMMARY, "", key), span) for name, key, span in _SIGNALS]:
        series, form = live.series(key), percent if span else number
        if series.steps:
            last, median = series.values[-1], series.median if series.finite.values else None
            cells = form(last), form(median), *_largest(series, form)
            yield _Row(name, series, cells, "" if math.isfinite(last) else _LOUD, span)


def _suspected(live: LiveRun, suspect: ParameterAttribution) -> _Row:
    score = "-" if suspect.score is None or suspect.nonfinite else number(suspect.score)
    factor = "NaN/Inf" if suspect.nonfinite else "-" if suspect.factor is None else factor_text(suspect.factor)
    cells = score, percent(suspect.share), factor, "-" if suspect.since is None else str(suspect.since)
    style = _LOUD if suspect.nonfinite else "" if suspect.since is None else _WARN
    return _Row(suspect.name, live.norms(suspect.name), cells, style)


def _marks(live: LiveRun, screen: Screen, columns: Columns, label: int, room: int) -> Iterator[Text]:
    spikes = columns.marks([event.step for event in live.events], "▲" if screen.unicode else "^")
    not_applied = columns.marks(live.not_applied, "x")
    both = "".join(skip if spike == " " else spike for spike, skip in zip(spikes, not_applied, strict=True))
    if both.strip():
        line = Text.assemble(f"{'spikes':<{label}} ", (f"{both:<{room - label - 1}}", _WARN))
        yield line.append("  x: not applied" if "x" in both else "", _DIM)


def _largest(series: Series, form: Callable[[float | None], str]) -> tuple[str, str]:
    values = series.finite.values
    if not values:
        return "-", "-"
    return form(max(values)), str(series.finite.steps[values.index(max(values))])


def _spikes(live: LiveRun, screen: Screen) -> Iterator[Text]:
    if live.events and screen.has_room:
        yield Text()
    most = 3 if screen.has_room else 2 if screen.rows is None or screen.rows >= 20 else 1
    for spike in reversed(live.spikes[-most:]):
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


def _has_unicode(console: QuietConsole) -> bool:
    return console.encoding.lower().startswith("utf")

"""Charts of two runs over each other: the first as a line, the second dashed above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..diagnosis.series import Series
from . import colours
from .charts import GUIDE, is_wide, there
from .elements import POINTS, Line, Lines, Strip
from .pairing import Pair
from .panels import Reel


def norm(pair: Pair, marks: Sequence[int] = ()) -> Lines:
    """The loss, the norm of all gradients before and after clipping, and the share of clipped steps.

    Raises:
        ValueError: neither run has any of it.
    """
    wide = any(is_wide(reel.loss()) for reel in pair.reels)
    strips = [
        _strip(pair, "loss", Reel.loss, is_log=wide),
        _strip(pair, "gradient norm", lambda reel: reel.line("grad_norm"), height=1.5),
        _strip(pair, "after clipping", lambda reel: reel.line("grad_norm_clipped")),
        _strip(pair, "clipped share", lambda reel: reel.line("clipped_share"), is_log=False, limits=(0.0, 1.05), height=0.7),
    ]
    found = tuple(strip for strip in strips if strip is not None)
    if not found:
        raise ValueError("neither a gradient norm nor a loss was recorded; use a preset, or log the loss")
    return Lines("loss and gradient norm", found, tuple(marks))


def update(pair: Pair, marks: Sequence[int] = ()) -> Lines:
    """The update of all parameters over their norm.

    Raises:
        ValueError: neither run has it.
    """
    strip = _strip(
        pair,
        "update / parameter",
        lambda reel: reel.line("update_ratio"),
        guides={"what works for most models:": GUIDE},
    )
    if strip is None:
        raise ValueError("updates were not measured: attach the optimizer, and use the preset standard or full")
    return Lines("update over parameter", (strip,), tuple(marks))


def layers(pair: Pair, names: Sequence[str], marks: Sequence[int] = (), view: str = "gradient") -> Lines:
    """Single layers side by side, by their names in the second run.

    Raises:
        ValueError: there are none, or one of the runs lacks the view.
    """
    panels = pair.panels(view)
    if panels is None or not names:
        raise ValueError(f"there is no {view} of any layer that both runs have")
    strips = []
    for name in names:
        column = panels.first.names.index(name)
        lines = (Series(each.steps, tuple(each.values[:, column].tolist())) for each in (panels.first, panels.second))
        strips.append(Strip(name, _lines(pair, [there(line) for line in lines], POINTS // 4), panels.first.view.is_log))
    return Lines(panels.first.view.title, tuple(strips), tuple(marks), columns=3)


def _strip(
    pair: Pair,
    title: str,
    of: Callable[[Reel], Series],
    *,
    is_log: bool = True,
    limits: tuple[float, float] | None = None,
    height: float = 1.0,
    guides: dict[str, float] | None = None,
) -> Strip | None:
    series = [of(reel) for reel in pair.reels]
    if not any(map(len, series)):
        return None
    return Strip(title, _lines(pair, series, POINTS), is_log, guides or {}, limits, height)


def _lines(pair: Pair, series: Sequence[Series], most: int) -> tuple[Line, ...]:
    colour = colours.BLUE, colours.ORANGE
    return tuple(
        Line.of(title, line, colour[place], reel.gaps(line.steps), most, is_dashed=place == 1)
        for place, (title, reel, line) in enumerate(zip(pair.titles, pair.reels, series, strict=True))
        if len(line)
    )

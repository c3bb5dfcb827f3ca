"""Two runs over each other: their layers on the same steps, and how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core.model_order import merged
from .gaps import common
from .panels import Panel, Reel, View


@dataclass(frozen=True)
class PanelPair:
    """One view of both runs, on the steps and layers that either has.

    Attributes:
        first: the values of the first run.
        second: those of the second.
        apart: how far they are apart, relative to the larger one: 0 where they are the same, as where both are not finite; infinity
            where one of them is not; NaN where one of them has none.
    """

    first: Panel
    second: Panel
    apart: Panel


class Pair:
    """The values of two runs.

    Args:
        first, second: the runs.
        renamed: what a layer of the first run is called in the second.
    """

    def __init__(self, first: Reel, second: Reel, renamed: Callable[[str], str] = str) -> None:
        self.reels = first, second
        self._renamed = renamed
        self._pairs: dict[str, PanelPair | None] = {}

    @property
    def titles(self) -> tuple[str, str]:
        """What the runs are called."""
        return self.reels[0].title, self.reels[1].title

    def panels(self, name: str) -> PanelPair | None:
        """One of :data:`torch_gradmon.analysis.plots.panels.LAYER_VIEWS`; None where one of the runs lacks it, or has it of another source.

        Raises:
            KeyError: there is no such view.
        """
        if name not in self._pairs:
            first, second = (reel.panel(name) for reel in self.reels)
            if first is None or second is None or first.source != second.source:
                self._pairs[name] = None
            else:
                self._pairs[name] = self._paired(first, second)
        return self._pairs[name]

    def _paired(self, first: Panel, second: Panel) -> PanelPair:
        own = replace(first, names=tuple(map(self._renamed, first.names)))
        steps = tuple(sorted({*own.steps, *second.steps}))
        names = tuple(merged([own.names, second.names]))
        span = min(own.axis[0], second.axis[0]), max(own.axis[1], second.axis[1])
        gaps = common(own.gaps, second.gaps)
        a, b = (_laid(replace(each, gaps=gaps, span=span), steps, names) for each in (own, second))
        view = View(f"{first.view.title}, relative difference", first.view.sources, first.view.metric, is_apart=True)
        return PanelPair(a, b, replace(a, view=view, values=relative(a.values, b.values)))


def relative(a: Tensor, b: Tensor) -> Tensor:
    """How far the values of two panels are apart, see :class:`PanelPair`; float64 as they are."""
    larger = torch.maximum(a.abs(), b.abs())
    found = torch.where(larger > 0, (a - b).abs() / larger, 0.0)
    found = torch.where(a.isinf() != b.isinf(), math.inf, found)
    found = torch.where(a.isinf() & b.isinf(), 0.0, found)
    return torch.where(a.isnan() | b.isnan(), math.nan, found)


def _laid(panel: Panel, steps: Sequence[int], names: Sequence[str]) -> Panel:
    row, column = ({key: place for place, key in enumerate(keys)} for keys in (steps, names))
    values = torch.full((len(steps), len(names)), math.nan, dtype=torch.float64, device="cpu")
    rows = torch.tensor([row[step] for step in panel.steps], dtype=torch.int64, device="cpu")
    columns = torch.tensor([column[name] for name in panel.names], dtype=torch.int64, device="cpu")
    values[rows[:, None], columns] = panel.values
    return replace(panel, steps=tuple(steps), names=tuple(names), values=values)

"""Two runs on the same steps and layers, and their differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core.model_order import merged
from ...runs.reader import fitting
from .gaps import intersection
from .panel_set import PanelSet
from .views import Panel, PlotView


@dataclass(frozen=True)
class PanelPair:
    """One view of both runs, on the steps and layers of either.

    Attributes:
        first, second: the values of the runs.
        difference: relative to the larger value. 0 where the values are equal or neither is finite; infinity where one of them is not
            finite; NaN where one is missing.
    """

    first: Panel
    second: Panel
    difference: Panel


class RunPair:
    """The values of two runs.

    Args:
        first, second: the runs.
        renamed: maps the name of a layer in the first run to its name in the second.
    """

    def __init__(self, first: PanelSet, second: PanelSet, renamed: Callable[[str], str] = str) -> None:
        self.panel_sets = first, second
        self._renamed = renamed
        self._pairs: dict[str, PanelPair | None] = {}

    @property
    def titles(self) -> tuple[str, str]:
        """The names of the runs."""
        return self.panel_sets[0].title, self.panel_sets[1].title

    def panels(self, name: str) -> PanelPair | None:
        """Both panels of one of :data:`torch_gradmon.analysis.plots.views.LAYER_VIEWS`; None unless both runs have it of one source.

        Raises:
            KeyError: there is no such view.
        """
        if name not in self._pairs:
            first, second = (panels.panel(name) for panels in self.panel_sets)
            if first is None or second is None or first.source != second.source:
                self._pairs[name] = None
            else:
                self._pairs[name] = self._paired(first, second)
        return self._pairs[name]

    def _paired(self, first: Panel, second: Panel) -> PanelPair:
        own = replace(first, names=tuple(map(self._renamed, first.names)))
        steps = tuple(sorted({*own.steps, *second.steps}))
        known = [dict(zip(each.names, (~each.values.isnan()).sum(0).tolist(), strict=True)) for each in (own, second)]
        both = merged([own.names, second.names])
        names = fitting({name: sum(each.get(name, 0) for each in known) for name in both}, len(steps))
        span = min(own.axis[0], second.axis[0]), max(own.axis[1], second.axis[1])
        gaps = intersection(own.gaps, second.gaps)
        a, b = (_aligned(replace(each, gaps=gaps, span=span, due=frozenset()), steps, names) for each in (own, second))
        view = PlotView(f"{first.view.title}, relative difference", first.view.sources, first.view.metric, is_difference=True)
        return PanelPair(a, b, replace(a, view=view, values=relative(a.values, b.values)))


def relative(a: Tensor, b: Tensor) -> Tensor:
    """The relative difference of two panels' values, float64 as they are; see :class:`PanelPair`."""
    larger = torch.maximum(a.abs(), b.abs())
    found = torch.where(larger > 0, (a - b).abs() / larger, 0.0)
    found = torch.where(a.isinf() != b.isinf(), math.inf, found)
    found = torch.where(a.isinf() & b.isinf(), 0.0, found)
    return torch.where(a.isnan() | b.isnan(), math.nan, found)


def _aligned(panel: Panel, steps: Sequence[int], names: Sequence[str]) -> Panel:
    """``panel`` with these steps and names; it may lack some of them, and have more names."""
    row, column = ({key: place for place, key in enumerate(keys)} for keys in (steps, names))
    values = torch.full((len(steps), len(names)), math.nan, dtype=torch.float64, device="cpu")
    rows = torch.tensor([row[step] for step in panel.steps], dtype=torch.int64, device="cpu")
    kept = [place for place, name in enumerate(panel.names) if name in column]
    columns = torch.tensor([column[panel.names[place]] for place in kept], dtype=torch.int64, device="cpu")
    values[rows[:, None], columns] = panel.values if len(kept) == len(panel.names) else panel.values[:, kept]
    return replace(panel, steps=tuple(steps), names=tuple(names), values=values)

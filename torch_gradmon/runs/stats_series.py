"""Statistics of many steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.moments import ALWAYS, VIEWS, WIDTH, Column, merge_by_group


@dataclass(frozen=True)
class StatsSeries:
    """Like :class:`torch_gradmon.core.records.StatsTable`, for many steps with the same tensors and columns.

    Attributes:
        steps: ascending.
        names: of the tensors, in model order.
        rows: float64 ``[steps, tensors, 8]`` on the host; only ``columns`` were measured.
        columns: the measured ones.
    """

    steps: tuple[int, ...]
    names: tuple[str, ...]
    rows: Tensor
    columns: frozenset[Column]

    def has(self, metric: str) -> bool:
        """Whether the measured columns suffice for a built-in metric."""
        return VIEWS[metric].columns <= self.columns | ALWAYS

    def values(self, metric: str) -> Tensor:
        """A built-in metric, float64 ``[steps, tensors]``; NaN if it was not measured or is undefined for a tensor."""
        if not self.has(metric):
            return torch.full(self.rows.shape[:2], torch.nan, dtype=torch.float64, device="cpu")
        view, flat = VIEWS[metric], self.rows.reshape(-1, WIDTH)
        return torch.where(view.defined(flat), view.compute(flat), torch.nan).reshape(self.rows.shape[:2])

    def of(self, names: tuple[str, ...]) -> StatsSeries:
        """Only these tensors, which must all be present."""
        if names == self.names:
            return self
        place = {name: number for number, name in enumerate(self.names)}
        return StatsSeries(self.steps, names, self.rows[:, [place[name] for name in names]], self.columns)

    def at(self, places: Sequence[int]) -> StatsSeries:
        """Only the steps at these positions."""
        if len(places) == len(self.steps):
            return self
        return StatsSeries(tuple(self.steps[place] for place in places), self.names, self.rows[list(places)], self.columns)

    def merged(self, names: tuple[str, ...], groups: list[int]) -> StatsSeries:
        """Sum tensors into the groups ``names``; ``groups`` has the group of each tensor. Exact, since rows are additive."""
        count = len(self.steps)
        offsets = len(names) * torch.arange(count, device="cpu").unsqueeze(1)
        index = torch.tensor(groups, dtype=torch.int64, device="cpu") + offsets
        rows = merge_by_group(self.rows.reshape(-1, WIDTH), index.flatten(), count * len(names))
        return StatsSeries(self.steps, names, rows.reshape(count, len(names), WIDTH), self.columns)


def paired(some: Iterable[StatsSeries], others: Iterable[StatsSeries]) -> Iterator[tuple[StatsSeries, StatsSeries]]:
    """Pairs with the common steps and tensors, such as of updates and weights. Both inputs are ascending and consumed once."""
    coming, waiting = iter(others), list[StatsSeries]()
    for one in some:
        while not waiting or waiting[-1].steps[-1] < one.steps[-1]:
            following = next(coming, None)
            if following is None:
                break
            waiting.append(following)
        for other in waiting:
            common = set(one.steps).intersection(other.steps)
            names = set(one.names).intersection(other.names)
            if common and names:
                pair = [each.at([place for place, step in enumerate(each.steps) if step in common]) for each in (one, other)]
                shared = tuple(name for name in one.names if name in names)
                yield pair[0].of(shared), pair[1].of(shared)
        waiting = [other for other in waiting if other.steps[-1] > one.steps[-1]]

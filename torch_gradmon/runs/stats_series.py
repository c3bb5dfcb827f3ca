"""Statistics of many steps at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.moments import ALWAYS, VIEWS, WIDTH, Column, merge_by_group


@dataclass(frozen=True)
class StatsSeries:
    """What a :class:`torch_gradmon.core.records.StatsTable` is, for many steps that measured the same of the same tensors.

    Attributes:
        steps: ascending.
        names: of the tensors, in model order.
        rows: float64 ``[steps, tensors, 8]`` on the host; only ``columns`` were measured.
        columns: see above.
    """

    steps: tuple[int, ...]
    names: tuple[str, ...]
    rows: Tensor
    columns: frozenset[Column]

    def has(self, metric: str) -> bool:
        """Whether what was measured suffices for a built-in metric."""
        return VIEWS[metric].columns <= self.columns | ALWAYS

    def values(self, metric: str) -> Tensor:
        """A built-in metric, float64 ``[steps, tensors]``; NaN where it was not measured, where a tensor has no such value, or where
        that is NaN.
        """
        if not self.has(metric):
            return torch.full(self.rows.shape[:2], torch.nan, dtype=torch.float64, device="cpu")
        view, flat = VIEWS[metric], self.rows.reshape(-1, WIDTH)
        return torch.where(view.defined(flat), view.compute(flat), torch.nan).reshape(self.rows.shape[:2])

    def of(self, names: tuple[str, ...]) -> StatsSeries:
        """Of these tensors, all of which it has."""
        if names == self.names:
            return self
        place = {name: number for number, name in enumerate(self.names)}
        return StatsSeries(self.steps, names, self.rows[:, [place[name] for name in names]], self.columns)

    def at(self, places: Sequence[int]) -> StatsSeries:
        """Of the steps at these places."""
        if len(places) == len(self.steps):
            return self
        return StatsSeries(tuple(self.steps[place] for place in places), self.names, self.rows[list(places)], self.columns)

    def merged(self, names: tuple[str, ...], groups: list[int]) -> StatsSeries:
        """One row for each of the groups ``names``, ``groups`` being the group of each tensor: rows are additive, so this is exact."""
        count = len(self.steps)
        index = torch.tensor(groups, dtype=torch.int64, device="cpu") + len(names) * torch.arange(count, device="cpu").unsqueeze(
            1
        )
        rows = merge_by_group(self.rows.reshape(-1, WIDTH), index.flatten(), count * len(names))
        return StatsSeries(self.steps, names, rows.reshape(count, len(names), WIDTH), self.columns)


def paired(some: Iterable[StatsSeries], others: Iterable[StatsSeries]) -> Iterator[tuple[StatsSeries, StatsSeries]]:
    """Both of the steps and tensors that both have, such as updates and weights; each is ascending and gone through once."""
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

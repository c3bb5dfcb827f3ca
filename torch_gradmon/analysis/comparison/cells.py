"""Single values of a compared step, and the facts of steps as values."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ...core.keys import Key, format_key
from ...runs.reader import ValueMatrix, Window, is_of_layer
from .causal_order import CONTEXT, stage_of
from .matching import SheetComparison
from .result import Divergence


class Cell(NamedTuple):
    """One value of the only step of a sheet."""

    sheet: SheetComparison
    column: int

    @property
    def key(self) -> Key:
        """Of the value in the first run."""
        return self.sheet.pairing.keys[self.column]

    @property
    def item(self) -> Key:
        """The tensor of the value, or its key if it is no value of a tensor."""
        return item_key(self.key)

    @property
    def share(self) -> float | None:
        """The value over the largest one of its source and metric; None if it is no value of a tensor."""
        if not is_of_layer(self.key):
            return None
        alike = [column for column, key in enumerate(self.sheet.pairing.keys) if key.metric == self.key.metric]
        sizes = torch.maximum(self.sheet.left[0].abs(), self.sheet.right[0].abs()).nan_to_num(0.0)
        return float(sizes[self.column] / sizes[alike].max())

    def divergence(self, step: int, metrics: int = 1) -> Divergence:
        """The value as a divergence in ``step``; ``metrics`` of its tensor diverge."""
        sheet, column, pairing = self.sheet, self.column, self.sheet.pairing
        return Divergence(
            step,
            format_key(self.key),
            format_key(pairing.others[column]),
            stage_of(self.key),
            float(sheet.left[0, column]),
            float(sheet.right[0, column]),
            float(sheet.relative[0, column]),
            float(pairing.rtol[column]),
            metrics,
        )


def item_key(key: Key) -> Key:
    """The key without its metric for a value of a tensor; other keys as they are."""
    return key._replace(metric="") if is_of_layer(key) else key


def facts_of(window: Window) -> ValueMatrix:
    """Learning rates, the loss scale, and whether the step was applied, as values."""
    rows: list[dict[Key, float]] = []
    for step in window.steps:
        facts = window.facts[step]
        rates = facts.get("lr", [])
        row = {Key(CONTEXT, "lr", "" if len(rates) == 1 else str(group)): float(rate) for group, rate in enumerate(rates)}
        row |= {Key(CONTEXT, name, ""): float(facts[name]) for name in ("amp_scale", "applied") if facts.get(name) is not None}
        rows.append(row)
    keys = tuple(dict.fromkeys(key for row in rows for key in row))
    values = torch.tensor([[row.get(key, math.nan) for key in keys] for row in rows], dtype=torch.float64, device="cpu")
    there = torch.tensor([[key in row for key in keys] for row in rows], dtype=torch.bool, device="cpu")
    return ValueMatrix(keys, values.reshape(len(rows), len(keys)), there.reshape(len(rows), len(keys)))

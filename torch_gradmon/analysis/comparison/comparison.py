"""Two runs compared step by step, up to the first step in which they diverge."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...core import keys as n
from ...core.keys import Key, format_key
from ...core.loss_keys import loss_among
from ...core.moments import VIEWS
from ...runs.reader import ValueMatrix, is_of_layer
from ..run import Run
from .causal_order import CONTEXT, STAGES, Order, stage_of
from .cells import Cell, facts_of, item_key
from .interpretation import Onset, interpret, interpret_gaps, interpret_noise
from .matching import Pairing, SheetComparison, compare
from .result import Divergence, StageCounts
from .rules import Rules
from .unmatched import Gaps, compared_items, item_of

#: Values that are compared at once, over all steps of a window; and the steps of the first window.
_CELLS, _FIRST = 1 << 19, 8
#: Whole-model values whose growth is shown, in addition to the loss.
_OF_GROWTH = ("param_norm", "grad_norm", "update_norm")
#: The sheet of values that are not of tensors.
_OTHERS = ""


@dataclass
class ScanResult:
    """The result of comparing step by step.

    Attributes:
        steps: the compared steps.
        first: the one in which the runs diverge.
        onset: the one with the first difference of any size.
        largest: the largest relative difference within the tolerance, and its step.
        gaps: for each run, by key (of a tensor without a metric), in how many steps only this run has it, and the first.
    """

    steps: list[int] = field(default_factory=list)
    first: int | None = None
    onset: int | None = None
    largest: tuple[float, int] = (0.0, -1)
    gaps: tuple[Gaps, Gaps] = field(default_factory=lambda: ({}, {}))


class _PairedKeys(NamedTuple):
    """The keys of two sheets, the keys that each lacks in these steps, and the pairing of all."""

    left: tuple[Key, ...]
    right: tuple[Key, ...]
    more_left: tuple[Key, ...]
    more_right: tuple[Key, ...]
    pairing: Pairing


class Comparison:
    """Compares two runs.

    Args:
        left, right: the runs.
        rules: what is compared, and the tolerances.
    """

    def __init__(self, left: Run, right: Run, rules: Rules) -> None:
        self._runs, self._rules = (left, right), rules
        tensors = {source: left.tensors_as_measured(source) for source in left.sources}
        self._order = Order(tensors)
        self._width = sum(map(len, tensors.values())) * (len(VIEWS) + 1) + len(left.scalars)
        self._known = {rules.renamed(key): key for key in compared_items(left)}
        self._known_right = frozenset(compared_items(right))
        self._pairings: dict[str, _PairedKeys] = {}

    def scan(self, steps: Sequence[int], advance: Callable[[int], None]) -> ScanResult:
        """Compare common ``steps`` up to the first that diverges; calls ``advance`` with the number of steps done."""
        found = ScanResult()
        for some in self._windows(steps):
            self._record(found, some, self._compared(some, thorough=False))
            advance(len(some))
            if found.first is not None:
                break
        return found

    def _windows(self, steps: Sequence[int]) -> Iterator[Sequence[int]]:
        most, size, done = max(_CELLS // max(self._width, 1), 1), _FIRST, 0
        while done < len(steps):
            yield steps[done : done + min(size, most)]
            done, size = done + min(size, most), 4 * size

    def _compared(self, steps: Sequence[int], thorough: bool) -> list[SheetComparison]:
        """All sheets of ``steps``; unless ``thorough``, without those whose stored statistics are byte for byte equal."""
        left, right = (run.window(steps) for run in self._runs)
        sources = list(dict.fromkeys((*left.sources, *right.sources)))
        if not thorough and not self._rules.rename:
            sources = [source for source in sources if not left.is_like(right, source)]
        pairs = [(source, left.sheet(source), right.sheet(source)) for source in sources]
        pairs += [(_OTHERS, left.others, right.others), (CONTEXT, facts_of(left), facts_of(right))]
        return [self._compare(source, a, b) for source, a, b in pairs]

    def _compare(self, source: str, left: ValueMatrix, right: ValueMatrix) -> SheetComparison:
        known = self._pairings.get(source)
        if known is None or (known.left, known.right) != (left.keys, right.keys):
            known = self._pairings[source] = self._paired(left.keys, right.keys)
        return compare(left.with_absent(known.more_left), right.with_absent(known.more_right), known.pairing, self._rules.atol)

    def _paired(self, left: tuple[Key, ...], right: tuple[Key, ...]) -> _PairedKeys:
        """Corresponding keys; also those that one run lacks in these steps but has in others."""
        renamed = {self._rules.renamed(key) for key in left}
        there = set(right)
        more_right = tuple(key for key in renamed if key not in there and item_of(key) in self._known_right)
        lacking = [(key, item_of(key)) for key in right if key not in renamed]
        more_left = tuple(
            key._replace(name=self._known[item].name) for key, item in lacking if item is not None and item in self._known
        )
        pairing = Pairing.of((*left, *more_left), (*right, *more_right), self._rules)
        return _PairedKeys(left, right, more_left, more_right, pairing)

    def _record(self, found: ScanResult, steps: Sequence[int], sheets: Sequence[SheetComparison]) -> None:
        divergence = _first_row([sheet.diverges for sheet in sheets])
        rows = len(steps) if divergence is None else divergence + 1
        found.steps += steps[:rows]
        found.first = None if divergence is None else steps[divergence]
        if found.onset is None:
            onset = _first_row([sheet.differs for sheet in sheets])
            found.onset = None if onset is None else steps[onset]
        for sheet in sheets:
            within = torch.where(sheet.diverges, 0.0, sheet.relative)[:divergence]
            if within.numel() and float(within.max()) > found.largest[0]:
                found.largest = (float(within.max()), steps[int(within.amax(1).argmax())])
            _record_gaps(found, steps[:rows], sheet)

    def divergences(self, step: int) -> tuple[list[Divergence], str]:
        """The divergent values of a step, one for each tensor, in the order of computation; and a remark on the first."""
        by_item: dict[Key, list[Cell]] = {}
        for cell in self._cells(step, lambda sheet: sheet.diverges):
            by_item.setdefault(cell.item, []).append(cell)
        found = [cells[0].divergence(step, len(cells)) for cells in by_item.values()]
        share = next(iter(by_item.values()))[0].share
        return found, interpret_noise(found[0].stage, found[0].key, share)

    def onset(self, step: int, steps: Sequence[int], settings: Sequence[str]) -> tuple[Divergence, str]:
        """The value that differs first in the first step with a difference, and what that points to; ``settings``: those of optimizers
        that differ.
        """
        cell = self._cells(step, lambda sheet: sheet.differs)[0]
        found, row = cell.divergence(step), bisect_left(steps, step)
        before = steps[row - 1] if row else None
        is_finite = math.isfinite(found.a) and math.isfinite(found.b)
        stages = self.stages(step)
        return found, interpret(Onset(found.stage, found.key, step, before, stages, found.relative, is_finite, settings))

    def _cells(self, step: int, chosen: Callable[[SheetComparison], Tensor]) -> list[Cell]:
        """The chosen values of a step, in the order of computation."""
        sheets = self._compared([step], thorough=True)
        cells = [Cell(sheet, column) for sheet in sheets for column in torch.nonzero(chosen(sheet)[0]).flatten().tolist()]
        return sorted(cells, key=lambda cell: self._order.rank(cell.key))

    def missing(self, onset: Divergence, gaps: tuple[Gaps, Gaps]) -> tuple[str, bool]:
        """A sentence on what a run first lacks in the step of ``onset``, and whether that is computed no later than its stage."""
        sentences, stages = [], []
        for run, found in zip(("second", "first"), gaps, strict=True):  # what only the first has is missing from the second
            keys = sorted((key for key, (_, first) in found.items() if first == onset.step), key=self._order.rank)
            sentences.append(interpret_gaps(onset.step, run, [format_key(key) for key in keys]))
            stages += [stage_of(key) for key in keys[:1]]
        order = list(STAGES)
        return " ".join(filter(None, sentences)), any(order.index(stage) <= order.index(onset.stage) for stage in stages)

    def largest(self, step: int) -> Divergence | None:
        """The largest relative difference within the tolerance in a step."""
        cells = self._cells(step, lambda sheet: sheet.differs & ~sheet.diverges)
        best = max(cells, key=lambda cell: float(cell.sheet.relative[0, cell.column]), default=None)
        return None if best is None else best.divergence(step)

    def growth(self, steps: Sequence[int]) -> dict[str, dict[int, float]]:
        """The relative difference of the loss and of whole-model norms in these steps, by key; infinite if one is not finite."""
        sheet = self._compare(_OTHERS, *(run.window(steps).others for run in self._runs))
        keys = sheet.pairing.keys
        wanted = [loss_among(keys), *(Key(n.SUMMARY, "", name) for name in _OF_GROWTH)]
        found: dict[str, dict[int, float]] = {}
        for key in wanted:
            if key is not None and key in keys:
                column = keys.index(key)
                there = (sheet.has_left & sheet.has_right)[:, column].tolist()
                values = zip(steps, sheet.relative[:, column].tolist(), there, strict=True)
                found[format_key(key)] = {step: value for step, value, is_there in values if is_there}
        return {key: values for key, values in found.items() if values}

    def stages(self, step: int) -> dict[str, StageCounts]:
        """What is compared in a step, by stage, in their order."""
        cells: dict[str, dict[Key, tuple[bool, bool, float]]] = {}
        for sheet in self._compared([step], thorough=True):
            both = (sheet.has_left & sheet.has_right)[0].tolist()
            rows = zip(sheet.pairing.keys, both, sheet.diverges[0].tolist(), sheet.relative[0].tolist(), strict=True)
            for key, is_compared, diverges, relative in rows:
                if is_compared:
                    items = cells.setdefault(stage_of(key), {})
                    _, earlier, largest = items.get(item_key(key), (False, False, 0.0))
                    items[item_key(key)] = is_of_layer(key), earlier or diverges, max(largest, relative)
        return {stage: _counts(list(cells[stage].values())) for stage in STAGES if stage in cells}


def _record_gaps(found: ScanResult, steps: Sequence[int], sheet: SheetComparison) -> None:
    there = sheet.has_left[: len(steps)], sheet.has_right[: len(steps)]
    for gaps, alone in zip(found.gaps, (there[0] & ~there[1], there[1] & ~there[0]), strict=True):
        for column in torch.nonzero(alone.any(0)).flatten().tolist():
            item = item_of(sheet.pairing.keys[column])
            if item is not None:
                count, first = gaps.get(item, (0, steps[int(alone[:, column].int().argmax())]))
                gaps[item] = (count + int(alone[:, column].sum()), first)


def _first_row(flags: Sequence[Tensor]) -> int | None:
    rows = torch.stack([flag.any(1) for flag in flags]).any(0)
    return int(rows.int().argmax()) if bool(rows.any()) else None


def _counts(items: list[tuple[bool, bool, float]]) -> StageCounts:
    tensors = [diverges for is_tensor, diverges, _ in items if is_tensor]
    values = [diverges for is_tensor, diverges, _ in items if not is_tensor]
    return StageCounts(len(tensors), sum(tensors), len(values), sum(values), max(relative for *_, relative in items))

"""Two runs step by step: what is compared in some steps, and the first of them in which they part."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...analysis.run import Run
from ...core import keys as n
from ...core.keys import Key, format_key
from ...core.loss_keys import loss_among
from ...core.moments import VIEWS
from ...runs.window import ValueMatrix, Window, is_of_layer
from .causal_order import CONTEXT, STAGES, Order, stage_of
from .interpretation import of_gaps, of_noise, reading
from .matching import Compared, Pairing, compare
from .result import Parting, Stage
from .rules import Rules
from .unmatched import Gaps, thing_of, things

#: Values that are looked at together, over all steps of a window; and how many steps the first window has.
_CELLS, _FIRST = 1 << 19, 8
#: Whole-model values whose growth is told, besides the loss.
_OF_GROWTH = ("param_norm", "grad_norm", "update_norm")
#: What is in a sheet of its own besides the sources of tensors.
_OTHERS = ""


@dataclass
class Scan:
    """What a look through the steps has found.

    Attributes:
        steps: that were looked at.
        first: of them the one in which the runs part.
        onset: the one with the first difference of any size.
        largest: the relative difference that is the largest within the tolerance, and its step.
        gaps: for each run, by key (of a tensor without a metric), in how many steps it has it alone, and the first of them.
    """

    steps: list[int] = field(default_factory=list)
    first: int | None = None
    onset: int | None = None
    largest: tuple[float, int] = (0.0, -1)
    gaps: tuple[Gaps, Gaps] = field(default_factory=lambda: ({}, {}))


class _Pairs(NamedTuple):
    """The keys of two sheets, those that each of them is to get besides, and the pairing of all."""

    left: tuple[Key, ...]
    right: tuple[Key, ...]
    more_left: tuple[Key, ...]
    more_right: tuple[Key, ...]
    pairing: Pairing


class _Cell(NamedTuple):
    """One value of the only step of a sheet."""

    sheet: Compared
    column: int

    @property
    def key(self) -> Key:
        return self.sheet.pairing.keys[self.column]

    @property
    def share(self) -> float | None:
        """How large it is beside the largest value of its source and metric."""
        if not is_of_layer(self.key):
            return None
        alike = [column for column, key in enumerate(self.sheet.pairing.keys) if key.metric == self.key.metric]
        sizes = torch.maximum(self.sheet.left[0].abs(), self.sheet.right[0].abs()).nan_to_num(0.0)
        return float(sizes[self.column] / sizes[alike].max())

    def parting(self, step: int, metrics: int) -> Parting:
        sheet, column, pairing = self.sheet, self.column, self.sheet.pairing
        return Parting(
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


class Comparison:
    """Compares two runs by rules.

    Args:
        left, right: the runs.
        rules: what is compared, and how closely.
    """

    def __init__(self, left: Run, right: Run, rules: Rules) -> None:
        self._runs, self._rules = (left, right), rules
        tensors = {source: left.tensors_as_measured(source) for source in left.sources}
        self._order = Order(tensors)
        self._width = sum(map(len, tensors.values())) * (len(VIEWS) + 1) + len(left.scalars)
        self._known = {rules.renamed(key): key for key in things(left)}
        self._known_right = frozenset(things(right))
        self._pairings: dict[str, _Pairs] = {}

    def scan(self, steps: Sequence[int], advance: Callable[[int], None]) -> Scan:
        """Look through ``steps``, which both runs have, up to the first in which they part; tells ``advance`` of how many."""
        found = Scan()
        for some in self._windows(steps):
            sheets = self._compared(some, thorough=False)
            self._note(found, some, sheets)
            advance(len(some))
            if found.first is not None:
                break
        return found

    def _windows(self, steps: Sequence[int]) -> Iterator[Sequence[int]]:
        most, size, done = max(_CELLS // max(self._width, 1), 1), _FIRST, 0
        while done < len(steps):
            yield steps[done : done + min(size, most)]
            done, size = done + min(size, most), 4 * size

    def _compared(self, steps: Sequence[int], thorough: bool) -> list[Compared]:
        """All sheets of ``steps`` over each other; unless ``thorough``, without those whose statistics are stored byte for byte alike."""
        left, right = (run.window(steps) for run in self._runs)
        sources = list(dict.fromkeys((*left.sources, *right.sources)))
        if not thorough and not self._rules.rename:
            sources = [source for source in sources if not left.is_like(right, source)]
        pairs = [(source, left.sheet(source), right.sheet(source)) for source in sources]
        pairs += [(_OTHERS, left.others, right.others), (CONTEXT, facts_of(left), facts_of(right))]
        return [self._compare(source, a, b) for source, a, b in pairs]

    def _compare(self, source: str, left: ValueMatrix, right: ValueMatrix) -> Compared:
        known = self._pairings.get(source)
        if known is None or (known.left, known.right) != (left.keys, right.keys):
            known = self._pairings[source] = self._paired(left.keys, right.keys)
        return compare(left.with_absent(known.more_left), right.with_absent(known.more_right), known.pairing, self._rules.atol)

    def _paired(self, left: tuple[Key, ...], right: tuple[Key, ...]) -> _Pairs:
        """What belongs together; also what one run has and the other lacks in these steps, though it has it in others."""
        renamed = {self._rules.renamed(key) for key in left}
        there = set(right)
        more_right = tuple(key for key in renamed if key not in there and thing_of(key) in self._known_right)
        lacking = [(key, thing_of(key)) for key in right if key not in renamed]
        more_left = tuple(
            key._replace(name=self._known[thing].name) for key, thing in lacking if thing is not None and thing in self._known
        )
        pairing = Pairing.of((*left, *more_left), (*right, *more_right), self._rules)
        return _Pairs(left, right, more_left, more_right, pairing)

    def _note(self, found: Scan, steps: Sequence[int], sheets: Sequence[Compared]) -> None:
        parting = _first_row([sheet.parts for sheet in sheets])
        rows = len(steps) if parting is None else parting + 1
        found.steps += steps[:rows]
        found.first = None if parting is None else steps[parting]
        if found.onset is None:
            onset = _first_row([sheet.differs for sheet in sheets])
            found.onset = None if onset is None else steps[onset]
        for sheet in sheets:
            within = torch.where(sheet.parts, 0.0, sheet.relative)[: len(steps) if parting is None else parting]
            if within.numel() and float(within.max()) > found.largest[0]:
                found.largest = (float(within.max()), steps[int(within.amax(1).argmax())])
            self._note_gaps(found, steps[:rows], sheet)

    def _note_gaps(self, found: Scan, steps: Sequence[int], sheet: Compared) -> None:
        there = sheet.has_left[: len(steps)], sheet.has_right[: len(steps)]
        for run, alone in enumerate((there[0] & ~there[1], there[1] & ~there[0])):
            for column in torch.nonzero(alone.any(0)).flatten().tolist():
                key = sheet.pairing.keys[column]
                thing = thing_of(key)
                if thing is None:
                    continue
                count, first = found.gaps[run].get(thing, (0, steps[int(alone[:, column].int().argmax())]))
                found.gaps[run][thing] = (count + int(alone[:, column].sum()), first)

    def partings(self, step: int) -> tuple[list[Parting], str]:
        """What parts in a step, one for each tensor, in the order in which it comes about, and what is to be said of the first."""
        of_thing: dict[object, list[_Cell]] = {}
        for cell in self._cells(step, lambda sheet: sheet.parts):
            of_thing.setdefault(_thing(cell.key), []).append(cell)
        found = [cells[0].parting(step, len(cells)) for cells in of_thing.values()]
        share = next(iter(of_thing.values()))[0].share
        return found, of_noise(found[0].stage, found[0].key, share)

    def onset(self, step: int, steps: Sequence[int]) -> tuple[Parting, str]:
        """What differs first in a step, the first one with a difference of any size, and what that points to."""
        cell = self._cells(step, lambda sheet: sheet.differs)[0]
        found, row = cell.parting(step, 1), bisect_left(steps, step)
        before = steps[row - 1] if row else None
        is_finite = math.isfinite(found.a) and math.isfinite(found.b)
        return found, reading(found.stage, found.key, step, before, self.stages(step), found.relative, is_finite)

    def _cells(self, step: int, chosen: Callable[[Compared], Tensor]) -> list[_Cell]:
        """The chosen values of a step, in the order in which they come about."""
        sheets = self._compared([step], thorough=True)
        cells = [_Cell(sheet, column) for sheet in sheets for column in torch.nonzero(chosen(sheet)[0]).flatten().tolist()]
        return sorted(cells, key=lambda cell: self._order.rank(cell.key))

    def missing(self, onset: Parting, gaps: tuple[Gaps, Gaps]) -> tuple[str, bool]:
        """What one of the runs lacks for the first time in the step of ``onset``, in words, and whether it comes about before the
        difference, or in the same stage.
        """
        words, stages = [], []
        for run, found in zip(("second", "first"), gaps, strict=True):  # what only the first has is missing from the second
            keys = sorted((key for key, (_, first) in found.items() if first == onset.step), key=self._order.rank)
            words.append(of_gaps(onset.step, run, [format_key(key) for key in keys]))
            stages += [stage_of(key) for key in keys[:1]]
        order = list(STAGES)
        return " ".join(filter(None, words)), any(order.index(stage) <= order.index(onset.stage) for stage in stages)

    def largest(self, step: int) -> Parting | None:
        """The largest relative difference within the tolerance in a step."""
        cells = self._cells(step, lambda sheet: sheet.differs & ~sheet.parts)
        best = max(cells, key=lambda cell: float(cell.sheet.relative[0, cell.column]), default=None)
        return None if best is None else best.parting(step, 1)

    def growth(self, steps: Sequence[int]) -> dict[str, dict[int, float]]:
        """How far the loss and norms of the whole model are apart in these steps, by key; relative, infinite for what is not finite."""
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

    def stages(self, step: int) -> dict[str, Stage]:
        """What is compared in a step, by stage, in their order."""
        cells: dict[str, dict[object, tuple[bool, bool, float]]] = {}
        for sheet in self._compared([step], thorough=True):
            columns = zip(
                sheet.pairing.keys,
                (sheet.has_left & sheet.has_right)[0].tolist(),
                sheet.parts[0].tolist(),
                sheet.relative[0].tolist(),
                strict=True,
            )
            for key, both, parts, relative in columns:
                if both:
                    things = cells.setdefault(stage_of(key), {})
                    known = things.get(_thing(key), (False, False, 0.0))
                    is_tensor = is_of_layer(key)
                    things[_thing(key)] = (is_tensor, known[1] or parts, max(known[2], relative))
        return {stage: _counted(list(cells[stage].values())) for stage in STAGES if stage in cells}


def facts_of(window: Window) -> ValueMatrix:
    """Learning rates, loss scale and whether the step was applied, as values."""
    rows: list[dict[Key, float]] = []
    for step in window.steps:
        facts = window.facts[step]
        rates = facts.get("lr", [])
        row = {Key(CONTEXT, "lr", "" if len(rates) == 1 else str(group)): float(rate) for group, rate in enumerate(rates)}
        for name in ("amp_scale", "applied"):
            if name in facts:
                row[Key(CONTEXT, name, "")] = float(facts[name])
        rows.append(row)
    keys = tuple(dict.fromkeys(key for row in rows for key in row))
    values = torch.tensor([[row.get(key, math.nan) for key in keys] for row in rows], dtype=torch.float64, device="cpu")
    there = torch.tensor([[key in row for key in keys] for row in rows], dtype=torch.bool, device="cpu")
    return ValueMatrix(keys, values.reshape(len(rows), len(keys)), there.reshape(len(rows), len(keys)))


def _first_row(flags: Sequence[Tensor]) -> int | None:
    rows = torch.stack([flag.any(1) for flag in flags]).any(0)
    return int(rows.int().argmax()) if bool(rows.any()) else None


def _thing(key: Key) -> object:
    return key[:2] if is_of_layer(key) else key


def _counted(things: list[tuple[bool, bool, float]]) -> Stage:
    tensors = [parts for is_tensor, parts, _ in things if is_tensor]
    values = [parts for is_tensor, parts, _ in things if not is_tensor]
    return Stage(len(tensors), sum(tensors), len(values), sum(values), max(relative for *_, relative in things))

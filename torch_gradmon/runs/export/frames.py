"""A run as two tables, some steps at a time: one row for each tensor in each step, and one for each step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from ...core.json_numbers import strict
from ...core.keys import Key, format_key
from ...core.moments import VIEWS
from ...core.records import StepRecord
from ..window import COUNT, LAYER_SOURCES, ValueMatrix, Window, is_of_layer

#: What a column holds: whole numbers, real numbers, truth values, microseconds since the epoch, one of some words, or JSON.
Kind = Literal["whole", "real", "flag", "time", "word", "json"]
#: Rows of a part, about.
_ROWS = 1 << 16
#: What a metric without a name, as of a single head of attention, is called.
_VALUE = "value"


class ReadableRun(Protocol):
    """What is made into tables: a :class:`torch_gradmon.analysis.run.Run`."""

    @property
    def steps(self) -> list[int]:
        """The steps that are known, ascending."""

    @property
    def sources(self) -> list[str]:
        """The sources that have statistics."""

    @property
    def scalars(self) -> list[Key]:
        """The keys of all values but built-in statistics."""

    def tensors(self, source: str) -> list[str]:
        """The tensors that have statistics of a source."""

    def in_model_order(self, source: str, measured: Iterable[Sequence[str]]) -> list[str]:
        """All of these names of a source."""

    def records(self, since: int | None = None, wanted: Callable[[Key], bool] | None = None) -> Iterator[StepRecord]:
        """The steps, without statistics."""

    def window(self, steps: Sequence[int]) -> Window:
        """All that is known of some steps."""


@dataclass(frozen=True)
class ColumnValues:
    """A column of some rows.

    Attributes:
        values: whole numbers as int64, words as numbers of :attr:`Field.words`, real numbers as float64, truth values as booleans; JSON
            as text.
        there: where there is one, booleans; None if everywhere. JSON is None where there is none.
    """

    values: Tensor | list[str | None]
    there: Tensor | None = None


@dataclass(frozen=True)
class Field:
    """What a column is.

    Attributes:
        name: of the column.
        kind: what it holds.
        words: of a column of words, all that there are.
    """

    name: str
    kind: Kind
    words: tuple[str, ...] = ()


class Frame(Protocol):
    """A table that comes in parts."""

    fields: tuple[Field, ...]

    def parts(self) -> Iterator[tuple[int, list[ColumnValues]]]:
        """So many steps, and the columns of their rows; ascending by step."""


class TensorFrame:
    """One row for each tensor in each step: step, source, name, the built-in metrics, the number of elements, and other metrics.

    Args:
        run: what to read.
        steps: which steps.
        sources: which sources; None for all.
    """

    def __init__(self, run: ReadableRun, steps: Sequence[int], sources: Sequence[str] | None) -> None:
        self._run, self._steps = run, steps
        custom = [key for key in run.scalars if is_of_layer(key) and (sources is None or key.source in sources)]
        known = [*run.sources, *(key.source for key in custom)]
        self._sources = tuple(source for source in LAYER_SOURCES if source in known and (sources is None or source in sources))
        self._names: dict[str, dict[str, int]] = {
            source: _numbered(
                run.in_model_order(source, [run.tensors(source), [key.name for key in custom if key.source == source]])
            )
            for source in self._sources
        }
        self._words = _numbered(name for names in self._names.values() for name in names)
        self._metrics = _numbered([*VIEWS, COUNT, *(key.metric or _VALUE for key in custom)])
        kinds: Mapping[str, Kind] = {} if any(key.metric == COUNT for key in custom) else {COUNT: "whole"}
        own = Field("step", "whole"), Field("source", "word", self._sources), Field("name", "word", tuple(self._words))
        free = _free(self._metrics, (field.name for field in own))
        self.fields = (*own, *(Field(name, kinds.get(m, "real")) for name, m in zip(free, self._metrics, strict=True)))

    def parts(self) -> Iterator[tuple[int, list[ColumnValues]]]:
        """So many steps, and the columns of their rows; ascending by step, then by source, then in the order of the model."""
        if not self._sources:
            return
        size = max(_ROWS // sum(map(len, self._names.values())), 1)
        for start in range(0, len(self._steps), size):
            steps = self._steps[start : start + size]
            yield len(steps), self._part(self._run.window(steps))

    def _part(self, window: Window) -> list[ColumnValues]:
        blocks = [self._block(window, number, source) for number, source in enumerate(self._sources)]
        rows, sources, names, values, there = (torch.cat(each) for each in zip(*blocks, strict=True))
        order = rows.sort(stable=True).indices
        steps = torch.tensor(window.steps, dtype=torch.int64, device="cpu")
        values, there = values[order], there[order]
        columns = [ColumnValues(steps[rows[order]]), ColumnValues(sources[order]), ColumnValues(names[order])]
        for number, field in enumerate(self.fields[3:]):
            found = values[:, number]
            columns.append(
                ColumnValues(found.nan_to_num(0.0).to(torch.int64) if field.kind == "whole" else found, there[:, number])
            )
        return columns

    def _block(self, window: Window, number: int, source: str) -> tuple[Tensor, ...]:
        """The rows of one source: step, source and name by their numbers, and the values and which of them there are."""
        names, sheet = self._names[source], window.sheet(source)
        # a run that goes on may have got more in its last step since
        sheet = sheet.columns(
            [at for at, key in enumerate(sheet.keys) if key.name in names and (key.metric or _VALUE) in self._metrics]
        )
        values = torch.full((len(window.steps), len(names), len(self._metrics)), torch.nan, dtype=torch.float64, device="cpu")
        there = torch.zeros(values.shape, dtype=torch.bool, device="cpu")
        tensors = _whole([names[key.name] for key in sheet.keys])
        metrics = _whole([self._metrics[key.metric or _VALUE] for key in sheet.keys])
        values[:, tensors, metrics], there[:, tensors, metrics] = sheet.values, sheet.there
        rows, places = there.any(2).nonzero(as_tuple=True)
        words = _whole([self._words[name] for name in names])
        return rows, torch.full_like(rows, number), words[places], values[rows, places], there[rows, places]


class StepFrame:
    """One row for each step: when, whether it was applied, learning rates, values of the whole model, what was logged, tags and events.

    Args:
        run: what to read.
        steps: which steps.
    """

    def __init__(self, run: ReadableRun, steps: Sequence[int]) -> None:
        self._run, self._steps = run, steps
        self._groups, has_scale = 0, False
        for record in run.records(wanted=lambda key: False):
            self._groups = max(self._groups, len(record.context.get("lr", ())))
            has_scale |= "amp_scale" in record.context
        rates = ["lr"] if self._groups == 1 else [f"lr_{group}" for group in range(self._groups)]
        facts = (
            Field("step", "whole"),
            Field("time", "time"),
            Field("applied", "flag"),
            *(Field(rate, "real") for rate in rates),
        )
        facts += (Field("amp_scale", "real"),) if has_scale else ()
        texts = tuple(Field(name, "json") for name in ("tags", "events", "context"))
        self._keys = _numbered(key for key in run.scalars if not is_of_layer(key))
        free = _free(map(format_key, self._keys), (field.name for field in (*facts, *texts)))
        self._facts = len(facts)
        self.fields = (*facts, *(Field(name, "real") for name in free), *texts)

    def parts(self) -> Iterator[tuple[int, list[ColumnValues]]]:
        """So many steps, and the columns of their rows; ascending."""
        size = max(16 * _ROWS // len(self.fields), 1)
        for start in range(0, len(self._steps), size):
            steps = self._steps[start : start + size]
            yield len(steps), self._part(self._run.window(steps))

    def _part(self, window: Window) -> list[ColumnValues]:
        facts = [dict(window.facts[step]) for step in window.steps]
        columns = [
            ColumnValues(_whole(window.steps)),
            ColumnValues(_whole([round(fact.pop("time") * 1e6) for fact in facts])),
            ColumnValues(torch.tensor([fact.pop("applied") for fact in facts], dtype=torch.bool, device="cpu")),
        ]
        rates = [fact.pop("lr", []) for fact in facts]
        columns += [_real([each[group] if group < len(each) else None for each in rates]) for group in range(self._groups)]
        if len(columns) < self._facts:
            columns.append(_real([fact.pop("amp_scale", None) for fact in facts]))
        others = self._spread(window.others)
        columns += [ColumnValues(others.values[:, column], others.there[:, column]) for column in range(len(self._keys))]
        events = [_text(json.loads(fact.pop("events"))) for fact in facts]
        tags = [_text(fact.pop("tags", None)) for fact in facts]
        return [*columns, ColumnValues(tags), ColumnValues(events), ColumnValues([_text(fact) for fact in facts])]

    def _spread(self, sheet: ValueMatrix) -> ValueMatrix:
        """The same with a column for each key of the run."""
        sheet = sheet.columns([at for at, key in enumerate(sheet.keys) if key in self._keys])
        shape = (len(sheet.values), len(self._keys))
        values = torch.full(shape, torch.nan, dtype=torch.float64, device="cpu")
        there = torch.zeros(shape, dtype=torch.bool, device="cpu")
        at = _whole([self._keys[key] for key in sheet.keys])
        values[:, at], there[:, at] = sheet.values, sheet.there
        return ValueMatrix(tuple(self._keys), values, there)


def _free(names: Iterable[str], taken: Iterable[str]) -> list[str]:
    """The names of columns, with an underscore behind those that are taken."""
    used, found = set(taken), []
    for name in names:
        while name in used:
            name += "_"
        used.add(name)
        found.append(name)
    return found


def _text(facts: Any) -> str | None:
    return json.dumps(strict(facts), allow_nan=False) if facts else None


_Item = TypeVar("_Item")


def _numbered(items: Iterable[_Item]) -> dict[_Item, int]:
    return {item: number for number, item in enumerate(dict.fromkeys(items))}


def _whole(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _real(numbers: Sequence[float | None]) -> ColumnValues:
    there = torch.tensor([number is not None for number in numbers], dtype=torch.bool, device="cpu")
    return ColumnValues(torch.tensor([math.nan if x is None else x for x in numbers], dtype=torch.float64, device="cpu"), there)

"""A run as tables for other programs: Parquet, CSV, JSON lines, Arrow and pandas.

There are two, made in parts: one row per tensor and step, and one row per step.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import numpy as np

from ..core import validation as check
from ..core.errors import nearest
from ..core.files import replacing
from ..core.formatting import plain, strict
from ..core.keys import format_key
from ..core.moments import VIEWS
from .reader import COUNT, LAYER_SOURCES, RunReader, ValueMatrix, Window, between, empty_matrix, is_of_layer, single_threaded

TABLES = ("tensors", "steps")
#: Contents of a column: integers, reals, booleans, microseconds since the epoch, a word of a fixed set, or JSON.
Kind = Literal["whole", "real", "flag", "time", "word", "json"]
#: Approximate number of rows in a part, and of cells where there are many metrics.
_ROWS, _CELLS = 1 << 16, 1 << 22
#: The name of a metric without a name, as of an attention head.
_VALUE = "value"
#: The values of one column in a part: int64 for integers, times and words (indices of :attr:`Field.words`), float64 for reals, bool, masked
#: where they are absent; a list for JSON texts, None where absent.
Column = Any


@dataclass(frozen=True)
class Field:
    """The type of a column; ``words`` are all words that it may hold."""

    name: str
    kind: Kind
    words: tuple[str, ...] = ()


class TensorFrame:
    """One row per tensor and step: step, source, name, the built-in metrics, the number of elements, and other metrics.

    ``sources`` is None for all. Raises ValueError for one that the run does not have.
    """

    def __init__(self, run: RunReader, steps: Sequence[int], sources: Sequence[str] | None) -> None:
        self._run, self._steps = run, steps
        custom = [key for key in run.scalars if is_of_layer(key)]
        there = {*run.sources, *(key.source for key in custom)}
        for source in sources or ():
            if source not in there:
                raise ValueError(f"the run has nothing of the source {source!r}{nearest(str(source), there)}")
        self._sources = tuple(source for source in LAYER_SOURCES if source in (there if sources is None else sources))
        custom = [key for key in custom if key.source in self._sources]
        self._names = {
            source: run.in_model_order(source, [run.tensors(source), [key.name for key in custom if key.source == source]])
            for source in self._sources
        }
        self._words = _numbered(name for names in self._names.values() for name in names)
        self._metrics = _numbered([*VIEWS, COUNT, *(key.metric or _VALUE for key in custom)])
        kinds: Mapping[str, Kind] = {} if any(key.metric == COUNT for key in custom) else {COUNT: "whole"}
        own = Field("step", "whole"), Field("source", "word", self._sources), Field("name", "word", tuple(self._words))
        free = _free(self._metrics, (field.name for field in own))
        self.fields = (*own, *(Field(name, kinds.get(m, "real")) for name, m in zip(free, self._metrics, strict=True)))

    def parts(self) -> Iterator[tuple[int, list[Column]]]:
        """The number of steps and the columns of each part; ascending by step, then by source, then in model order."""
        tensors = [(source, name) for source in self._sources for name in self._names[source]]
        most = max(_CELLS // len(self._metrics), 1)  # rows of a part, those without a value as well
        for window in _windows(self._run, self._steps, max(min(_ROWS, most) // len(tensors), 1)) if tensors else ():
            sheets = {source: window.sheet(source) for source in self._sources}
            for begin in range(0, len(tensors), most):  # at once, unless it is one step
                is_last = begin + most >= len(tensors)
                yield len(window.steps) if is_last else 0, self._part(window.steps, sheets, tensors[begin : begin + most])

    def _part(self, steps: Sequence[int], sheets: Mapping[str, ValueMatrix], tensors: Sequence[tuple[str, str]]) -> list[Column]:
        place = _numbered(tensors)
        values, there = (each.numpy() for each in empty_matrix(len(steps), len(tensors), len(self._metrics)))
        for source in dict.fromkeys(source for source, _ in tensors):
            sheet = sheets[source]
            # a live run may have added keys to its last step since
            known = [(at, (source, key.name), key.metric or _VALUE) for at, key in enumerate(sheet.keys)]
            kept = [(at, place[pair], self._metrics[name]) for at, pair, name in known if pair in place and name in self._metrics]
            columns, names, metrics = np.array(kept, np.int64).reshape(-1, 3).T
            values[:, names, metrics] = sheet.values.numpy()[:, columns]
            there[:, names, metrics] = sheet.there.numpy()[:, columns]
        rows, places = there.any(2).nonzero()
        columns_of = [
            np.ma.array(found, mask=mask) for found, mask in zip(values[rows, places].T, ~there[rows, places].T, strict=True)
        ]
        for at, field in enumerate(self.fields[3:]):
            if field.kind == "whole":
                columns_of[at] = np.ma.array(columns_of[at].filled(0).astype(np.int64), mask=columns_of[at].mask)
        sources, words = np.array([(self._sources.index(source), self._words[name]) for source, name in tensors], np.int64).T
        return [np.array(steps, np.int64)[rows], sources[places], words[places], *columns_of]


class StepFrame:
    """One row per step: time, whether it was applied, learning rates, whole-model values, logged values, tags and events."""

    def __init__(self, run: RunReader, steps: Sequence[int]) -> None:
        self._run, self._steps = run, steps
        self._groups, self._has_scale = 0, False
        for record in run.records(wanted=lambda key: False):
            self._groups = max(self._groups, len(record.context.get("lr", ())))
            self._has_scale |= "amp_scale" in record.context
        rates = ["lr"] if self._groups == 1 else [f"lr_{group}" for group in range(self._groups)]
        reals = [*rates, *["amp_scale"] * self._has_scale]
        facts = [
            Field("step", "whole"),
            Field("time", "time"),
            Field("applied", "flag"),
            *(Field(name, "real") for name in reals),
        ]
        texts = [Field(name, "json") for name in ("tags", "events", "context")]
        self._keys = _numbered(key for key in run.scalars if not is_of_layer(key))
        free = _free(map(format_key, self._keys), (field.name for field in (*facts, *texts)))
        self.fields = (*facts, *(Field(name, "real") for name in free), *texts)

    def parts(self) -> Iterator[tuple[int, list[Column]]]:
        for window in _windows(self._run, self._steps, max(16 * _ROWS // len(self.fields), 1)):
            yield len(window.steps), self._part(window)

    def _part(self, window: Window) -> list[Column]:
        facts = [dict(window.facts[step]) for step in window.steps]
        times = [round(fact.pop("time") * 1e6) for fact in facts]
        columns = [np.array(window.steps, np.int64), np.array(times, np.int64), np.array([fact.pop("applied") for fact in facts])]
        rates = [fact.pop("lr", []) for fact in facts]
        columns += [_real([each[group] if group < len(each) else None for each in rates]) for group in range(self._groups)]
        if self._has_scale:
            columns.append(_real([fact.pop("amp_scale", None) for fact in facts]))
        others = {key: at for at, key in enumerate(window.others.keys)}
        values, absent = window.others.values.numpy().T, ~window.others.there.numpy().T
        nothing = _real([None] * len(facts))
        columns += [
            np.ma.array(values[others[key]], mask=absent[others[key]]) if key in others else nothing for key in self._keys
        ]
        tags = [_json(fact.pop("tags", None)) for fact in facts]
        events = [_json([asdict(event) for event in window.spikes[step]]) for step in window.steps]
        return [*columns, tags, events, list(map(_json, facts))]


#: A table in parts.
Frame = TensorFrame | StepFrame


def _windows(run: RunReader, steps: Sequence[int], size: int) -> Iterator[Window]:
    for start in range(0, len(steps), size):
        yield run.window(steps[start : start + size])


def _free(names: Iterable[str], taken: Iterable[str]) -> list[str]:
    """Column names, with an underscore appended to those already taken."""
    used, found = set(taken), []
    for name in names:
        while name in used:
            name += "_"
        used.add(name)
        found.append(name)
    return found


def _json(facts: Any) -> str | None:
    return json.dumps(strict(facts), allow_nan=False) if facts else None


_Item = TypeVar("_Item")


def _numbered(items: Iterable[_Item]) -> dict[_Item, int]:
    return {item: number for number, item in enumerate(dict.fromkeys(items))}


def _real(numbers: Sequence[float | None]) -> Column:
    return np.ma.array([math.nan if x is None else x for x in numbers], np.float64, mask=[x is None for x in numbers])


def chosen_steps(run: RunReader, first: int | None, last: int | None) -> list[int]:
    """The steps of the run from ``first`` to ``last``. Raises ValueError if there are none."""
    steps = between(run.steps, first, last)
    if not steps and run.steps:
        raise ValueError(f"the run has no step between {first} and {last}; it has {run.steps[0]} to {run.steps[-1]}")
    return steps


def frame_of(run: RunReader, table: str, sources: str | Sequence[str] | None, first: int | None, last: int | None) -> Frame:
    """One of the two tables. Raises ValueError if the table, the steps or a source do not exist."""
    check.one_of("table", table, TABLES)
    steps = chosen_steps(run, first, last)
    if table == "steps":
        return StepFrame(run, steps)
    return TensorFrame(run, steps, [sources] if isinstance(sources, str) else sources)


# --- files ------------------------------------------------------------------------------------------------------------------------


def write(frames: Mapping[Path, Frame], advance: Callable[[int], None]) -> None:
    """Write each frame into its file, part by part. Files get their names once all are complete.

    Args:
        frames: by path, see :func:`check_path`; missing directories are created, existing files replaced.
        advance: called with the number of steps written.

    Raises:
        ImportError: a package is missing.
        OSError: a file could not be written; none is left.
    """
    for path in frames:
        path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for path, frame in frames.items():
            target = stack.enter_context(replacing(path))
            with FORMATS[path.suffix.lower()](target, frame.fields) as add:
                for steps, columns in frame.parts():
                    add(columns)
                    advance(steps)


def check_path(path: Path) -> None:
    """Check the path of an output file before anything is read. Raises ValueError."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{str(path)!r} ends in none of {', '.join(FORMATS)}, by which the format is chosen")
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a directory; name a file in it")


#: Adds a part to a file.
_Add = Callable[[Sequence[Column]], object]
#: What converts a value of a kind.
_Forms = dict[str, Callable[[Any], Any]]


@contextlib.contextmanager
def _text(file: IO[bytes]) -> Iterator[io.TextIOWrapper]:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    try:
        yield text
    finally:
        text.detach()


@contextlib.contextmanager
def _csv(file: IO[bytes], fields: Sequence[Field]) -> Iterator[_Add]:
    """Rows below a header. Absent values are empty; NaN and infinite values are ``nan`` and ``inf``."""
    forms: _Forms = {"json": _harmless, "time": _moment, "flag": lambda flag: "true" if flag else "false", "word": _harmless}
    with _text(file) as text:
        writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(_harmless(field.name) for field in fields)
        yield lambda columns: writer.writerows(_rows(fields, columns, forms))


@contextlib.contextmanager
def _jsonl(file: IO[bytes], fields: Sequence[Field]) -> Iterator[_Add]:
    """An object per row, without absent values. NaN and infinite values are strings, as in :class:`JsonlSink`."""
    names = [field.name for field in fields]
    forms: _Forms = {"json": json.loads, "time": _moment, "real": plain}

    def line(row: Sequence[Any]) -> str:
        found = {name: value for name, value in zip(names, row, strict=True) if value is not None}
        return json.dumps(found, allow_nan=False) + "\n"

    with _text(file) as text:
        yield lambda columns: text.writelines(map(line, _rows(fields, columns, forms)))


@contextlib.contextmanager
def _parquet(file: IO[bytes], fields: Sequence[Field]) -> Iterator[_Add]:
    """Each part as a row group."""
    try:
        from pyarrow.parquet import ParquetWriter
    except ModuleNotFoundError as error:
        raise ImportError('Parquet needs pyarrow: pip install "torch_gradmon[export]"; .csv and .jsonl need nothing') from error
    with ParquetWriter(file, _schema(fields), compression="zstd") as writer:
        yield lambda columns: writer.write_batch(_batch(fields, columns))


#: Writers by file extension.
FORMATS: Mapping[str, Callable[[IO[bytes], Sequence[Field]], contextlib.AbstractContextManager[_Add]]] = {
    ".parquet": _parquet,
    ".csv": _csv,
    ".jsonl": _jsonl,
}


def _harmless(text: str) -> str:
    """A text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _moment(microseconds: int) -> str:
    moment = datetime.fromtimestamp(0, timezone.utc) + timedelta(microseconds=microseconds)
    return moment.isoformat(timespec="microseconds")


def _rows(fields: Sequence[Field], columns: Sequence[Column], forms: _Forms) -> Iterator[tuple[Any, ...]]:
    """The rows as Python values, None where absent; ``forms`` converts those of some kinds."""
    cells = []
    for field, column in zip(fields, columns, strict=True):
        form: Callable[[Any], Any] | None = forms.get(field.kind)
        found = column if isinstance(column, list) else column.tolist()
        if field.kind == "word":
            words = [*map(form, field.words)] if form else field.words
            form = words.__getitem__
        cells.append([None if value is None else form(value) for value in found] if form else found)
    return zip(*cells, strict=True)


# --- Arrow, with pyarrow ----------------------------------------------------------------------------------------------------------


def table_of(frame: Frame, what: str, *packages: str) -> Any:
    """All rows in memory, as a ``pyarrow.Table``: absent values are null, NaN stays NaN.

    Raises:
        ImportError: one of the ``packages`` that ``what`` needs, its caller, is missing.
    """
    for package in packages:
        if find_spec(package) is None:
            raise ImportError(f'{what} needs {package}: pip install "torch_gradmon[export]"')
    import pyarrow as pa

    with single_threaded():
        return pa.Table.from_batches([_batch(frame.fields, columns) for _, columns in frame.parts()], _schema(frame.fields))


def _schema(fields: Sequence[Field]) -> Any:
    import pyarrow as pa

    types = {
        "whole": pa.int64(),
        "real": pa.float64(),
        "flag": pa.bool_(),
        "time": pa.timestamp("us", "UTC"),
        "word": pa.dictionary(pa.int32(), pa.string()),
        "json": pa.string(),
    }
    return pa.schema([(field.name, types[field.kind]) for field in fields])


def _batch(fields: Sequence[Field], columns: Sequence[Column]) -> Any:
    import pyarrow as pa

    schema, arrays = _schema(fields), []
    for field, column, kind in zip(fields, columns, schema.types, strict=True):
        if field.kind == "word":
            arrays.append(pa.DictionaryArray.from_arrays(pa.array(column, pa.int32()), pa.array(field.words, pa.string())))
        else:
            arrays.append(pa.array(column, kind, from_pandas=False))
    return pa.record_batch(arrays, schema=schema)

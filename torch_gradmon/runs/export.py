"""A run as tables for other programs: Parquet, CSV, JSON lines, Arrow and pandas. There are two, made in parts."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from ..core import validation as check
from ..core.errors import nearest
from ..core.files import replacing
from ..core.formatting import plain, strict
from ..core.keys import NAME_SOURCES, Key, format_key
from ..core.moments import VIEWS
from .reader import COUNT, LAYER_SOURCES, RunReader, ValueMatrix, Window, between, empty_matrix, is_of_layer, single_threaded

TABLES = ("tensors", "steps")
#: Approximate number of cells in a part.
_CELLS = 1 << 20
#: Columns by name, the same ones in each part of a table. Their dtypes say what they hold: integers, reals (masked where absent), booleans,
#: times in UTC, or objects: JSON, None where absent. A column of words is a pair: their places among the words of the table, and these.
Part = dict[str, np.ndarray | tuple[np.ndarray, Sequence[str]]]
#: Gets the number of steps that are done.
Advance = Callable[[int], object]


def parts_of(
    run: RunReader, table: str, sources: str | Sequence[str] | None, first: int | None, last: int | None, advance: Advance
) -> Iterator[Part]:
    """One of the two tables. Raises ValueError if the table, the steps or a source do not exist."""
    check.one_of("table", table, TABLES)
    steps = between(run.steps, first, last)
    if not steps and run.steps:
        raise ValueError(f"the run has no step between {first} and {last}; it has {run.steps[0]} to {run.steps[-1]}")
    if table == "steps":
        return _steps(run, steps, advance)
    there = {*run.sources, *(key.source for key in run.scalars if is_of_layer(key))}
    chosen = [sources] if isinstance(sources, str) else there if sources is None else sources
    for source in chosen:
        if source not in there:
            raise ValueError(f"the run has nothing of the source {source!r}{nearest(str(source), there)}")
    return _tensors(run, steps, [source for source in LAYER_SOURCES if source in chosen], advance)


def _tensors(run: RunReader, steps: Sequence[int], sources: Sequence[str], advance: Advance) -> Iterator[Part]:
    """One row per tensor and step: ascending by step, then by source, then in model order."""
    custom = [key for key in run.scalars if is_of_layer(key) and key.source in sources]
    tensors = []
    for source in sources:
        measured = run.tensors(source), [key.name for key in custom if key.source == source]
        tensors += [(source, name) for name in run.in_model_order(source, measured)]
    names = {name: at for at, name in enumerate(dict.fromkeys(name for _, name in tensors))}
    words = np.array([(sources.index(source), names[name]) for source, name in tensors], np.int32).reshape(-1, 2)
    # attention heads have a metric without a name
    metrics = list(dict.fromkeys([*VIEWS, COUNT, *(key.metric or "value" for key in custom)]))
    columns = _free(metrics, ("step", "source", "name"))
    most = max(_CELLS // len(metrics), 1)  # rows of a part, those without a value as well
    for window in _windows(run, steps if tensors else (), most // max(len(tensors), 1), advance):
        sheets = [window.sheet(source) for source in sources]
        for begin in range(0, len(tensors) or 1, most):  # at once, unless it is one step
            some = tensors[begin : begin + most]
            keys = [Key(*each, "" if m == "value" and each[0] in NAME_SOURCES else m) for each in some for m in metrics]
            cells = _cells(window, sheets, keys).reshape(len(window.steps), len(some), len(metrics))
            rows, places = cells.count(2).nonzero()
            part: Part = {"step": np.array(window.steps, np.int64)[rows]}
            part["source"], part["name"] = zip(words[begin + places].T, (sources, [*names]), strict=True)
            part.update(zip(columns, cells[rows, places].T, strict=True))
            if all(key.metric != COUNT for key in custom):
                counts = cells[rows, places, metrics.index(COUNT)]
                part[COUNT] = np.ma.array(counts.filled(0), np.int64, mask=counts.mask)
            yield part


def _steps(run: RunReader, steps: Sequence[int], advance: Advance) -> Iterator[Part]:
    """One row per step: time, whether it was applied, learning rates, whole-model values, logged values, tags and events."""
    groups, has_scale = 0, False
    for record in run.records(wanted=lambda key: False):
        groups = max(groups, len(record.context.get("lr", ())))
        has_scale |= "amp_scale" in record.context
    rates = ["lr"] if groups == 1 else [f"lr_{group}" for group in range(groups)]
    reals = [*rates, *["amp_scale"] * has_scale]
    keys = [key for key in run.scalars if not is_of_layer(key)]
    columns = _free(map(format_key, keys), ("step", "time", "applied", *reals, "tags", "events", "context"))
    for window in _windows(run, steps, _CELLS // (len(keys) + len(reals) + 6), advance):
        records, facts = window.records.values(), [dict(record.context) for record in window.records.values()]
        for fact in facts:
            fact.update(zip(rates, fact.pop("lr", ()), strict=False))
        values = {name: [fact.pop(name, None) for fact in facts] for name in (*reals, "tags")}
        spikes = [list(map(asdict, record.events)) for record in records]
        part: Part = {
            "step": np.array(window.steps, np.int64),
            "time": np.array([round(record.time * 1e6) for record in records], "M8[us]"),
            "applied": np.array([record.applied for record in records], bool),
        }
        for name in reals:
            part[name] = np.ma.array(np.array(values[name], np.float64), mask=[value is None for value in values[name]])
        part.update(zip(columns, _cells(window, [window.others], keys).T, strict=True))
        for name, found in (("tags", values["tags"]), ("events", spikes), ("context", facts)):
            part[name] = np.array([json.dumps(strict(each), allow_nan=False) if each else None for each in found], object)
        yield part


def _windows(run: RunReader, steps: Sequence[int], size: int, advance: Advance) -> Iterator[Window]:
    for start in range(0, len(steps) or 1, max(size, 1)):  # without steps an empty one, whose part tells the columns
        window = run.window(steps[start : start + max(size, 1)])
        yield window
        advance(len(window.steps))


def _cells(window: Window, sheets: Sequence[ValueMatrix], wanted: Sequence[Key]) -> np.ma.MaskedArray:
    """The values of the ``wanted`` keys by step, masked where absent. A live run may have added other keys to its last step since."""
    place = {key: at for at, key in enumerate(key for sheet in sheets for key in sheet.keys)}
    chosen = [place.get(key, -1) for key in wanted]  # the last column is empty
    values, there = empty_matrix(len(window.steps), 1)
    values = torch.cat([*(sheet.values for sheet in sheets), values], 1)[:, chosen]
    there = torch.cat([*(sheet.there for sheet in sheets), there], 1)[:, chosen]
    return np.ma.array(values.numpy(), mask=~there.numpy())


def _free(names: Iterable[str], taken: Sequence[str]) -> list[str]:
    """Column names, with an underscore appended to those already taken."""
    used = dict.fromkeys(taken)
    for name in names:
        while name in used:
            name += "_"
        used[name] = None
    return list(used)[len(taken) :]


# --- files ------------------------------------------------------------------------------------------------------------------------


def write(tables: Mapping[Path, Iterator[Part]]) -> None:
    """Write each table into its file, part by part. Files get their names once all are complete; if it raises, none is left."""
    with single_threaded(), contextlib.ExitStack() as stack:
        for path, parts in tables.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            FORMATS[path.suffix.lower()](stack.enter_context(replacing(path)), parts)


def _rows(part: Part, forms: Mapping[str, Callable[[Any], Any]]) -> Iterator[tuple[Any, ...]]:
    """As Python values, None where absent; ``forms`` converts those of some kinds of dtypes, ``U`` for words."""
    columns = []
    for column in part.values():
        kind, values = ("U", np.array(column[1], object)[column[0]]) if isinstance(column, tuple) else (column.dtype.kind, column)
        items = [f"{time}+00:00" for time in np.datetime_as_string(values)] if kind == "M" else values.tolist()
        form = forms.get(kind)
        columns.append([None if item is None else form(item) for item in items] if form else items)
    return zip(*columns, strict=True)


def _csv(file: IO[bytes], parts: Iterator[Part]) -> None:
    """Rows below a header. Absent values are empty; NaN and infinite values are ``nan`` and ``inf``."""

    def harmless(text: str) -> str:  # a spreadsheet would take it for a formula
        return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text

    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    for number, part in enumerate(parts):
        if number == 0:
            writer.writerow(map(harmless, part))
        writer.writerows(_rows(part, {"U": harmless, "O": harmless, "b": json.dumps}))
    text.detach()  # the caller closes the file


def _jsonl(file: IO[bytes], parts: Iterator[Part]) -> None:
    """An object per row, without absent values. NaN and infinite values are strings, as in :class:`JsonlSink`."""
    for part in parts:
        for row in _rows(part, {"f": plain, "O": json.loads}):
            found = {name: value for name, value in zip(part, row, strict=True) if value is not None}
            file.write(json.dumps(found, allow_nan=False).encode() + b"\n")


def _parquet(file: IO[bytes], parts: Iterator[Part]) -> None:
    """Each part as a row group."""
    try:
        from pyarrow.parquet import ParquetWriter
    except ModuleNotFoundError as error:
        raise ImportError('Parquet needs pyarrow: pip install "torch_gradmon[export]"; .csv and .jsonl need nothing') from error
    batches = _batches(parts)
    first = next(batches)
    with ParquetWriter(file, first.schema, compression="zstd") as writer:
        for batch in chain([first], batches):
            writer.write_batch(batch)


#: What writes a table, by the ending of the file.
FORMATS: Mapping[str, Callable[[IO[bytes], Iterator[Part]], None]] = {".parquet": _parquet, ".csv": _csv, ".jsonl": _jsonl}


def arrow_table(parts: Iterator[Part], what: str, *packages: str) -> Any:
    """All rows in memory, as a ``pyarrow.Table``. Raises ImportError if a package is missing that ``what``, the caller, needs."""
    for package in packages:
        if find_spec(package) is None:
            raise ImportError(f'{what} needs {package}: pip install "torch_gradmon[export]"')
    import pyarrow as pa

    with single_threaded():
        return pa.Table.from_batches(_batches(parts))


def _batches(parts: Iterator[Part]) -> Iterator[Any]:
    """As batches of Arrow: absent values are null, NaN stays NaN."""
    import pyarrow as pa

    types = {"M": pa.timestamp("us", "UTC"), "O": pa.string()}
    for part in parts:
        arrays = [
            pa.DictionaryArray.from_arrays(column[0], pa.array(column[1], pa.string()))
            if isinstance(column, tuple)
            else pa.array(column, types.get(column.dtype.kind), from_pandas=False)
            for column in part.values()
        ]
        yield pa.record_batch(arrays, names=list(part))

"""What the records of a run directory hold, see docs/reference/run-format.md.

A run directory has pairs of log files, ``gradmon.000001.values`` and ``gradmon.000001.rows``, one pair for each writer, or more for a large
run. The first byte of a record is its kind: ``J`` for a JSON object, ``S`` for a step, ``R`` for the rows of a step,
``I`` for an index of the records before it, ``C`` for a column of their values.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core.formatting import printable

FORMAT = 1
VALUES, ROWS = "values", "rows"
_NAME = re.compile(r"gradmon\.([0-9]{6,9})\.values")
_ANY = re.compile(r"gradmon\.([0-9]{6,9})\.(?:values|rows)")
#: What earlier versions kept a run in.
OLD_NAME = "gradmon.sqlite"

JSON, STEP, TABLES, INDEX, COLUMN = b"J", b"S", b"R", b"I", b"C"
#: Flags of a step.
APPLIED, AMENDS, BACKFILLS, HAS_EVENTS = 1, 2, 4, 8
#: Flag of a JSON record in an index.
IS_JSON = 128
#: An index is written after so many records.
INDEXED = 512
#: Kind, flags, number of values, step, time, where its rows begin and end, number of its set of layouts, bytes of context and of events.
_STEP = struct.Struct("<cB2xIqdQQIII4x")
_VALUE = struct.Struct("<d")
#: Kind, number of records, of sets of keys, of columns, bytes of all sets; where the last index begins and ends, both 0 without one.
_INDEX = struct.Struct("<c3xIIIIQQ")
#: Of each record: where it begins, its step and time, where its rows begin and end, its set of layouts and of keys, and its flags.
_ENTRY = np.dtype(
    {
        "names": ["begin", "step", "time", "rows", "end", "layouts", "keys", "flags"],
        "formats": ["<u8", "<i8", "<f8", "<u8", "<u8", "<u4", "<u4", "<u1"],
    }
)
#: Of each column: the number of its key, and where it begins.
_COLUMNS = np.dtype([("key", "<u4"), ("begin", "<u8")])
#: Kind, number of values, number of the key.
_COLUMN = struct.Struct("<c3xII")
#: Kind, number of parts, step; then of each part where the record that defines it begins, and its bytes.
_TABLES, _PART = struct.Struct("<c3xIq"), struct.Struct("<QQ")


def name_of(number: int, kind: str) -> str:
    """The name of a file.

    Raises:
        FileNotFoundError: there is no such number.
    """
    if number >= 10**9:
        raise FileNotFoundError(f"gradmon.{number - 1}.{kind} has the last number of a file")
    return f"gradmon.{number:06d}.{kind}"


def pairs_in(directory: str | os.PathLike[str]) -> list[int]:
    """The numbers of the pairs in a directory, ascending.

    Raises:
        OSError: there is no such directory, or it cannot be read.
    """
    return sorted(_numbers(directory, _NAME))


def next_number(directory: str | os.PathLike[str]) -> int:
    """The number after those of all files in a directory. Raises OSError as :func:`pairs_in`."""
    return 1 + max(_numbers(directory, _ANY), default=0)


def _numbers(directory: str | os.PathLike[str], pattern: re.Pattern[str]) -> list[int]:
    return [int(found[1]) for name in os.listdir(directory) if (found := pattern.fullmatch(name))]


def is_run(names: Iterable[str]) -> bool:
    """Whether files of these names make a run."""
    return any(map(_NAME.fullmatch, names))


def has_run(directory: Path) -> bool:
    """Whether there is a run in a directory."""
    try:
        return bool(pairs_in(directory))
    except OSError:
        return False


def identity(path: str | os.PathLike[str]) -> tuple[int, int]:
    """What distinguishes the run in ``path`` from another that takes its place.

    Raises:
        FileNotFoundError: there is none.
    """
    directory = directory_of(path)
    numbers = pairs_in(directory)
    if not numbers:
        raise FileNotFoundError(f"there is no run in {str(directory)!r}")
    status = os.stat(directory / name_of(numbers[0], VALUES))
    return status.st_dev, status.st_ino


def version(directory: Path) -> str:
    """Changes with each write to the run in a directory, and with another run in its place; empty if there is none."""
    found: list[int] = []
    for number in reversed(pairs_in(directory) if directory.is_dir() else []):
        try:
            status = os.stat(directory / name_of(number, VALUES))
        except OSError:
            continue
        found += [status.st_ino, status.st_size, status.st_mtime_ns]
        break
    return "-".join(map(str, found))


def directory_of(path: str | os.PathLike[str]) -> Path:
    """The run directory; ``path`` is this or one of its files."""
    path = Path(path)
    return path.parent if _NAME.fullmatch(path.name) and path.is_file() else path


#: JSON is nested no deeper, and has no longer numbers and names.
_DEEPEST, _DIGITS, LONGEST_NAME = 32, 40, 10_000
_LARGEST_JSON = 64 << 20


class Unreadable(ValueError):
    """A record has the right checksum, but is none of this format."""


def of_json(facts: Mapping[str, Any]) -> bytes:
    """A JSON record."""
    return JSON + json.dumps(facts, default=str, skipkeys=True, separators=(",", ":")).encode("utf-8", "backslashreplace")


def json_of(record: bytes) -> dict[str, Any]:
    """The object in a JSON record.

    Raises:
        Unreadable: there is none.
    """
    found = parsed(record[1:])
    if record[:1] != JSON or not isinstance(found, dict):
        raise Unreadable("a record is no JSON object")
    return found


def parsed(text: bytes) -> Any:
    """What stands there as JSON, within bounds. All texts of a run come through here, each made printable, on one line.

    Raises:
        Unreadable: nothing.
    """
    deepest = text.count(b"[") + text.count(b"{")
    if len(text) > _LARGEST_JSON or deepest > 1000 + len(text) // 8:
        raise Unreadable("JSON is too large")
    try:
        found = _DECODER.decode(text.decode())
    except (ValueError, RecursionError):
        raise Unreadable("a record that should be JSON is not") from None
    level: list[Any] = [[found]] if deepest >= _DEEPEST else []
    depth = 0
    while level:
        if depth > _DEEPEST:
            raise Unreadable("JSON is nested too deeply")
        parts = (part for each in level for part in (each.values() if isinstance(each, dict) else each))
        level, depth = [part for part in parts if isinstance(part, (dict, list))], depth + 1
    return found if b"\\" not in text and text.isascii() else _shown(found)


def _shown(found: Any) -> Any:
    """The same, each text printable."""
    if isinstance(found, str):
        return printable(found)
    if isinstance(found, list):
        return [_shown(part) for part in found]
    return {printable(name): _shown(part) for name, part in found.items()} if isinstance(found, dict) else found


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError("a number is too long")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_integer)


class StepFrame(NamedTuple):
    """A step, or what is added to one.

    Attributes:
        step: its number.
        time: seconds since the epoch.
        flags: see :data:`APPLIED` and the following.
        rows: where the record with its rows begins and ends in the other file; both 0 without one.
        layouts: number of the set of layouts of these rows.
        ids: uint32, the numbers of the keys of its values.
        values: float64.
        context, events: JSON; empty in an amendment that leaves them as they are.
    """

    step: int
    time: float
    flags: int
    rows: tuple[int, int]
    layouts: int
    ids: np.ndarray
    values: np.ndarray
    context: bytes
    events: bytes

    def packed(self) -> bytes:
        """The record."""
        head = _STEP.pack(
            STEP,
            self.flags,
            len(self.values),
            self.step,
            self.time,
            *self.rows,
            self.layouts,
            len(self.context),
            len(self.events),
        )
        return b"".join(
            (
                head,
                self.values.astype("<f8", copy=False).tobytes(),
                self.ids.astype("<u4", copy=False).tobytes(),
                self.context,
                self.events,
            )
        )


def _is_sound(step: Any, time: Any) -> Any:
    """Whether there can be such a step at such a time, of which there is a date; of numbers or arrays."""
    return (step >= 0) & (step < 1 << 53) & (time > -6e10) & (time < 2.5e11)


class StepHead(NamedTuple):
    """The fixed part of a step, see :class:`StepFrame`, with the sizes of the others."""

    step: int
    time: float
    flags: int
    rows: tuple[int, int]
    layouts: int
    values: int
    context: int
    events: int


def head_of(record: bytes) -> StepHead:
    """The fixed part of a step.

    Raises:
        Unreadable: it is none.
    """
    if len(record) < _STEP.size or record[:1] != STEP:
        raise Unreadable("a step is too short")
    _, flags, count, step, time, begin, end, layouts, context, events = _STEP.unpack_from(record)
    if _STEP.size + 12 * count + context + events != len(record) or begin > end or not _is_sound(step, time):
        raise Unreadable("the parts of a step are not of its size")
    return StepHead(step, time, flags, (begin, end), layouts, count, context, events)


def time_of(record: bytes) -> float | None:
    """The time of a step, or of the first part of one, that was written when it ended; None of other records."""
    if record[:1] != STEP or len(record) < _STEP.size or record[1] & (AMENDS | BACKFILLS):
        return None
    written: float = _STEP.unpack_from(record)[4]
    return written


def ids_of(record: bytes, head: StepHead) -> bytes:
    """The numbers of the keys of a step, uint32."""
    begin = _STEP.size + 8 * head.values
    return record[begin : begin + 4 * head.values]


def frame_of(record: bytes) -> StepFrame:
    """A step.

    Raises:
        Unreadable: it is none.
    """
    head = head_of(record)
    values = np.frombuffer(record, "<f8", head.values, _STEP.size)
    ids = np.frombuffer(record, "<u4", head.values, _STEP.size + 8 * head.values)
    text = _STEP.size + 12 * head.values
    return StepFrame(
        head.step, head.time, head.flags, head.rows, head.layouts, ids, values,
        record[text : text + head.context], record[text + head.context :],
    )  # fmt: skip


def value_at(record: bytes, place: int) -> float:
    """One value of a step. Raises Unreadable as :func:`head_of`."""
    if place >= head_of(record).values:
        raise Unreadable("a step has fewer values")
    return float(_VALUE.unpack_from(record, _STEP.size + 8 * place)[0])


def of_tables(step: int, parts: Sequence[tuple[int, bytes]]) -> bytes:
    """The rows of a step: of each part where it is defined, and its data."""
    heads = [_PART.pack(place, len(data)) for place, data in parts]
    return b"".join((_TABLES.pack(TABLES, len(parts), step), *heads, *[data for _, data in parts]))


def tables_of(record: bytes, step: int | None = None) -> list[tuple[int, bytes]]:
    """The inverse of :func:`of_tables`.

    Raises:
        Unreadable: these are no rows, or none of ``step``.
    """
    if len(record) < _TABLES.size:
        raise Unreadable("rows are too short")
    kind, count, number = _TABLES.unpack_from(record)
    at = _TABLES.size + count * _PART.size
    if kind != TABLES or step not in (None, number) or at > len(record):
        raise Unreadable(f"there are no rows of step {step} where they should be")
    found = []
    for place, length in _PART.iter_unpack(record[_TABLES.size : at]):
        found.append((place, record[at : at + length]))
        at += length
    if at != len(record):
        raise Unreadable(f"the rows of step {step} are not of their size")
    return found


class Index(NamedTuple):
    """The records since the last index.

    Attributes:
        before: where the last index begins and ends; both 0 without one.
        entries: a structured array; of a step its head, of a JSON record where it begins.
        sets: the numbers of keys, uint32, that steps have values of.
        columns: by the number of a key where the record with its values begins.
    """

    before: tuple[int, int]
    entries: np.ndarray
    sets: list[bytes]
    columns: dict[int, int]

    def packed(self) -> bytes:
        """The record."""
        lengths = np.array([len(each) // 4 for each in self.sets], "<u4").tobytes()
        columns = np.array(list(self.columns.items()), _COLUMNS) if self.columns else np.empty(0, _COLUMNS)
        sets = b"".join(self.sets)
        head = _INDEX.pack(INDEX, len(self.entries), len(self.sets), len(columns), len(sets), *self.before)
        return b"".join((head, self.entries.tobytes(), columns.tobytes(), lengths, sets))


def entries_of(rows: Sequence[tuple[Any, ...]]) -> np.ndarray:
    """The entries of an index, from tuples in the order of its fields."""
    return np.array(rows, _ENTRY)


def index_of(record: bytes, begin: int) -> Index:
    """The index that begins at ``begin``.

    Raises:
        Unreadable: it is none, or names other records than those between the last index and itself, each once.
    """
    if len(record) < _INDEX.size or record[:1] != INDEX:
        raise Unreadable("an index is too short")
    _, count, sets, columns, size, *before = _INDEX.unpack_from(record)
    at = _INDEX.size
    if at + count * _ENTRY.itemsize + columns * _COLUMNS.itemsize + 4 * sets + size != len(record):
        raise Unreadable("the parts of an index are not of its size")
    entries = np.frombuffer(record, _ENTRY, count, at)
    at += entries.nbytes
    if not _is_sound(entries["step"], entries["time"]).all():
        raise Unreadable("the entries of an index are none")
    places = np.frombuffer(record, _COLUMNS, columns, at)
    at += places.nbytes
    for named in (entries["begin"], np.sort(places["begin"])):
        if len(named) and not (before[1] <= named[0] and named[-1] < begin and (named[1:] > named[:-1]).all()):
            raise Unreadable("an index names records of another one, or one twice")
    has_rows = entries[entries["end"] > 0]
    if not ((has_rows["rows"] < has_rows["end"]).all() and (has_rows["rows"][1:] >= has_rows["end"][:-1]).all()):
        raise Unreadable("two steps of an index have the same rows")
    lengths = np.frombuffer(record, "<u4", sets, at)
    ends = (at + 4 * sets + 4 * np.cumsum(lengths, dtype=np.int64)).tolist()
    if (ends or [len(record)])[-1] != len(record) or (count and sets <= int(entries["keys"].max())):
        raise Unreadable("the sets of an index are not of their size")
    begins = [at + 4 * sets, *ends[:-1]] if ends else []
    found = [record[begin:end] for begin, end in zip(begins, ends, strict=True)]
    return Index((before[0], before[1]), entries, found, dict(zip(places["key"].tolist(), places["begin"].tolist(), strict=True)))


def of_column(key: int, places: np.ndarray, values: np.ndarray) -> bytes:
    """The values of one key in the records of an index: the numbers of the records that have one, and the values."""
    head = _COLUMN.pack(COLUMN, len(values), key)
    return head + values.astype("<f8", copy=False).tobytes() + places.astype("<u4", copy=False).tobytes()


def column_of(record: bytes, key: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of :func:`of_column`: places and values.

    Raises:
        Unreadable: it is none of ``key``, or of an index with more records than ``count``.
    """
    if len(record) < _COLUMN.size or record[:1] != COLUMN:
        raise Unreadable("a column is too short")
    _, known, number = _COLUMN.unpack_from(record)
    if number != key or len(record) != _COLUMN.size + 12 * known:
        raise Unreadable("a column is not of its key or size")
    places = np.frombuffer(record, "<u4", known, _COLUMN.size + 8 * known)
    if known and places.max() >= count:
        raise Unreadable("a column is of more records than its index")
    return places, np.frombuffer(record, "<f8", known, _COLUMN.size)

"""What the records of a run directory hold, see docs/reference/run-format.md.

A run directory has pairs of log files, ``gradmon.000001.values`` and ``gradmon.000001.rows``, one pair for each writer, or more for a large
run. The first byte of a record is its kind: ``J`` for a JSON object, ``S`` for a step, ``R`` for the rows of a step,
``I`` for an index of the records before it, ``C`` for a column of their values.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from ..core.formatting import printable
from ..core.keys import NO_ATTENTION
from ..core.moments import ALWAYS, SUMMED, WIDTH, Column
from ..core.records import StatsTable

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
#: An index is written after so many records, or so many values, which the writer keeps for it.
INDEXED, INDEXED_VALUES = 1024, 1 << 16
#: Kind, flags, number of values, step, time, where its rows begin, their bytes, its sets of layouts and of keys, bytes of context.
_STEP = struct.Struct("<cB2xIqdQIIII")
#: Kind, number of records, of columns; where the last index begins and ends, both 0 without one.
_INDEX = struct.Struct("<c3xIIQQ")
#: Of each record: where it begins, its step and time, where its rows begin and end, its sets of layouts and keys, and its flags.
ENTRY = np.dtype(
    [
        ("begin", "<i8"), ("step", "<i8"), ("time", "<f8"), ("rows", "<i8"), ("end", "<i8"),
        ("layouts", "<u4"), ("keys", "<u4"), ("flags", "u1"),
    ]
)  # fmt: skip
#: No record takes fewer bytes.
_SMALLEST = 24
#: Kind, number of values, number of the key.
_COLUMN = struct.Struct("<c3xII")
#: Kind, number of parts, step; then of each part where the record that defines it begins, its bytes, and the columns that it leaves out.
_TABLES, _PART = struct.Struct("<c3xIq"), struct.Struct("<QII")


def name_of(number: int, kind: str) -> str:
    """The name of a file. Raises FileNotFoundError if there is no such number."""
    if number >= 10**9:
        raise FileNotFoundError(f"gradmon.{number - 1}.{kind} has the last number of a file")
    return f"gradmon.{number:06d}.{kind}"


def pairs_in(directory: str | os.PathLike[str]) -> list[int]:
    """The numbers of the pairs in a directory, ascending. Raises OSError if it cannot be read."""
    return sorted(_numbers(directory, _NAME))


def next_number(directory: str | os.PathLike[str]) -> int:
    """The number after those of all files in a directory. Raises OSError as :func:`pairs_in`."""
    return 1 + max(_numbers(directory, _ANY), default=0)


def _numbers(directory: str | os.PathLike[str], pattern: re.Pattern[str]) -> list[int]:
    return [int(found[1]) for name in os.listdir(directory) if (found := pattern.fullmatch(name))]


def is_run(names: Iterable[str]) -> bool:
    return any(map(_NAME.fullmatch, names))


def identity(path: str | os.PathLike[str]) -> tuple[int, int]:
    """What distinguishes the run in ``path`` from another that takes its place. Raises FileNotFoundError if there is none."""
    directory = directory_of(path)
    numbers = pairs_in(directory)
    if not numbers:
        raise FileNotFoundError(f"there is no run in {str(directory)!r}")
    status = os.stat(directory / name_of(numbers[0], VALUES))
    return status.st_dev, status.st_ino


def version(directory: Path) -> str:
    """Changes with each write to the run in a directory, and with another run in its place; empty if there is none."""
    for number in reversed(pairs_in(directory) if directory.is_dir() else []):
        with contextlib.suppress(OSError):
            status = os.stat(directory / name_of(number, VALUES))
            return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"
    return ""


def directory_of(path: str | os.PathLike[str]) -> Path:
    """The run directory; ``path`` is this or one of its files."""
    path = Path(path)
    return path.parent if _NAME.fullmatch(path.name) and path.is_file() else path


#: JSON is nested no deeper, and has no longer numbers and names.
_DEEPEST, _DIGITS, LONGEST_NAME = 32, 40, 10_000
_LARGEST_JSON = 64 << 20


class Unreadable(ValueError):
    """A record has the right checksum, but is none of this format."""


_ENCODER = json.JSONEncoder(default=str, skipkeys=True, separators=(",", ":"))


def text_of(facts: object) -> bytes:
    return _ENCODER.encode(facts).encode()


def of_json(facts: Mapping[str, Any]) -> bytes:
    return JSON + text_of(facts)


def json_of(record: bytes) -> dict[str, Any]:
    """The object in a JSON record. Raises Unreadable if there is none."""
    found = parsed(record[1:])
    if record[:1] != JSON or not isinstance(found, dict):
        raise Unreadable("a record is no JSON object")
    return found


def parsed(text: bytes) -> Any:
    """What stands there as JSON, within bounds; Unreadable if it is none. All texts of a run come through here, each made printable."""
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
    """A step, or what is added to one."""

    step: int
    time: float  # seconds since the epoch
    flags: int  # see APPLIED and the following
    rows: tuple[int, int]  # where the record with its rows begins and ends in the other file; both 0 without one
    layouts: int  # number of the set of layouts of these rows
    keys: int  # number of the set of keys of its values
    values: np.ndarray
    context: bytes  # JSON, as events; empty in an amendment that leaves them as they are
    events: bytes

    def packed(self) -> bytes:
        begin, end = self.rows
        facts = self.flags, len(self.values), self.step, self.time, begin, end - begin, self.layouts, self.keys, len(self.context)
        head = _STEP.pack(STEP, *facts)
        return b"".join((head, self.values.astype("<f8", copy=False).tobytes(), self.context, self.events))


def _is_sound(step: Any, time: Any) -> Any:
    """Whether there can be such a step at such a time, of which there is a date; of numbers or arrays."""
    return (step >= 0) & (step < 1 << 53) & (time > -6e10) & (time < 2.5e11)


def time_of(record: bytes) -> float | None:
    """The time of a step, or of the first part of one, that was written when it ended; None of other records."""
    if record[:1] != STEP or len(record) < _STEP.size or record[1] & (AMENDS | BACKFILLS):
        return None
    written: float = _STEP.unpack_from(record)[4]
    return written


def frame_of(record: bytes) -> StepFrame:
    """A step. Raises Unreadable if it is none."""
    if len(record) < _STEP.size or record[:1] != STEP:
        raise Unreadable("a step is too short")
    _, flags, count, step, time, begin, size, layouts, keys, length = _STEP.unpack_from(record)
    text = _STEP.size + 8 * count
    if text + length > len(record) or not _is_sound(step, time) or begin + size >= 1 << 63:  # which no file has room for
        raise Unreadable("the parts of a step are not of its size")
    values = np.frombuffer(record, "<f8", count, _STEP.size)
    rows = begin, begin + size
    return StepFrame(step, time, flags, rows, layouts, keys, values, record[text : text + length], record[text + length :])


def of_tables(step: int, parts: Sequence[tuple[int, int, bytes]]) -> bytes:
    """The rows of a step: of each part where it is defined, the columns that it leaves out, see :func:`pack`, and its data."""
    heads, blobs = [_TABLES.pack(TABLES, len(parts), step)], []
    for place, absent, data in parts:
        heads.append(_PART.pack(place, len(data), absent))
        blobs.append(data)
    return b"".join(heads + blobs)


def tables_of(record: bytes, step: int | None = None) -> list[tuple[int, int, bytes]]:
    """The inverse of :func:`of_tables`. Raises Unreadable if these are no rows, or none of ``step``."""
    if len(record) < _TABLES.size:
        raise Unreadable("rows are too short")
    kind, count, number = _TABLES.unpack_from(record)
    at = _TABLES.size + count * _PART.size
    if kind != TABLES or step not in (None, number) or at > len(record):
        raise Unreadable(f"there are no rows of step {step} where they should be")
    found = []
    for place, length, absent in _PART.iter_unpack(record[_TABLES.size : at]):
        found.append((place, absent, record[at : at + length]))
        at += length
    if at != len(record):
        raise Unreadable(f"the rows of step {step} are not of their size")
    return found


def squeezed(numbers: np.ndarray) -> bytes:
    """Numbers of 8 bytes, compressed by zlib: first the lowest byte of each, then the next, since these are most alike."""
    return zlib.compress(numbers.view("u1").reshape(-1, 8).T.tobytes(), 1)


def unsqueezed(data: bytes, count: int) -> np.ndarray:
    """The inverse of :func:`squeezed`, int64, in no more memory than ``count`` numbers need; Unreadable if there are others."""
    inflate = zlib.decompressobj()
    try:
        found = inflate.decompress(data, 8 * count + 1)
    except zlib.error:
        raise Unreadable("numbers cannot be decompressed") from None
    if len(found) != 8 * count or not inflate.eof or inflate.unused_data:
        raise Unreadable("there are other numbers than there should be")
    return np.ascontiguousarray(np.frombuffer(found, "u1").reshape(8, -1).T).view("<i8")[:, 0]


def of_index(before: tuple[int, int], entries: np.ndarray, columns: Mapping[int, int]) -> bytes:
    """An index of the records since the last one, which begins and ends at ``before``, both 0 without one.

    ``entries`` has an :data:`ENTRY` of each record, ``columns`` by the number of a key where the record with its values begins.
    """
    fields = [np.ascontiguousarray(entries[name]) for name in ENTRY.names or ()]
    numbers = [each.view("<i8") if each.dtype == "<f8" else each.astype("<i8") for each in fields]
    head = _INDEX.pack(INDEX, len(entries), len(columns), *before)
    return head + squeezed(
        np.diff(np.concatenate((*numbers, *np.array([[*columns], [*columns.values()]], "<i8"))), prepend=np.int64(0))
    )


def before_index(record: bytes) -> tuple[int, int]:
    """Where the index before this one begins and ends; both 0 without one. Raises Unreadable if this is none."""
    if len(record) < _INDEX.size or record[:1] != INDEX:
        raise Unreadable("an index is too short")
    _, _, _, begin, end = _INDEX.unpack_from(record)
    return begin, end


def index_of(record: bytes, begin: int) -> tuple[np.ndarray, dict[int, int]]:
    """The entries and columns of the index that begins at ``begin``.

    Raises Unreadable if it is none, or names other records than those between the last index and itself, each once.
    """
    first, last = before_index(record)
    _, count, keys, *_ = _INDEX.unpack_from(record)
    if not count or not first <= last <= begin or _SMALLEST * (count + keys) > begin - last:  # before it takes any memory
        raise Unreadable("an index has no records, or more than there is room for")
    numbers = np.cumsum(unsqueezed(record[_INDEX.size :], 8 * count + 2 * keys))
    fields, (key, place) = numbers[: 8 * count].reshape(8, count), numbers[8 * count :].reshape(2, keys)
    begins, steps, bits, rows, ends, layouts, sets, flags = fields
    is_sound = _is_sound(steps, bits.view("<f8")) & (rows >= 0) & (ends >= 0)
    if not (is_sound & (layouts | sets >= 0) & (layouts | sets < 1 << 32) & (flags >= 0) & (flags < 1 << 8)).all():
        raise Unreadable("the entries of an index are none")
    for named in (begins, np.sort(place)):
        if len(named) and not (last <= named[0] and named[-1] < begin and (named[1:] > named[:-1]).all()):
            raise Unreadable("an index names records of another one, or one twice")
    rows, ends = rows[ends > 0], ends[ends > 0]
    if not ((rows < ends).all() and (rows[1:] >= ends[:-1]).all()):
        raise Unreadable("two steps of an index have the same rows")
    entries = np.empty(count, ENTRY)
    for name, field in zip(ENTRY.names or (), fields, strict=True):
        entries[name] = field if name != "time" else field.view("<f8")
    return entries, dict(zip(key.tolist(), place.tolist(), strict=True))


def of_column(key: int, values: np.ndarray) -> bytes:
    """The values of one key in the records of an index, in their order."""
    return _COLUMN.pack(COLUMN, len(values), key) + squeezed(np.ascontiguousarray(values, "<f8"))


def column_of(record: bytes, key: int, count: int) -> np.ndarray:
    """The inverse of :func:`of_column`. Raises Unreadable if it is of another key, or has another number of values than ``count``."""
    if len(record) < _COLUMN.size or _COLUMN.unpack_from(record) != (COLUMN, count, key):
        raise Unreadable("a column is not of its key, or of other records than its index")
    return unsqueezed(record[_COLUMN.size :], count).view("<f8")


# --- statistics of tensors --------------------------------------------------------------------------------------------------------

# The blob of a source and step has columns of float32, each with a number for every tensor: count (if it can change between steps), mean,
# mean of |x|, spread (population standard deviation, or rms if no sum was measured), near-zero count, non-finite count, smallest and
# largest value. float32 keeps seven digits of each; of raw sums it would lose the spread. Columns that are 0 everywhere are left out, but
# one.

#: The names of columns where the number stored is not what the column is, but follows from it.
_DERIVED = {Column.SUM: "mean", Column.ABS_SUM: "abs_mean", Column.SQUARE_SUM: "std"}
_COLUMN_NAMES = {column: _DERIVED.get(column, column.name.lower()) for column in Column}
_COLUMNS_BY_NAME = {name: column for column, name in _COLUMN_NAMES.items()}


class TableLayout(NamedTuple):
    """The tensors and columns of packed statistics."""

    source: str
    names: tuple[str, ...]
    columns: frozenset[Column]
    counts: tuple[int, ...]  # numbers of elements that never change; empty if they are among the statistics
    same_as: str  # another source of the same step that stores them; empty if they are stored

    def definition(self) -> dict[str, Any]:
        return {
            "is": "layout",
            "source": self.source,
            "measured": [_COLUMN_NAMES[column] for column in sorted(self.columns)],
            "stored": [_COLUMN_NAMES[Column(column)] for column in _stored(self.columns, bool(self.counts))],
            "tensors": self.names,
            "counts": self.counts,
            "same_as": self.same_as,
        }

    def has_size(self, absent: int, data: bytes) -> bool:
        """Whether these can be the rows of a step; ``absent`` has a bit for each column that is left out."""
        columns = 0 if self.same_as else len(_stored(self.columns, bool(self.counts)))
        there = columns - (absent & (1 << columns) - 1).bit_count()
        return len(data) == 4 * len(self.names) * there and (there > 0 or not columns)

    def dense(self, absent: int, data: bytes) -> bytes:
        width = 4 * len(self.names)
        for place in range(len(_stored(self.columns, bool(self.counts)))):
            if absent >> place & 1:
                data = data[: width * place] + bytes(width) + data[width * place :]
        return data

    def rows(self, blobs: Sequence[bytes]) -> torch.Tensor:
        """The statistics of several steps, float64 ``[steps, tensors, 8]``."""
        rows = np.zeros((len(blobs), len(self.names), WIDTH))
        rows[..., Column.MIN], rows[..., Column.MAX] = np.inf, -np.inf
        if not rows.size:
            return torch.from_numpy(rows)
        stored = np.frombuffer(b"".join(blobs), "<f4").reshape(len(blobs), -1, len(self.names))
        rows[..., _stored(self.columns, bool(self.counts))] = stored.swapaxes(1, 2)
        if self.counts:
            rows[..., Column.COUNT] = self.counts
        count, spread = rows[..., Column.COUNT], rows[..., Column.SQUARE_SUM].copy()
        mean = rows[..., Column.SUM].copy() if Column.SUM in self.columns else 0.0
        with np.errstate(all="ignore"):
            rows[..., Column.SUM] *= count
            rows[..., Column.ABS_SUM] *= count
            rows[..., Column.SQUARE_SUM] = count * np.where(np.isfinite(spread), mean * mean + spread * spread, spread)
        rows[count == 0] = [0.0] * SUMMED + [np.inf, -np.inf]
        return torch.from_numpy(rows)

    def table(self, blob: bytes) -> StatsTable:
        return StatsTable(self.names, self.rows([blob])[0], self.columns)

    def part(self, data: bytes, names: Sequence[str]) -> tuple[TableLayout, bytes]:
        """The layout and data of those of its tensors that are among ``names``."""
        if names == self.names or (kept := set(names)).issuperset(self.names):
            return self, data
        rows = [row for row, name in enumerate(self.names) if name in kept]
        counts = tuple(self.counts[row] for row in rows) if self.counts else ()
        columns = np.frombuffer(data, "<f4").reshape(-1, len(self.names))
        return self._replace(names=tuple(self.names[row] for row in rows), counts=counts), columns[:, rows].tobytes()


@lru_cache(maxsize=8)  # in most steps they are those of the last one
def integers(numbers: bytes) -> tuple[int, ...]:
    """Those in an array of float64."""
    return tuple(map(int, np.frombuffer(numbers, np.float64)))


@cache
def _stored(columns: frozenset[Column], counted: bool) -> list[int]:
    return sorted(map(int, (columns | ALWAYS) - ({Column.COUNT} if counted else set())))


def pack(tables: Sequence[tuple[np.ndarray, frozenset[Column], bool]]) -> list[tuple[int, bytes]]:
    """Of each table, given by its rows and columns, the columns that are left out, a bit for each, and the blob of the others.

    All tables are packed together, since each operation on small arrays costs the same. Each comes with whether to leave out its counts,
    which are then stored with the layout.
    """
    if not tables:
        return []
    rows, parts, begin = np.concatenate([*map(itemgetter(0), tables)]).T, [], 0
    for block, columns, counted in tables:
        end = begin + len(block)
        parts.append((begin, end, columns, counted))
        if Column.SUM not in columns:
            rows[Column.SUM, begin:end] = 0.0  # which makes the spread the rms
        begin = end
    count = rows[Column.COUNT]
    with np.errstate(all="ignore"):
        rows[Column.SUM : Column.SQUARE_SUM + 1] /= count
        mean, square = rows[Column.SUM], rows[Column.SQUARE_SUM]
        variance = np.maximum(square - mean * mean, 0.0)
        # if the spread is not finite, store the mean square, which keeps NaN and infinity apart
        rows[Column.SQUARE_SUM] = np.sqrt(np.where(np.isfinite(square), variance, square))
        if not count.all():
            rows[:, count <= 0] = 0.0
        packed, size = rows.astype("<f4").tobytes(), 4 * len(mean)
    found = []
    for begin, end, columns, counted in parts:
        zero, begin, end = bytes(4 * (end - begin)), 4 * begin, 4 * end
        absent, kept = 0, []
        for place, column in enumerate(_stored(columns, counted)):
            data = packed[column * size + begin : column * size + end]
            if data != zero:
                kept.append(data)
            else:
                absent |= 1 << place
        found.append((absent, b"".join(kept)) if kept else (absent - 1, zero))  # the first one stays
    return found


# --- the forms of what stands as JSON, which somebody else may have written -------------------------------------------------------

_Found = TypeVar("_Found")
#: What a value has to be: of a type, of one of several forms, a list of a form, an object with members of some forms, where those that
#: REQUIRED names have to be there, EACH stands for all others, and without it these may be anything; or what a function says.
Form = Any
REQUIRED, EACH = None, ...  # which no member can be called
_NUMBER = (int, float)
_ANYTHING: Form = {}


def fits(found: Any, form: Form) -> bool:
    if form is None or isinstance(form, type):
        return found is form or type(found) is form
    if isinstance(form, tuple):
        return any(fits(found, each) for each in form)
    if isinstance(form, list):
        return type(found) is list and all(fits(part, form[0]) for part in found)
    if not isinstance(form, dict):
        return bool(form(found))
    if type(found) is not dict or not all(name in found for name in form.get(REQUIRED, ())):
        return False
    return all(fits(value, form.get(name, form.get(EACH))) for name, value in found.items() if EACH in form or name in form)


_FINDINGS: Form = [
    {
        REQUIRED: ("rule", "first", "last", "count"), "rule": str, "first": int, "last": int, "count": int, "where": [str],
        "evidence": {EACH: _NUMBER},
    }
]  # fmt: skip
_CHANGE: Form = {
    REQUIRED: ("number",), "number": int, "since": (int, None), "until": (int, None), "first": (int, None), "steps": (int, None),
    "every": (int, None), "preset": (str, None), "ended": str,
}  # fmt: skip
_FACTS: dict[str, Form] = {
    "torch": str,
    "model": str,
    "preset": (str, None),
    "trainer": str,
    "every": (None, lambda found: type(found) is int and found > 0),
    "parameters": {EACH: {REQUIRED: ("shape",), "shape": [int], "dtype": str}},
    "kinds": {EACH: str},
    "matrices": {EACH: int},
    "frozen": [str],
    "optimizers": [
        {
            REQUIRED: ("optimizer", "settings", "parameters"), "optimizer": str, "number": int, "parameters": [str],
            "settings": dict.fromkeys(("lr", "initial_lr", "weight_decay"), (*_NUMBER, None)),
        }
    ],
    "chance": {EACH: _NUMBER},
    "process": _ANYTHING,
    "clip_bound": (*_NUMBER, None),
    "raised": str,
    "unwritten": int,
    "lost_after": (int, None),
    "lost_why": str,
    "tune": {
        "session": str, "listens": bool, "ended": bool, "number": int, "why": str,
        "in_force": (_CHANGE, None), "waits": (_CHANGE, None), "last": (_CHANGE, None),
    },
    **dict.fromkeys(("audit", "replicas", "setup", "data", "foresight"), _FINDINGS),
}  # fmt: skip
_CONTEXT: dict[str, Form] = {
    "lr": [_NUMBER],
    "amp_scale": (*_NUMBER, None),
    "overhead_fraction": (*_NUMBER, None),
    "tags": _ANYTHING,
    "batch_norms": lambda found: fits(found, {EACH: [_NUMBER]}) and all(name.isdecimal() and len(name) < 10 for name in found),
    "rows": {
        REQUIRED: ("ids", "losses", "count", "sum", "nonfinite"), "ids": [(int, str)], "losses": [_NUMBER], "count": int,
        "sum": _NUMBER, "nonfinite": int,
    },
    **dict.fromkeys(("skipped", "interrupted", "action", NO_ATTENTION), str),
    **dict.fromkeys(("time", "applied"), lambda found: False),  # these stand elsewhere
}  # fmt: skip
_EVENT: dict[str, Form] = {
    "step": int, "signal": str, "value": _NUMBER, "score": _NUMBER, "threshold": _NUMBER, "reason": str, "usual": (*_NUMBER, None),
    "where": str, "action": str,
}  # fmt: skip


def _fitting(found: Mapping[str, _Found], forms: Mapping[str, Form]) -> dict[str, _Found]:
    return {name: value for name, value in found.items() if name not in forms or fits(value, forms[name])}


def facts_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the facts about a run that are of their form, or of none that is known."""
    return _fitting(found, _FACTS)


def context_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Likewise of the context of a step."""
    return _fitting(found, _CONTEXT)


def is_event(found: Any) -> bool:
    """Whether it is a spike, whatever else it says."""
    return type(found) is dict and _fitting(found, _EVENT).keys() == found.keys()


def _is_name(found: object) -> bool:
    return type(found) is str and len(found) <= LONGEST_NAME


_LAYOUT: Form = {
    REQUIRED: ("source", "same_as", "tensors", "measured", "stored", "counts"),
    "source": _is_name,
    "same_as": str,
    "tensors": [_is_name],
    "measured": list,
    "counts": [lambda found: type(found) is int and 0 <= found < 2**62],
}


def layout_of(facts: Mapping[str, Any]) -> TableLayout:
    """The layout that was defined so. Raises Unreadable if it is none."""
    if not fits(facts, _LAYOUT):
        raise Unreadable("a layout is none")
    names, counts = tuple(facts["tensors"]), tuple(facts["counts"])
    columns = frozenset(column for name, column in _COLUMNS_BY_NAME.items() if name in facts["measured"])
    stored = [_COLUMN_NAMES[Column(column)] for column in _stored(columns, bool(counts))]
    if facts["stored"] != stored or len(set(names)) != len(names) or len(counts) not in (0, len(names)):
        raise Unreadable("a layout has other columns or counts, or names twice")
    return TableLayout(facts["source"], names, columns, counts, facts["same_as"])

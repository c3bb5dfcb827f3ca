"""Which steps a run directory has, kept up to date by reading only what is new."""

from __future__ import annotations

import contextlib
import os
import time
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..core.keys import Key
from ..core.records import SpikeEvent, StepRecord
from . import format as f
from .log import SETTLED, LogReader, Record

_NEVER = float("inf")
#: Seconds after the last write from which the records before an index can be asked for, since they were written back with it.
_SOON = 60.0
#: The last index is looked for in so many blocks at the end of a file.
_LOOKED_THROUGH = 64
#: A run has no more keys.
_MOST_KEYS = 1 << 20
#: Stands for keys whose names are damaged.
_UNKNOWN = Key("\0", "", "")  # which is in no file, whose texts are printable
#: Beyond each step.
_LAST = 1 << 53
#: Of each frame its entry, with its set of keys by the number in the run, and its pair. That of a rewind has the flag of JSON.
_FRAME = np.dtype([*((name, f.ENTRY[name]) for name in f.ENTRY.names or ()), ("pair", "<u4")])
_Found = TypeVar("_Found")
_EVENT = frozenset(field.name for field in fields(SpikeEvent))
_REQUIRED = frozenset(field.name for field in fields(SpikeEvent) if field.default is MISSING)


class Pair:
    """A pair of files, of one writer; ``number`` is in the order of the writers."""

    def __init__(self, directory: Path, number: int) -> None:
        self.number, self._directory = number, directory
        self.values = LogReader(directory / f.name_of(number, f.VALUES), f.time_of)
        self.place = 0  # among the pairs of the run
        self.facts: dict[str, Any] = {}
        self.has_head = self.has_claimed = False
        self.rows_end = 0  # of the last step that has any
        self.ids: dict[int, Key] = {}  # the keys, by their numbers in the file
        self.sets = {0: 0}  # of keys: the number of the run, by that of the file
        self.layouts: dict[int, tuple[int, ...]] = {0: ()}  # where each set of them is defined
        self.columns: list[tuple[slice, int, dict[int, int]]] = []  # of each index: frames, end, where columns are
        self._rows: LogReader | None = None
        # None where a record is none, which each step would ask for again
        self._known: dict[int, f.TableLayout | str | None] = {}

    @property
    def rows(self) -> LogReader:
        """The file with rows. Raises OSError where it is missing."""
        if self._rows is None:
            self._rows = LogReader(self._directory / f.name_of(self.number, f.ROWS))
        return self._rows

    def layout(self, place: int) -> f.TableLayout | str:
        """What is defined there in the file with rows: a layout, or the device of a random state. Raises Unreadable if nothing is."""
        if place not in self._known:
            record = self.rows.at(place)
            if record is None and self.rows.age <= SETTLED:
                raise f.Unreadable
            self._known[place] = None
            with contextlib.suppress(f.Unreadable):
                facts = f.json_of(record or b"")
                device = facts.get("device") if facts.get("is") == "rng" else None
                self._known[place] = device if type(device) is str else f.layout_of(facts)
        found = self._known[place]
        if found is None:
            raise f.Unreadable
        return found

    def indices(self) -> list[Record]:
        """The indices, the last one first."""
        last = self.values.found_backwards(f.INDEX, _LOOKED_THROUGH)
        found = [] if last is None else [last]
        with contextlib.suppress(f.Unreadable):
            while found and (before := f.before_index(found[-1].data))[1]:
                record = self.values.record(*before)
                if record is None or record.end > found[-1].begin:
                    return []
                found.append(record)
            return found
        return []

    def has(self, entries: np.ndarray) -> bool:
        """Whether what an index knows can be read too, and is not on its way."""
        if self.values.age <= _SOON and time.time() - float(entries["time"].max()) <= SETTLED:
            return False
        return bool(entries["end"].max() <= self.rows_there())

    def rows_there(self) -> float:
        """Up to where rows can be read, in bytes."""
        try:
            return _NEVER if self.values.age > SETTLED else self.rows.size
        except OSError:
            return 0

    def close(self) -> None:
        self.values.close()
        if self._rows is not None:
            self._rows.close()


class Frame(NamedTuple):
    """The record of a step, or of what is added to one: its number among all, and the fields of its entry."""

    number: int
    begin: int
    step: int
    time: float
    rows: int
    end: int
    layouts: int
    keys: int  # the number of the run for its set of keys
    flags: int
    pair: int


class RunIndex:
    """The steps of a run, in the files of its writers. Steps of a writer replace those of earlier ones from its own first step on.

    Raises FileNotFoundError if there is no run in the directory, OSError or ValueError if it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._why = ""  # a pair could not be read
        self._pairs: list[Pair] = []
        self.meta: dict[str, Any] = {}  # facts about the run
        self.steps: list[int] = []  # ascending
        self.segments: list[tuple[int, int]] = []  # the first and last step of each part that was written without a break
        self._keys: dict[Key, Key] = {}  # of all values
        self.unreadable: list[tuple[str, int]] = []  # records that are of no known form: file and place
        self._sets: list[tuple[Key, ...]] = [()]  # of keys
        self._table = np.empty(0, _FRAME)  # of all records of steps, and of rewinds, as they were read
        self._new: list[np.ndarray] = []  # what was read since, which stays here if the look ends by an error
        self._has_news = False  # whether there are new facts
        self._frames = self._of_step = np.empty(0, np.int64)  # those of the run by step, then as written, and the step of each
        self._first = np.empty(0, np.int64)  # where each step begins there
        for number in f.pairs_in(self._directory):
            with contextlib.suppress(FileNotFoundError):  # it was removed just now
                self._open(number)
        if not self._pairs:
            if self.unreadable:
                raise ValueError(self._why)
            raise FileNotFoundError(f"there is no run in {str(self._directory)!r}")
        self.refresh()
        if not self.steps and not any(pair.has_head for pair in self._pairs):
            for pair in self._pairs:
                if pair.values.offset or pair.values.begins_otherwise():
                    raise ValueError(f"{str(self._directory / pair.values.name)!r} is not a run of torch_gradmon")

    def _open(self, number: int) -> Pair | None:
        """The pair of this number, if it can be read."""
        try:
            pair = Pair(self._directory, number)
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            what = "this user has no permission" if isinstance(error, PermissionError) else error
            self._why = f"{str(self._directory / f.name_of(number, f.VALUES))!r} could not be read: {what}"
            self.unreadable.append((f.name_of(number, f.VALUES), 0))
            return None
        pair.place = len(self._pairs)
        self._pairs.append(pair)
        return pair

    # --- what is new ----------------------------------------------------------------------------------------------------------------

    def refresh(self) -> int | None:
        """Read what was written since the last look; returns the first step that may be new or changed, None if nothing was written."""
        for pair in self._pairs:
            self._take_from(pair)
        with contextlib.suppress(FileNotFoundError):
            while (begun := self._open(self._pairs[-1].number + 1)) is not None:
                self._take_from(begun)
        if not self._new and not self._has_news:
            return None
        begin, self._table = len(self._table), np.concatenate((self._table, *self._new))
        changed = min(self._table["step"][begin:].tolist(), default=None)
        if changed is not None:
            self._choose()
        self._new, self._has_news = [], False
        self.meta = {}
        for pair in [pair for pair in self._pairs if pair.has_claimed] or self._pairs[-1:]:
            self.meta.update(pair.facts)
        return self.steps[-1] if changed is None and self.steps else changed

    def _take_from(self, pair: Pair) -> None:
        if not pair.values.offset:
            self._take_indexed(pair)
        available = -1.0
        for record in pair.values.follow():
            kind = record.data[:1]
            try:
                if kind == f.STEP:
                    frame = f.frame_of(record.data)
                    begin, end = frame.rows
                    if end and not pair.rows_end <= begin < end:
                        raise f.Unreadable  # the rows of another step
                    if end > available:
                        available = pair.rows_there()
                        if end > available:
                            pair.values.offset = record.begin  # it is there with its rows
                            break
                    pair.rows_end = max(pair.rows_end, end)
                    keys = pair.sets.get(frame.keys, 0)
                    flags = frame.flags & ~f.IS_JSON
                    entry = record.begin, frame.step, frame.time, begin, end, frame.layouts, keys, flags, pair.place
                    self._new.append(np.array([entry], _FRAME))
                elif kind == f.JSON or not pair.has_head:  # not an index, nor what only a later version knows
                    rewound = self._take_facts(pair, f.json_of(record.data))
                    if rewound is not None:
                        entry = record.begin, rewound, 0.0, 0, 0, 0, 0, f.IS_JSON, pair.place
                        self._new.append(np.array([entry], _FRAME))
            except f.Unreadable:
                self.unreadable.append((pair.values.name, record.begin))
                if not pair.has_head:  # it is a log of something else
                    break

    def _take_indexed(self, pair: Pair) -> None:
        """Read what indices know of a file, instead of the file; nothing where these records may still be on their way."""
        for record in reversed(pair.indices()):
            try:
                entries, columns = f.index_of(record.data, record.begin)
                is_json = entries["flags"] & f.IS_JSON > 0
                begins = entries["begin"][is_json].tolist()
                ends = np.append(entries["begin"][1:], record.end)[is_json].tolist()
                facts = [f.json_of(_up_to(end, pair.values.record(begin))) for begin, end in zip(begins, ends, strict=True)]
            except f.Unreadable:
                break
            rows = entries[entries["end"] > 0]
            if not pair.has(entries) or (len(rows) and rows["rows"][0] < pair.rows_end):
                break
            pair.rows_end = max([pair.rows_end, *rows["end"][-1:].tolist()])
            is_frame = ~is_json
            for place, begin, found in zip(np.flatnonzero(is_json).tolist(), begins, facts, strict=True):
                try:
                    rewound = self._take_facts(pair, found)
                except f.Unreadable:
                    self.unreadable.append((pair.values.name, begin))
                else:
                    if rewound is not None:
                        entries["step"][place], is_frame[place] = rewound, True
            frames = np.empty(int(is_frame.sum()), _FRAME)
            for name in f.ENTRY.names or ():
                frames[name] = entries[name][is_frame]
            frames["keys"] = [pair.sets.get(each, 0) for each in frames["keys"].tolist()]
            frames["pair"] = pair.place
            known = len(self._table) + sum(map(len, self._new))
            pair.columns.append((slice(known, known + len(frames)), record.end, columns))
            self._new.append(frames)
            pair.values.offset = record.end

    def _take_facts(self, pair: Pair, record: Mapping[str, Any]) -> int | None:
        """Take what a JSON record says; returns the step to which it rewinds the run, None if it does not."""
        what = record.get("is")
        is_sound = True
        if isinstance(facts := record.get("facts"), dict):
            sound = f.facts_of(facts)
            pair.facts.update(sound)
            is_sound = len(sound) == len(facts)
        pair.has_claimed |= record.get("claims") is True
        if what == "head":
            if record.get("format") != f.FORMAT:
                found = f"{record.get('format')!r:.40}"
                raise ValueError(f"{pair.values.name!r} is of format {found}, which this version does not know")
            pair.has_head = True
        if what == "keys":
            first, keys = _natural(record.get("first")), record.get("keys")
            if not isinstance(keys, list) or len(self._keys) + len(keys) > _MOST_KEYS:
                raise f.Unreadable
            for number, each in enumerate(keys, first):
                if _is_key(each):
                    key = Key(*each)
                    pair.ids[number] = self._keys.setdefault(key, key)
            if not all(map(_is_key, keys)):
                raise f.Unreadable
            return None
        if what in ("sets", "layouts"):
            number, places = _natural(record.get("number")), record.get("at" if what == "layouts" else "keys")
            if not isinstance(places, list):
                raise f.Unreadable
            places = tuple(map(_natural, places))
            if what == "layouts":
                pair.layouts[number] = places
            else:
                pair.sets[number] = len(self._sets)
                self._sets.append(tuple([pair.ids.get(each, _UNKNOWN) for each in places]))
            return None
        if what == "rewind" and type(step := record.get("step")) is int:
            return min(max(step, 0), _LAST)
        if not is_sound:
            raise f.Unreadable
        self._has_news = True
        return None

    def _choose(self) -> None:
        """Find the frames that make the run: those that none replaces that is later in the order of the writers, and of what each wrote."""
        order = np.argsort(self._table["pair"], kind="stable")
        step, flags, pair = (self._table[name][order] for name in ("step", "flags", "pair"))
        is_rewind, is_late = flags & f.IS_JSON > 0, flags & f.AMENDS > 0
        is_next = ~is_late & (flags & f.BACKFILLS == 0)  # what is after all others, and ends those of its own and higher numbers
        first_of_later = np.minimum.accumulate(np.where(is_next, step, _LAST)[::-1])[::-1]
        is_cut = step >= np.append(first_of_later[1:], _LAST)
        is_there = ~is_cut & ~is_rewind
        lost, goes_on = np.cumsum(is_cut & ~is_late & ~is_rewind), is_next & ~is_cut
        begins = step[goes_on][np.diff(lost[goes_on], prepend=0) > 0]  # of what follows a resumption or a rollback
        by_step = np.argsort(step, kind="stable")
        step, pair, is_there = step[by_step], pair[by_step], is_there[by_step]
        # the last frame up to each that amends none, and the last one of its step
        base = np.maximum.accumulate(np.where(is_there & ~is_late[by_step], np.arange(len(step)), -1))
        last = base[np.searchsorted(step, step, "right") - 1]
        is_there &= (base == last) & (base >= 0) & (step[base] == step) & (pair[base] == pair)
        self._frames, self._of_step = order[by_step][is_there], step[is_there]
        steps, self._first = np.unique(self._of_step, return_index=True)
        self.steps = steps.tolist()
        bounds = pairwise([0, *np.searchsorted(steps, begins).tolist(), len(steps)])
        self.segments = [(self.steps[begin], self.steps[end - 1]) for begin, end in bounds if end > begin]

    # --- what is there --------------------------------------------------------------------------------------------------------------

    @property
    def damage(self) -> list[str]:
        """What could not be read because a file is damaged, each on one line; empty if nothing is."""
        files = [pair.values for pair in self._pairs]
        damaged = [f"{file.name}: bytes {each.begin} to {each.end} are damaged" for file in files for each in file.damage]
        return damaged + [f"{name}: the record at byte {place} cannot be read" for name, place in dict.fromkeys(self.unreadable)]

    def __contains__(self, step: int) -> bool:
        at = bisect_left(self.steps, step)
        return at < len(self.steps) and self.steps[at] == step

    def times(self, last: int) -> list[float]:
        """When the last steps ended, in seconds since the epoch."""
        found: list[float] = self._table["time"][self._frames[self._first[-last:]]].tolist()
        return found

    def _frames_of(self, step: int) -> list[Frame]:
        begin, end = np.searchsorted(self._of_step, (step, step + 1)).tolist()
        return [self._frame(number) for number in self._frames[begin:end].tolist()]

    def _frame(self, number: int) -> Frame:
        return Frame(number, *self._table.item(number))

    def _among(self, steps: Iterable[int] | None) -> np.ndarray:
        """The frames of some steps, or of all."""
        return self._frames if steps is None else self._frames[np.isin(self._of_step, np.array(list(steps), np.int64))]

    def with_events(self) -> list[int]:
        found: list[int] = np.unique(self._of_step[self._table["flags"][self._frames] & f.HAS_EVENTS > 0]).tolist()
        return found

    def stored_keys(self, among: Iterable[int] | None = None) -> list[Key]:
        """The keys that any step, or any of some, has a stored value of, in the order of their first one."""
        used = np.unique(self._table["keys"][self._among(among)]).tolist()
        there = {key for each in used for key in self._sets[each]}
        return [key for key in self._keys if key in there]

    def layouts(self, among: Iterable[int] | None = None) -> list[f.TableLayout]:
        """The layouts of the steps, or of some, in the order of their first use."""
        places = dict.fromkeys((frame.pair, place) for frame in self._of_sets(among)[0] for place in self._places(frame))
        found = []
        for pair, place in places:
            try:
                found.append(self._pairs[pair].layout(place))
            except (f.Unreadable, OSError):
                self.unreadable.append((self._pairs[pair].values.name, place))
        return [layout for layout in found if isinstance(layout, f.TableLayout)]

    def steps_with(self, source: str) -> list[int]:
        """The steps that have rows of a source, ascending, and those of which that is unknown."""
        frames, which = self._of_sets()
        has = np.array([self._may_have(frame, source) for frame in frames], bool)
        steps: list[int] = np.unique(self._of_step[has[which]]).tolist()
        return steps

    def _may_have(self, frame: Frame, source: str) -> bool:
        places = self._places(frame)
        try:
            found = [self._pairs[frame.pair].layout(place) for place in places]
        except (f.Unreadable, OSError):
            return True
        is_unknown = not places and frame.end > 0
        return is_unknown or any(isinstance(layout, f.TableLayout) and layout.source == source for layout in found)

    def _of_sets(self, among: Iterable[int] | None = None) -> tuple[list[Frame], np.ndarray]:
        """The first frame with each set of layouts, in the order of the steps, and for each frame which of these has its set."""
        frames = self._among(among)
        sets = self._table["pair"][frames].astype(np.int64) << 32 | self._table["layouts"][frames]
        _, firsts, which = np.unique(sets, return_index=True, return_inverse=True)
        order = np.argsort(firsts)
        return list(map(self._frame, frames[firsts[order]].tolist())), np.argsort(order)[which]

    def _places(self, frame: Frame) -> Sequence[int]:
        """Where the layouts of a step are defined, which its rows know too."""
        pair = self._pairs[frame.pair]
        if frame.layouts not in pair.layouts:
            with contextlib.suppress(f.Unreadable, OSError):
                found = f.tables_of(pair.rows.at(frame.rows, frame.end) or b"")
                pair.layouts[frame.layouts] = tuple(place for place, _, _ in found)
        return pair.layouts.get(frame.layouts, ())

    def read(self, step: int, among: Container[Key] | None = None) -> StepRecord:
        """A step, with values of some keys, or all, and without statistics."""
        frames, told = self._frames_of(step), None
        values: dict[Key, float] = {}
        for frame in frames:
            try:
                found = f.frame_of(self._record(frame))
                if found.step != step:
                    raise f.Unreadable
            except f.Unreadable:  # it was there when the index was made
                self._miss(frame)
                continue
            told = found if told is None or found.context else told
            values.update(zip(self._sets[frame.keys], found.values.tolist(), strict=False))
        values.pop(_UNKNOWN, None)
        if among is not None:
            values = {key: value for key, value in values.items() if key in among}
        if told is None:
            return StepRecord(step, frames[0].time, True, values)
        context = f.context_of(_parsed(told.context, dict))
        return StepRecord(step, told.time, bool(told.flags & f.APPLIED), values, {}, context, _spikes(told.events))

    def _parts(self, step: int) -> Iterator[tuple[f.TableLayout | str, int, bytes]]:
        """What is stored of a step beside its values: the layout or device, the columns that are left out, and the data of each part."""
        for frame in self._frames_of(step):
            pair = self._pairs[frame.pair]
            try:
                for place, absent, data in f.tables_of(pair.rows.at(frame.rows, frame.end) or b"", step) if frame.end else ():
                    layout = pair.layout(place)
                    if isinstance(layout, f.TableLayout) and not layout.has_size(absent, data):
                        raise f.Unreadable
                    yield layout, absent, data
            except (f.Unreadable, OSError):
                self.unreadable.append((f.name_of(pair.number, f.ROWS), frame.rows))

    def rows(self, step: int, wanted: str | None = None) -> dict[str, tuple[f.TableLayout, bytes]]:
        """The packed rows of a step by source, or of one source; those that another source stores come with its layout."""
        found: dict[str, tuple[f.TableLayout, bytes]] = {}
        parts = {each.source: (each, absent, data) for each, absent, data in self._parts(step) if isinstance(each, f.TableLayout)}
        for source in parts if wanted is None else parts.keys() & {wanted}:
            own = parts[source][0]
            layout, absent, data = parts.get(own.same_as or source, (own, 0, b""))
            if not layout.same_as:
                found[source] = layout.part(layout.dense(absent, data), own.names)
        return found

    def stored(self, key: Key) -> dict[int, float]:
        """Value by step of one of :attr:`scalars`, in a few milliseconds; empty if there is none."""
        if key not in self._keys:
            return {}
        places = np.array([members.index(key) if key in members else -1 for members in self._sets], np.int64)
        has = (places >= 0)[self._table["keys"]]
        values, is_known = np.full(len(has), np.nan), np.zeros(len(has), bool)
        for pair in self._pairs:  # first what indices know
            own = next((own for own, each in pair.ids.items() if each == key), None)
            for part, end, columns in pair.columns:
                if own in columns:
                    with contextlib.suppress(f.Unreadable):
                        record = _up_to(end, pair.values.record(columns[own]))
                        values[part][has[part]] = f.column_of(record, own, int(has[part].sum()))
                        is_known[part] = has[part]
        of_key = has[self._frames]
        frames, steps = self._frames[of_key], self._of_step[of_key]
        for frame in map(self._frame, frames[~is_known[frames]].tolist()):
            try:
                values[frame.number] = f.frame_of(self._record(frame)).values[places[frame.keys]]
                is_known[frame.number] = True
            except (f.Unreadable, IndexError):
                self._miss(frame)
        there = is_known[frames]
        return dict(zip(steps[there].tolist(), values[frames[there]].tolist(), strict=True))  # of a step the last one

    def _miss(self, frame: Frame) -> None:
        self.unreadable.append((self._pairs[frame.pair].values.name, frame.begin))

    def _record(self, frame: Frame) -> bytes:
        """The record of a frame; empty if there is none that ends before the next frame begins."""
        values, following = self._pairs[frame.pair].values, frame.number + 1
        is_followed = following < len(self._table) and self._table["pair"][following] == frame.pair
        return _up_to(self._table["begin"].item(following) if is_followed else values.size, values.record(frame.begin))

    def close(self) -> None:
        for pair in self._pairs:
            pair.close()


def _up_to(end: int, record: Record | None) -> bytes:
    """The data of a record that ends there or before: one could begin within another, and have most of its bytes."""
    return record.data if record is not None and record.end <= end else b""


def _parsed(text: bytes, kind: type[_Found]) -> _Found:
    """The object or list that stands there as JSON, empty if it is none."""
    with contextlib.suppress(f.Unreadable):
        if isinstance(found := f.parsed(text or b"null"), kind):
            return found
    return kind()


def _spikes(text: bytes) -> tuple[SpikeEvent, ...]:
    """The spikes of a step. Fields that only a later version knows are ignored."""
    events = [event for event in _parsed(text, list) if f.is_event(event)]
    known = [{name: value for name, value in event.items() if name in _EVENT} for event in events]
    return tuple(SpikeEvent(**event) for event in known if event.keys() >= _REQUIRED)


@contextlib.contextmanager
def opening(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The directory of the run in ``path``, a run directory or one of its files; errors that opening it there raises say what is wrong.

    These are FileNotFoundError if there is no run in it, and ValueError if it cannot be read.
    """
    directory = f.directory_of(path)
    try:
        yield directory
    except (FileNotFoundError, NotADirectoryError):
        if directory.is_file():
            raise ValueError(f"{str(path)!r} is not a run of torch_gradmon") from None
        if not directory.exists():
            raise FileNotFoundError(f"there is no run in {str(path)!r}, which does not exist") from None
        if (directory / f.OLD_NAME).exists():
            raise ValueError(f"the run in {str(path)!r} is of an older version, which this one does not read") from None
        raise FileNotFoundError(f"there is no run in {str(path)!r}") from None
    except PermissionError as error:
        raise ValueError(f"{str(error.filename or path)!r} could not be read: this user has no permission") from error
    except OSError as error:
        raise ValueError(f"{str(path)!r} could not be read: {error}") from error


def _natural(number: object) -> int:
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise f.Unreadable("a number is none")
    return number


def _is_key(found: Any) -> bool:
    return type(found) is list and len(found) == 3 and all(type(part) is str and len(part) <= f.LONGEST_NAME for part in found)

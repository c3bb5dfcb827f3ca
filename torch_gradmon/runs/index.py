"""Which steps a run directory has, kept up to date by reading only what is new."""

from __future__ import annotations

import contextlib
import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core.keys import Key
from ..core.records import SpikeEvent
from . import format as f
from .log import SETTLED, Damage, LogReader, Record
from .packing import TableLayout, layout_of

_NEVER = float("inf")
#: Seconds after the last write from which the records before an index can be asked for, since they were written back with it.
_SOON = 60.0
#: The last index is looked for in so many blocks at the end of a file.
_LOOKED_THROUGH = 64
#: A run has no more keys.
_MOST_KEYS = 1 << 20
#: Stands for keys whose names are damaged.
_UNKNOWN = -1
#: Of each frame its entry, with its set of keys by the number in the run; its pair, and the frame of its step that it amends, or -1.
_FRAME = {**{name: f.ENTRY[name] for name in f.ENTRY.names or ()}, "pair": np.dtype("<u4"), "before": np.dtype("<i8")}
#: What the state of a random generator is named by among rows.
RNG = "rng:"
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
        self.begins = _NEVER  # the first step that it replaces or adds
        self.rows_end = 0  # of the last step that has any
        self.ids: dict[int, int] = {}  # of the run, by those of the file
        self.sets: dict[int, tuple[int, ...]] = {0: ()}  # of keys, by the numbers of the run
        self.layouts: dict[int, tuple[int, ...]] = {0: ()}  # where each set of them is defined
        self.columns: list[tuple[slice, int, dict[int, int]]] = []  # of each index: frames, end, where keys are
        self._rows: LogReader | None = None
        self._known: dict[int, TableLayout | str | None] = {}  # None where a record is none, which each step would ask for again

    @property
    def rows(self) -> LogReader:
        """The file with rows. Raises OSError where it is missing."""
        if self._rows is None:
            self._rows = LogReader(self._directory / f.name_of(self.number, f.ROWS))
        return self._rows

    def layout(self, place: int) -> TableLayout | str:
        """What is defined there in the file with rows: a layout, or the device of a random state. Raises Unreadable if nothing is."""
        if place not in self._known:
            record = self.rows.at(place)
            if record is None and self.rows.age <= SETTLED:
                raise f.Unreadable
            self._known[place] = None
            with contextlib.suppress(f.Unreadable):
                facts = f.json_of(record or b"")
                device = facts.get("device") if facts.get("is") == "rng" else None
                self._known[place] = device if type(device) is str else layout_of(facts)
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


class StoredStep(NamedTuple):
    """All that is stored of a step but its rows; ``values`` by the numbers of their keys, context and events as JSON."""

    step: int
    time: float
    applied: bool
    context: bytes
    events: bytes
    values: dict[int, float]

    def parsed_context(self) -> dict[str, Any]:
        found = _parsed(self.context)
        return f.context_of(found) if isinstance(found, dict) else {}

    def facts(self) -> dict[str, Any]:
        return {"time": self.time, "applied": self.applied, **self.parsed_context()}

    def spikes(self) -> tuple[SpikeEvent, ...]:
        """The spikes. Fields that only a later version knows are ignored."""
        found = _parsed(self.events)
        events = [event for event in found if f.is_event(event)] if isinstance(found, list) else []
        known = [{name: value for name, value in event.items() if name in _EVENT} for event in events]
        return tuple(SpikeEvent(**event) for event in known if event.keys() >= _REQUIRED)


def _parsed(text: bytes) -> Any:
    try:
        return f.parsed(text or b"null")
    except f.Unreadable:
        return None


class RunIndex:
    """The steps of a run, in the files of its writers. Steps of a writer replace those of earlier ones from its own first step on.

    Raises FileNotFoundError if there is no run in the directory, OSError or ValueError if it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._why = ""  # a pair could not be read
        self._changed: int | None = None  # since the last look that was no error, as of :func:`_earlier`
        self._pairs: list[Pair] = []
        self.meta: dict[str, Any] = {}  # facts about the run
        self.steps: list[int] = []  # ascending
        self.begins: list[int] = []  # the first steps of parts that follow a resumption or a rollback
        self.keys: dict[Key, int] = {}  # of all values, by their numbers
        self.unreadable: list[tuple[str, int]] = []  # records that are of no known form: file and place
        self._last: dict[int, int] = {}  # the frame of each step, or the last one that amends it
        self._table, self._size = {name: np.empty(64, kind) for name, kind in _FRAME.items()}, 0
        self._sets: dict[tuple[int, ...], int] = {(): 0}  # of keys
        self._ordered: tuple[np.ndarray, np.ndarray] | None = None
        for number in f.pairs_in(self._directory):
            with contextlib.suppress(FileNotFoundError):  # it was removed just now
                self._open(number)
        if not self._pairs:
            if self.unreadable:
                raise ValueError(self._why)
            raise FileNotFoundError(f"there is no run in {str(self._directory)!r}")
        self.look()
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

    def look(self) -> int | None:
        """Read what was written since the last look; returns the first step that may be new or changed, None if nothing was written."""
        for pair in self._pairs:
            self._take_from(pair)
        with contextlib.suppress(FileNotFoundError):
            while (begun := self._open(self._pairs[-1].number + 1)) is not None:
                self._take_from(begun)
        changed, self._changed = self._changed, None
        if changed is None:
            return None
        self._ordered = None
        self.meta = {}
        for pair in [pair for pair in self._pairs if pair.has_claimed] or self._pairs[-1:]:
            self.meta.update(pair.facts)
        return changed if changed >= 0 else self.steps[-1] if self.steps else None

    def _take_from(self, pair: Pair) -> None:
        limit = min((each.begins for each in self._pairs[pair.place + 1 :]), default=_NEVER)
        if not pair.values.offset:
            self._changed = _earlier(self._changed, self._take_indexed(pair, limit))
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
                    keys = self._sets[pair.sets.get(frame.keys, ())]
                    number = self._size
                    part = self._new_frames(1)
                    entry = record.begin, frame.step, frame.time, begin, end, frame.layouts, keys, frame.flags, pair.place
                    for name, value in zip(_FRAME, entry, strict=False):
                        self._table[name][part] = value
                    touched = self._take_step(pair, number, frame.step, frame.flags, limit)
                elif kind != f.JSON and pair.has_head:  # an index, or what only a later version knows
                    continue
                else:
                    touched = self._take_facts(pair, f.json_of(record.data), limit)
            except f.Unreadable:
                self.unreadable.append((pair.values.name, record.begin))
                if not pair.has_head:  # it is a log of something else
                    break
                continue
            self._changed = _earlier(self._changed, touched)

    def _new_frames(self, count: int) -> slice:
        """Room for so many frames, which begin a step unless they are told to amend one."""
        part = slice(self._size, self._size + count)
        if part.stop > len(self._table["begin"]):
            self._table = {name: np.resize(column, 2 * part.stop) for name, column in self._table.items()}
        self._size, self._table["before"][part] = part.stop, -1
        return part

    def _take_indexed(self, pair: Pair, limit: float) -> int | None:
        """Read what indices know of a file, instead of the file; nothing where these records may still be on their way."""
        first: int | None = None
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
            entries = entries[~is_json]
            pair.rows_end = max([pair.rows_end, *rows["end"][-1:].tolist()])
            base, new = self._size, self._new_frames(len(entries))
            for name in f.ENTRY.names or ():
                self._table[name][new] = entries[name]
            self._table["pair"][new] = pair.place
            at = 0
            for until, begin, found in zip(np.cumsum(~is_json)[is_json].tolist(), begins, facts, strict=True):
                first = _earlier(first, self._take_steps(pair, base + at, entries[at:until], limit))
                try:
                    first = _earlier(first, self._take_facts(pair, found, limit))
                except f.Unreadable:
                    self.unreadable.append((pair.values.name, begin))
                at = until
            first = _earlier(first, self._take_steps(pair, base + at, entries[at:], limit))
            sets, which = np.unique(entries["keys"], return_inverse=True)
            self._table["keys"][new] = np.array([self._sets[pair.sets.get(each, ())] for each in sets.tolist()], np.uint32)[which]
            own = {pair.ids[key]: begin for key, begin in columns.items() if key in pair.ids}
            pair.columns.append((new, record.end, own))
            pair.values.offset = record.end
        return first

    def _take_facts(self, pair: Pair, record: Mapping[str, Any], limit: float) -> int | None:
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
            if not isinstance(keys, list) or len(self.keys) + len(keys) > _MOST_KEYS:
                raise f.Unreadable
            pair.ids.update(
                (number, self.keys.setdefault(Key(*each), len(self.keys)))
                for number, each in enumerate(keys, first)
                if _is_key(each)
            )
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
                pair.sets[number] = own = tuple([pair.ids.get(each, _UNKNOWN) for each in places])
                self._sets.setdefault(own, len(self._sets))
            return None
        if what == "rewind" and type(step := record.get("step")) is int:
            return self._cut(pair, step) if limit == _NEVER else None
        if not is_sound:
            raise f.Unreadable
        return -1

    def _take_steps(self, pair: Pair, frame: int, entries: np.ndarray, limit: float) -> int | None:
        """Several records of steps, the first of which is ``frame``."""
        if not len(entries):
            return None
        steps, flags, is_late = entries["step"], entries["flags"], entries["flags"] & f.AMENDS > 0
        first, last = int(steps[0]), self.steps[-1] if self.steps else -1
        is_in_order = bool((np.sign(np.diff(steps)) == ~is_late[1:]).all()) and not (is_late[0] or (flags & f.BACKFILLS).any())
        if limit == _NEVER and first > last and is_in_order:  # each a new step, or adds to the one before it: all at once
            new = steps[~is_late].tolist()
            self.steps += new
            self._last.update(zip(new, (np.flatnonzero(np.append(~is_late[1:], True)) + frame).tolist(), strict=True))
            self._table["before"][frame : frame + len(steps)][is_late] = np.flatnonzero(is_late) + frame - 1
            pair.begins = min(pair.begins, first)
            return first
        touched: int | None = None
        for number, (step, flag) in enumerate(zip(steps.tolist(), flags.tolist(), strict=True), frame):
            touched = _earlier(touched, self._take_step(pair, number, step, flag, limit))
        return touched

    def _take_step(self, pair: Pair, frame: int, step: int, flags: int, limit: float) -> int | None:
        known = self._last.get(step)
        if flags & f.AMENDS:
            if known is None or self._table["pair"][known] != pair.place:
                return None
            self._table["before"][frame], self._last[step] = known, frame
            return step
        if step >= limit:  # of a writer that had been replaced
            return None
        if limit == _NEVER and not flags & f.BACKFILLS:
            pair.begins = min(pair.begins, step)
            if self.steps and step <= self.steps[-1]:
                self._cut(pair, step)
            self.steps.append(step)
        elif known is None:
            self.steps.insert(bisect_left(self.steps, step), step)
        self._last[step] = frame
        return step

    def _cut(self, pair: Pair, step: int) -> int:
        """Drop the steps from ``step`` on; returns ``step``."""
        pair.begins = min(pair.begins, step)
        cut = bisect_left(self.steps, step)
        for each in self.steps[cut:]:
            del self._last[each]
        if cut < len(self.steps):
            self.begins = [begin for begin in self.begins if begin < step] + [step]
            del self.steps[cut:]
        return step

    # --- what is there --------------------------------------------------------------------------------------------------------------

    @property
    def damage(self) -> list[tuple[str, Damage]]:
        return [(pair.values.name, each) for pair in self._pairs for each in pair.values.damage]

    def _frames_of(self, step: int) -> list[int]:
        found, before = [self._last[step]], self._table["before"]
        while (frame := before.item(found[-1])) >= 0:
            found.append(frame)
        return found[::-1]

    def __contains__(self, step: int) -> bool:
        return step in self._last

    def times(self, steps: Sequence[int]) -> list[float]:
        """When steps ended, in seconds since the epoch."""
        frames = np.fromiter(map(self._last.__getitem__, steps), np.int64, len(steps))
        while (is_late := (before := self._table["before"][frames]) >= 0).any():
            frames[is_late] = before[is_late]
        found: list[float] = self._table["time"][frames].tolist()
        return found

    def _in_order(self, among: Iterable[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The frames of steps, by default of all, and the step of each, ascending."""
        if self._ordered is None:
            before, steps = self._table["before"], np.array(self.steps, np.int64)
            frames = np.fromiter(map(self._last.__getitem__, self.steps), np.int64, len(self.steps))
            parts = [(frames, steps)]
            while len(frames):
                frames = before[frames]
                frames, steps = frames[frames >= 0], steps[frames >= 0]
                parts.append((frames, steps))
            frames, steps = map(np.concatenate, zip(*reversed(parts), strict=True))
            order = np.argsort(steps, kind="stable")
            self._ordered = frames[order], steps[order]
        frames, steps = self._ordered
        chosen = slice(None) if among is None else np.isin(steps, np.array(list(among), np.int64))
        return frames[chosen], steps[chosen]

    def with_events(self) -> list[int]:
        frames, steps = self._in_order()
        found: list[int] = np.unique(steps[self._table["flags"][frames] & f.HAS_EVENTS > 0]).tolist()
        return found

    def stored_keys(self, among: Iterable[int] | None = None) -> list[Key]:
        """The keys that any step, or any of some, has a stored value of, in the order of their first one."""
        used, members = np.unique(self._table["keys"][self._in_order(among)[0]]).tolist(), list(self._sets)
        there = {number for each in used for number in members[each]}
        return [key for key, number in self.keys.items() if number in there]

    def layouts(self, among: Iterable[int] | None = None) -> list[TableLayout]:
        """The layouts of the steps, or of some, in the order of their first use."""
        firsts = self._of_sets(among)[0]
        places = dict.fromkeys((int(self._table["pair"][frame]), place) for frame in firsts for place in self._places(frame))
        found = []
        for pair, place in places:
            try:
                found.append(self._pairs[pair].layout(place))
            except (f.Unreadable, OSError):
                self.unreadable.append((self._pairs[pair].values.name, place))
        return [layout for layout in found if isinstance(layout, TableLayout)]

    def steps_with(self, source: str) -> list[int]:
        """The steps that have rows of a source, ascending, and those of which that is unknown."""
        frames, which = self._of_sets()
        has = np.array([self._may_have(frame, source) for frame in frames], bool)
        steps: list[int] = np.unique(self._in_order()[1][has[which]]).tolist()
        return steps

    def _may_have(self, frame: int, source: str) -> bool:
        pair, places = self._pair_of(frame), self._places(frame)
        try:
            found = [pair.layout(place) for place in places]
        except (f.Unreadable, OSError):
            return True
        is_unknown = not places and self._table["end"][frame] > 0
        return is_unknown or any(isinstance(layout, TableLayout) and layout.source == source for layout in found)

    def _of_sets(self, among: Iterable[int] | None = None) -> tuple[list[int], np.ndarray]:
        """The first frame with each set of layouts, in the order of the steps, and for each frame which of these has its set."""
        frames = self._in_order(among)[0]
        sets = self._table["pair"][frames].astype(np.int64) << 32 | self._table["layouts"][frames]
        _, firsts, which = np.unique(sets, return_index=True, return_inverse=True)
        order = np.argsort(firsts)
        return frames[firsts[order]].tolist(), np.argsort(order)[which]

    def _places(self, frame: int) -> Sequence[int]:
        """Where the layouts of a step are defined, which its rows know too."""
        pair, number = self._pair_of(frame), self._table["layouts"].item(frame)
        if number not in pair.layouts:
            with contextlib.suppress(f.Unreadable, OSError):
                pair.layouts[number] = tuple(place for place, _, _ in f.tables_of(pair.rows.at(*self._rows_of(frame)) or b""))
        return pair.layouts.get(number, ())

    def read(self, step: int) -> StoredStep:
        told: f.StepFrame | None = None
        values: dict[int, float] = {}
        for number in self._frames_of(step):
            pair = self._pair_of(number)
            try:
                frame = f.frame_of(self._record(number))
                if frame.step != step:
                    raise f.Unreadable
            except f.Unreadable:  # it was there when the index was made
                self._miss(number)
                continue
            told = frame if told is None or frame.context else told
            values.update(zip(pair.sets.get(frame.keys, ()), frame.values.tolist(), strict=False))
        values.pop(_UNKNOWN, None)
        if told is None:
            return StoredStep(step, self.times([step])[0], True, b"", b"", values)
        return StoredStep(step, told.time, bool(told.flags & f.APPLIED), told.context, told.events, values)

    def rows(self, step: int, wanted: str | None = None) -> dict[str, tuple[TableLayout, bytes]]:
        """The packed rows of a step by source, and by ``"rng:<device>"`` states of random generators; of one source alone if it is given.

        Rows that another source stores come with its layout.
        """
        parts: dict[str, tuple[TableLayout, int, bytes]] = {}
        found: dict[str, tuple[TableLayout, bytes]] = {}
        for frame in self._frames_of(step):
            pair, (begin, end) = self._pair_of(frame), self._rows_of(frame)
            try:
                for place, absent, data in f.tables_of(pair.rows.at(begin, end) or b"", step) if end else ():
                    layout = pair.layout(place)
                    if isinstance(layout, str):
                        found[f"{RNG}{layout}"] = NO_LAYOUT, data
                    elif layout.has_size(absent, data):
                        parts[layout.source] = layout, absent, data
                    else:
                        raise f.Unreadable
            except (f.Unreadable, OSError):
                self.unreadable.append((f.name_of(pair.number, f.ROWS), begin))
        for source in parts if wanted is None else parts.keys() & {wanted}:
            names, same_as = parts[source][0].names, parts[source][0].same_as
            if (same_as or source) in parts and not parts[same_as or source][0].same_as:
                layout, absent, data = parts[same_as or source]
                found[source] = layout.part(layout.dense(absent, data), names)
        return found

    def values(self, key: Key) -> dict[int, float]:
        number = self.keys.get(key)
        if number is None:
            return {}
        places = np.array([members.index(number) if number in members else -1 for members in self._sets], np.int64)
        has = (places >= 0)[sets := self._table["keys"][: self._size]]
        values, is_known = np.full(self._size, np.nan), np.zeros(self._size, bool)
        for pair in self._pairs:  # first what indices know
            own = next((own for own, each in pair.ids.items() if each == number), None)
            for part, end, columns in pair.columns:
                if number in columns and own is not None:
                    with contextlib.suppress(f.Unreadable):
                        record = _up_to(end, pair.values.record(columns[number]))
                        values[part][has[part]] = f.column_of(record, own, int(has[part].sum()))
                        is_known[part] = has[part]
        frames, steps = (each[has[self._in_order()[0]]] for each in self._in_order())
        for frame in frames[~is_known[frames]].tolist():
            try:
                values[frame] = f.frame_of(self._record(frame)).values[places[sets[frame]]]
                is_known[frame] = True
            except (f.Unreadable, IndexError):
                self._miss(frame)
        there = is_known[frames]
        return dict(zip(steps[there].tolist(), values[frames[there]].tolist(), strict=True))  # of a step the last one

    def _miss(self, frame: int) -> None:
        self.unreadable.append((self._pair_of(frame).values.name, self._table["begin"].item(frame)))

    def _pair_of(self, frame: int) -> Pair:
        place: int = self._table["pair"].item(frame)
        return self._pairs[place]

    def _rows_of(self, frame: int) -> tuple[int, int]:
        return self._table["rows"].item(frame), self._table["end"].item(frame)

    def _record(self, frame: int) -> bytes:
        """The record of a frame; empty if there is none that ends before the next frame begins."""
        pair = self._pair_of(frame)
        is_followed = frame + 1 < self._size and self._table["pair"].item(frame + 1) == pair.place
        end = self._table["begin"].item(frame + 1) if is_followed else pair.values.size
        return _up_to(end, pair.values.record(self._table["begin"].item(frame)))

    def close(self) -> None:
        for pair in self._pairs:
            pair.close()


def _up_to(end: int, record: Record | None) -> bytes:
    """The data of a record that ends there or before: one could begin within another, and have most of its bytes."""
    return record.data if record is not None and record.end <= end else b""


def open_run(path: str | os.PathLike[str]) -> RunIndex:
    """The steps of the run in ``path``, a run directory or one of its files. Nothing is ever written there.

    Raises FileNotFoundError if there is no run in it, ValueError if it cannot be read.
    """
    directory = f.directory_of(path)
    try:
        return RunIndex(directory)
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


def _earlier(first: int | None, other: int | None) -> int | None:
    """The earlier of two first steps; -1 stands for none, None for nothing at all."""
    if first is None or other is None:
        return first if other is None else other
    return max(first, other) if min(first, other) < 0 else min(first, other)


#: Where there is none.
NO_LAYOUT = TableLayout("", (), frozenset(), (), "")

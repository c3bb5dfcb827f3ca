"""Which steps a run directory has, kept up to date by reading only what is new."""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..core.keys import Key
from ..core.records import SpikeEvent
from . import format as f
from .forms import context_of, facts_of, is_event
from .log import SETTLED, Damage, LogReader, Record, reading_within
from .packing import TableLayout, layout_of

_NEVER = float("inf")
#: Seconds after the last write from which the records before an index can be asked for, since they were written back with it.
_SOON = 60.0
#: The last index is looked for in so many blocks at the end of a file.
_LOOKED_THROUGH = 64
#: So many later writers of a run are looked at, each for so many seconds a look.
_SUCCESSORS, _LOOK_SECONDS = 16, 0.02
#: A run has no more keys.
_MOST_KEYS = 1 << 20
#: Stands for keys whose names are damaged.
_UNKNOWN = -1
#: What the state of a random generator is named by among rows.
RNG = "rng:"
_EVENT = frozenset(field.name for field in fields(SpikeEvent))
_REQUIRED = frozenset(field.name for field in fields(SpikeEvent) if field.default is MISSING)


class Pair:
    """A pair of files, of one writer.

    Attributes:
        number: in the order of the writers.
        begins: the first step that it replaces or adds; infinite before its first one.
    """

    def __init__(self, directory: Path, number: int) -> None:
        self.number, self._directory = number, directory
        self.values = LogReader(directory / f.name_of(number, f.VALUES), f.time_of)
        self.place = 0  # among the pairs of the run
        self.facts: dict[str, Any] = {}
        self.has_head = self.has_claimed = False
        self.begins = _NEVER
        self.rows_end = 0  # of the last step that has any
        self.ids: dict[int, int] = {}  # of the run, by those of the file
        self.layouts: dict[int, tuple[int, ...]] = {0: ()}  # where each set of them is defined
        self.columns: list[tuple[range, int, dict[int, int]]] = []  # of each index: frames, end, where keys are
        self._rows: LogReader | None = None
        self._known: dict[int, TableLayout | str | None] = {}  # None where a record is none, which each step would ask for again

    @property
    def rows(self) -> LogReader:
        """The file with rows. Raises OSError where it is missing."""
        if self._rows is None:
            self._rows = LogReader(self._directory / f.name_of(self.number, f.ROWS))
        return self._rows

    def layout(self, place: int) -> TableLayout | str:
        """What is defined at this place of the file with rows: a layout, or the device of a random state.

        Raises:
            Unreadable: nothing.
        """
        if place not in self._known:
            record = self.rows.at(place)
            if record is None and self.rows.age <= SETTLED:
                raise f.Unreadable(f"the definition of rows at {place} is damaged")
            self._known[place] = None if record is None else _defined(record)
        found = self._known[place]
        if found is None:
            raise f.Unreadable(f"the record at {place} defines no rows")
        return found

    def close(self) -> None:
        """Close the files."""
        self.values.close()
        if self._rows is not None:
            self._rows.close()


def _defined(record: bytes) -> TableLayout | str | None:
    try:
        facts = f.json_of(record)
        return facts["device"] if facts.get("is") == "rng" and type(facts.get("device")) is str else layout_of(facts)
    except f.Unreadable:
        return None


@dataclass
class StoredStep:
    """All that is stored of a step but its rows; ``values`` by the numbers of their keys."""

    step: int
    time: float
    applied: bool
    context: bytes = b"{}"
    events: bytes = b"[]"
    values: dict[int, float] = field(default_factory=dict)

    def parsed_context(self) -> dict[str, Any]:
        """Learning rates, loss scale and tags."""
        found = _parsed(self.context)
        return context_of(found) if isinstance(found, dict) else {}

    def facts(self) -> dict[str, Any]:
        """The same with the time, and whether the step was applied."""
        return {"time": self.time, "applied": self.applied, **self.parsed_context()}

    def spikes(self) -> tuple[SpikeEvent, ...]:
        """The spikes. Fields that only a later version knows are ignored."""
        found = _parsed(self.events)
        events = (
            [{name: value for name, value in event.items() if name in _EVENT} for event in found if is_event(event)]
            if isinstance(found, list)
            else []
        )
        return tuple(SpikeEvent(**event) for event in events if event.keys() >= _REQUIRED)


def _parsed(text: bytes) -> Any:
    try:
        return f.parsed(text or b"null")
    except f.Unreadable:
        return None


class RunIndex:
    """The steps of a run, in the files of its writers. Steps of a writer replace those of earlier ones from its own first step on.

    Args:
        directory: of the run.

    Attributes:
        meta: facts about the run.
        steps: ascending.
        begins: the first steps of parts that follow a resumption or a rollback.
        keys: of all values, by their numbers.
        unreadable: records that are of no known form: file and place.

    Raises:
        FileNotFoundError: there is no run in it.
        OSError, ValueError: it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._why = ""  # a pair could not be read
        self._uses_indices = True
        self._changed: int | None = None  # since the last look that was no error, as of :meth:`_earlier`
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pairs: list[Pair] = []
        self.meta: dict[str, Any] = {}
        self.steps: list[int] = []
        self.begins: list[int] = []
        self.keys: dict[Key, int] = {}
        self.unreadable: list[tuple[str, int]] = []
        self._last: dict[int, int] = {}  # the frame of each step, or the last one that amends it
        self._before = array("q")  # of each frame the one of its step that it amends; -1 of one that begins a step
        # of each frame: its pair, where it begins, its time, set of keys, set of layouts, and whether it has events
        self._pair, self._begin, self._time = array("I"), array("Q"), array("d")
        self._set, self._layouts, self._flags = array("I"), array("I"), array("B")
        self._rows, self._rows_end = array("Q"), array("Q")
        self._ordered: tuple[np.ndarray, np.ndarray] | None = None
        self._sets: dict[tuple[int, bytes], int] = {}
        self._members: list[tuple[int, ...]] = []  # numbers of the keys of a set
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
        """Read what was written since the last look.

        Returns:
            The first step that may be new or changed; None if nothing was written.
        """
        try:
            self._take_new()
        except f.Unreadable:  # an index is not of its file
            self.close()
            self._uses_indices = False
            self._begin_anew()
            return self.steps[0] if self.steps else None
        changed, self._changed = self._changed, None
        if changed is None:
            return None
        self._ordered = None
        self.meta = self._facts()
        return changed if changed >= 0 else self.steps[-1] if self.steps else None

    def _take_new(self) -> None:
        for pair in self._pairs:
            self._take_from(pair)
        with contextlib.suppress(FileNotFoundError):
            while (begun := self._open(self._pairs[-1].number + 1)) is not None:
                self._take_from(begun)

    def _facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for pair in [pair for pair in self._pairs if pair.has_claimed] or self._pairs[-1:]:
            found.update(pair.facts)
        return found

    def _take_from(self, pair: Pair) -> None:
        limit = min((each.begins for each in self._pairs[pair.place + 1 :]), default=_NEVER)
        if not pair.values.offset:
            self._changed = _earlier(self._changed, self._take_indexed(pair, limit))
        available = -1.0
        for record in pair.values.follow():
            kind = record.data[:1]
            try:
                if kind == f.STEP:
                    head = f.head_of(record.data)
                    if head.rows[1] and not pair.rows_end <= head.rows[0] < head.rows[1]:
                        raise f.Unreadable  # the rows of another step
                    if head.rows[1] > available:
                        available = self._rows_there(pair)
                        if head.rows[1] > available:
                            pair.values.offset = record.begin  # it is there with its rows
                            break
                    pair.rows_end = max(pair.rows_end, head.rows[1])
                    self._add_frame(pair, record.begin, head, self._set_of(pair, f.ids_of(record.data, head)))
                    touched = self._take_step(pair, len(self._begin) - 1, head.step, head.flags, limit)
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

    def _take_indexed(self, pair: Pair, limit: float) -> int | None:
        """Read what indices know of a file, instead of the file; nothing where these records may still be on their way."""
        first: int | None = None
        for end, index in reversed(self._indices(pair) if self._uses_indices else []):
            entries = index.entries
            if not len(entries) or not self._are_there(pair, entries):
                break
            has_rows = entries[entries["end"] > 0]
            if len(has_rows) and has_rows["rows"][0] < pair.rows_end:
                raise f.Unreadable
            pair.rows_end = max(pair.rows_end, int(entries["end"].max()))
            is_json = np.flatnonzero(entries["flags"] & f.IS_JSON).tolist()
            begins = [*entries["begin"].tolist(), end]
            facts = [f.json_of(_up_to(begins[place + 1], pair.values.record(begins[place]))) for place in is_json]
            base = len(self._begin)
            for name, column in (
                ("begin", self._begin),
                ("time", self._time),
                ("layouts", self._layouts),
                ("rows", self._rows),
                ("end", self._rows_end),
                ("flags", self._flags),
            ):
                column.frombytes(np.ascontiguousarray(entries[name]).tobytes())
            self._pair.extend([pair.place] * len(entries))
            self._before.extend([-1] * len(entries))
            at = 0
            for place, record in zip([*is_json, len(entries)], [*facts, None], strict=True):
                first = _earlier(first, self._take_steps(pair, base + at, entries[at:place], limit))
                if record is not None:
                    first = _earlier(first, self._take_facts(pair, record, limit))
                at = place + 1
            if not (pair.ids.keys() >= index.columns.keys() and pair.layouts.keys() >= set(entries["layouts"].tolist())):
                raise f.Unreadable
            sets = np.array([self._set_of(pair, ids) for ids in index.sets], "<u4")
            self._set.frombytes(sets[entries["keys"]].tobytes())
            frames = range(base, base + len(entries))
            pair.columns.append((frames, end, {pair.ids[key]: begin for key, begin in index.columns.items()}))
            pair.values.offset = end
        return first

    @staticmethod
    def _indices(pair: Pair) -> list[tuple[int, f.Index]]:
        """The indices of a file and where they end, the last one first."""
        last = pair.values.found_backwards(f.INDEX, _LOOKED_THROUGH)
        found = [] if last is None else [(last.end, f.index_of(last.data, last.begin))]
        until = 0 if last is None else last.begin
        while found and (before := found[-1][1].before)[1]:
            data = pair.values.at(*before)
            if data is None or before[1] > until:
                raise f.Unreadable
            found.append((before[1], f.index_of(data, before[0])))
            until = before[0]
        return found

    def _are_there(self, pair: Pair, entries: np.ndarray) -> bool:
        """Whether what an index knows can be read too, and is not on its way."""
        if pair.values.age <= _SOON and time.time() - float(entries["time"].max()) <= SETTLED:
            return False
        return bool(entries["end"].max() <= self._rows_there(pair))

    @staticmethod
    def _rows_there(pair: Pair) -> float:
        try:
            return _NEVER if pair.values.age > SETTLED else pair.rows.size
        except OSError:
            return 0

    def _take_facts(self, pair: Pair, record: Mapping[str, Any], limit: float) -> int | None:
        what = record.get("is")
        is_sound = True
        if isinstance(facts := record.get("facts"), dict):
            sound = facts_of(facts)
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
        if what == "layouts":
            number, places = _natural(record.get("number")), record.get("at")
            if not isinstance(places, list):
                raise f.Unreadable
            pair.layouts[number] = tuple(map(_natural, places))
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
            frames = range(frame, frame + len(steps))
            self.steps += steps[~is_late].tolist()
            self._last.update(zip(steps.tolist(), frames, strict=True))
            self._before[frame : frame + len(steps)] = array("q", np.where(is_late, np.array(frames) - 1, -1).tobytes())
            pair.begins = min(pair.begins, first)
            return first
        touched: int | None = None
        for number, (step, flag) in enumerate(zip(steps.tolist(), flags.tolist(), strict=True), frame):
            touched = _earlier(touched, self._take_step(pair, number, step, flag, limit))
        return touched

    def _take_step(self, pair: Pair, frame: int, step: int, flags: int, limit: float) -> int | None:
        known = self._last.get(step)
        if flags & f.AMENDS:
            if known is None or self._pair[known] != pair.place:
                return None
            self._before[frame], self._last[step] = known, frame
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

    def _add_frame(self, pair: Pair, begin: int, head: f.StepHead, members: int) -> None:
        self._pair.append(pair.place)
        self._before.append(-1)
        self._begin.append(begin)
        self._time.append(head.time)
        self._set.append(members)
        self._layouts.append(head.layouts)
        self._rows.append(head.rows[0])
        self._rows_end.append(head.rows[1])
        self._flags.append(head.flags)

    def _set_of(self, pair: Pair, ids: bytes) -> int:
        found = self._sets.get((pair.number, ids))
        if found is None:
            found = self._sets[pair.number, ids] = len(self._members)
            self._members.append(tuple(pair.ids.get(each, _UNKNOWN) for each in np.frombuffer(ids, "<u4").tolist()))
        return found

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
        """The damaged parts of the files with values, by their names."""
        return [(pair.values.name, each) for pair in self._pairs for each in pair.values.damage]

    def _frames_of(self, step: int) -> list[int]:
        found = [self._last[step]]
        while (before := self._before[found[-1]]) >= 0:
            found.append(before)
        return found[::-1]

    def __contains__(self, step: int) -> bool:
        return step in self._last

    def time(self, step: int) -> float:
        """When a step ended, in seconds since the epoch."""
        return self._time[self._frames_of(step)[0]]

    def _in_order(self, among: Iterable[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The frames of steps, by default of all, and the step of each, ascending."""
        if self._ordered is None:
            before, steps = np.array(self._before, np.int64), np.array(self.steps, np.int64)
            frames = np.array([*map(self._last.__getitem__, self.steps)], np.int64)
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
        """The steps with spikes."""
        frames, steps = self._in_order()
        found: list[int] = np.unique(steps[np.array(self._flags)[frames] & f.HAS_EVENTS > 0]).tolist()
        return found

    def stored_keys(self, among: Iterable[int] | None = None) -> list[Key]:
        """The keys that any step, or any of some, has a stored value of, in the order of their first one."""
        members = np.unique(np.array(self._set)[self._in_order(among)[0]]).tolist()
        there = {number for each in members for number in self._members[each]}
        return [key for key, number in self.keys.items() if number in there]

    def layouts(self, among: Iterable[int] | None = None) -> list[TableLayout]:
        """The layouts of the steps, or of some, in the order of their first use."""
        firsts = self._of_sets(among)[0]
        places = dict.fromkeys((self._pair[frame], place) for frame in firsts for place in self._places(frame))
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
        pair, places = self._pairs[self._pair[frame]], self._places(frame)
        try:
            found = [pair.layout(place) for place in places]
        except (f.Unreadable, OSError):
            return True
        is_unknown = not places and self._rows_end[frame] > 0
        return is_unknown or any(isinstance(layout, TableLayout) and layout.source == source for layout in found)

    def _of_sets(self, among: Iterable[int] | None = None) -> tuple[list[int], np.ndarray]:
        """The first frame with each set of layouts, in the order of the steps, and for each frame which of them has its set."""
        frames = self._in_order(among)[0]
        sets = np.array(self._pair, np.int64)[frames] << 32 | np.array(self._layouts)[frames]
        _, firsts, which = np.unique(sets, return_index=True, return_inverse=True)
        order = np.argsort(firsts)
        return frames[firsts[order]].tolist(), np.argsort(order)[which]

    def _places(self, frame: int) -> Sequence[int]:
        """Where the layouts of a step are defined, which its rows know too."""
        pair, number = self._pairs[self._pair[frame]], self._layouts[frame]
        if number not in pair.layouts:
            with contextlib.suppress(f.Unreadable, OSError):
                record = pair.rows.at(self._rows[frame], self._rows_end[frame]) or b""
                pair.layouts[number] = tuple(each for each, _ in f.tables_of(record))
        return pair.layouts.get(number, ())

    def read(self, step: int) -> StoredStep:
        """A step without its rows."""
        found: StoredStep | None = None
        for pair, frame in self._frames(step):
            if found is None:
                found = StoredStep(step, frame.time, bool(frame.flags & f.APPLIED))
            if frame.context:
                found.time, found.applied, found.context, found.events = (
                    frame.time,
                    bool(frame.flags & f.APPLIED),
                    frame.context,
                    frame.events,
                )
            keys = [pair.ids.get(each, _UNKNOWN) for each in frame.ids.tolist()]
            found.values.update(zip(keys, frame.values.tolist(), strict=True))
            found.values.pop(_UNKNOWN, None)
        return found if found is not None else StoredStep(step, self.time(step), True)

    def rows(self, step: int) -> dict[str, tuple[TableLayout, bytes]]:
        """The packed rows of a step by source, and by ``"rng:<device>"`` the states of random generators."""
        found: dict[str, tuple[TableLayout, bytes]] = {}
        for frame in self._frames_of(step):
            pair, begin, end = self._pairs[self._pair[frame]], self._rows[frame], self._rows_end[frame]
            if not end:
                continue
            try:
                parts = [(pair.layout(place), data) for place, data in f.tables_of(pair.rows.at(begin, end) or b"", step)]
                if not all(isinstance(layout, str) or len(data) == layout.size for layout, data in parts):
                    raise f.Unreadable
            except (f.Unreadable, OSError):
                self.unreadable.append((f.name_of(pair.number, f.ROWS), begin))
                continue
            for layout, data in parts:
                if isinstance(layout, str):
                    found[f"{RNG}{layout}"] = (_NO_LAYOUT, data)
                else:
                    found[layout.source] = (layout, data)
        for source, (layout, _) in list(found.items()):
            if layout.same_as and (layout.same_as not in found or found[layout.same_as][0].same_as):
                del found[source]
        return found

    def values(self, key: Key) -> dict[int, float]:
        """The stored value of a key by step."""
        number = self.keys.get(key)
        if number is None:
            return {}
        frames, steps = self._in_order()
        place_in = np.array([members.index(number) if number in members else -1 for members in self._members], np.int64)
        place_in = place_in[np.array(self._set)[frames]]
        frames, steps, place_in = (each[place_in >= 0] for each in (frames, steps, place_in))
        values, is_known = self._indexed_values(number)
        found, there = values[frames], is_known[frames]
        for at in np.flatnonzero(~there).tolist():
            frame = int(frames[at])
            pair = self._pairs[self._pair[frame]]
            try:
                found[at] = f.value_at(self._record(frame), int(place_in[at]))
                there[at] = True
            except f.Unreadable:
                self.unreadable.append((pair.values.name, self._begin[frame]))
        return dict(zip(steps[there].tolist(), found[there].tolist(), strict=True))  # of a step the last one

    def _indexed_values(self, key: int) -> tuple[np.ndarray, np.ndarray]:
        """By frame, the value of a key, and whether an index knows it."""
        found, is_known = np.full(len(self._begin), np.nan), np.zeros(len(self._begin), bool)
        for pair in self._pairs:
            own = next((own for own, number in pair.ids.items() if number == key), None)
            for frames, end, columns in pair.columns:
                if key in columns and own is not None:
                    with contextlib.suppress(f.Unreadable):
                        record = _up_to(end, pair.values.record(columns[key]))
                        places, values = f.column_of(record, own, len(frames))
                        known = places.astype(np.int64) + frames.start
                        found[known], is_known[known] = values, True
        return found, is_known

    def _frames(self, step: int) -> Iterator[tuple[Pair, f.StepFrame]]:
        for number in self._frames_of(step):
            pair = self._pairs[self._pair[number]]
            try:
                frame = f.frame_of(self._record(number))
                if frame.step != step:
                    raise f.Unreadable
            except f.Unreadable:  # it was there when the index was made
                self.unreadable.append((pair.values.name, self._begin[number]))
                continue
            yield pair, frame

    def _record(self, frame: int) -> bytes:
        """The record of a frame; empty if there is none that ends before the next frame begins."""
        pair = self._pairs[self._pair[frame]]
        is_followed = self._pair[frame + 1 : frame + 2].tolist() == [pair.place]
        return _up_to(self._begin[frame + 1] if is_followed else pair.values.size, pair.values.record(self._begin[frame]))

    def close(self) -> None:
        """Close the files."""
        for pair in self._pairs:
            pair.close()


def _up_to(end: int, record: Record | None) -> bytes:
    """The data of a record that ends there or before: one could begin within another, and have most of its bytes."""
    return record.data if record is not None and record.end <= end else b""


def open_run(path: str | os.PathLike[str]) -> RunIndex:
    """The steps of the run in ``path``, a run directory or one of its files. Nothing is ever written there.

    Raises:
        FileNotFoundError: there is no run in it.
        ValueError: it cannot be read.
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


class Successors:
    """Later writers of a run. A look reads what is new of the first of their files, for a limited time: the training waits for it.

    Args:
        directory: of the run.
        number: of the pair of files before theirs.
    """

    def __init__(self, directory: Path, number: int) -> None:
        self._directory, self._number = directory, number
        self._files: list[LogReader | None] = []  # None for a file of something else

    def have_claimed(self) -> bool:
        """Whether one of them has claimed the run."""
        with contextlib.suppress(
            OSError
        ):  # there is none, or it cannot be asked for now, which must not keep the training waiting
            while len(self._files) < _SUCCESSORS:
                self._files.append(self._opened(self._number + 1 + len(self._files)))
        return any(self._has_claimed(place) for place in range(len(self._files)))

    def _opened(self, number: int) -> LogReader | None:
        try:
            return LogReader(self._directory / f.name_of(number, f.VALUES))
        except ValueError:
            return None

    def _has_claimed(self, place: int) -> bool:
        file = self._files[place]
        try:
            with reading_within(_LOOK_SECONDS):
                for record in file.follow() if file is not None else ():
                    kind = record.data[:1]
                    if kind == f.STEP or (kind == f.JSON and f.json_of(record.data).get("claims") is True):
                        return True
        except ValueError:  # it takes too long, or is of something else
            self._files[place] = None
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            if file is not None:
                file.close()


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


_NO_LAYOUT = TableLayout("", (), frozenset(), (), "")

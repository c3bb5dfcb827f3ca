"""Which steps a run directory has, kept up to date by reading only what is new."""

from __future__ import annotations

import contextlib
import json
import os
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..core.keys import Key
from ..core.records import SpikeEvent
from . import format as f
from .log import Damage, LogReader
from .packing import TableLayout, layout_of

#: Seconds after the last write from which rows that are not there are lost, not on their way.
_SETTLED = 600.0
_NEVER = float("inf")
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
        self.values = LogReader(directory / f.name_of(number, f.VALUES))
        self.place = 0  # among the pairs of the run
        self.facts: dict[str, Any] = {}
        self.has_head = self.has_claimed = False
        self.begins = _NEVER
        self.ids: list[int] = []  # of the run, by those of the file
        self.layouts: dict[int, tuple[int, ...]] = {0: ()}  # where each set of them is defined
        self._rows: LogReader | None = None
        self._known: dict[int, TableLayout] = {}

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
        found = self._known.get(place)
        if found is None:
            record = self.rows.at(place)
            if record is None:
                raise f.Unreadable(f"the definition of rows at {place} is damaged")
            facts = f.json_of(record)
            if facts.get("is") == "rng" and isinstance(facts.get("device"), str):
                return str(facts["device"])
            found = self._known[place] = layout_of(facts)
        return found

    def close(self) -> None:
        """Close the files."""
        self.values.close()
        if self._rows is not None:
            self._rows.close()


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
        return found if isinstance(found, dict) else {}

    def facts(self) -> dict[str, Any]:
        """The same with the time, and whether the step was applied."""
        return {"time": self.time, "applied": self.applied, **self.parsed_context()}

    def spikes(self) -> tuple[SpikeEvent, ...]:
        """The spikes. Fields that only a later version knows are ignored."""
        found = _parsed(self.events)
        events = (
            [{name: value for name, value in event.items() if name in _EVENT} for event in found if isinstance(event, dict)]
            if isinstance(found, list)
            else []
        )
        return tuple(SpikeEvent(**event) for event in events if event.keys() >= _REQUIRED)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text or b"null")
    except (ValueError, RecursionError):
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
        self._pairs: list[Pair] = []
        self.meta: dict[str, Any] = {}
        self.steps: list[int] = []
        self.begins: list[int] = []
        self.keys: dict[Key, int] = {}
        self.unreadable: list[tuple[str, int]] = []
        self._frame_of: dict[int, list[int]] = {}  # by step; the first is the step itself, others amend it
        # of each frame: its pair, where it begins, its time, set of keys, set of layouts, and whether it has events
        self._pair, self._begin, self._time = array("I"), array("Q"), array("d")
        self._set, self._layouts, self._flags = array("I"), array("I"), array("B")
        self._sets: dict[tuple[int, bytes], int] = {}
        self._members: list[tuple[int, ...]] = []  # numbers of the keys of a set
        for number in f.pairs_in(directory):
            self._open(number)
        if not self._pairs:
            if self.unreadable:
                raise ValueError(self._why)
            raise FileNotFoundError(f"there is no run in {str(directory)!r}")
        self.look()
        for pair in self._pairs:
            if not pair.has_head and (pair.values.offset or pair.values.begins_otherwise()):
                raise ValueError(
                    f"{str(directory / pair.values.name)!r} is not a run of torch_gradmon: there is no record at byte 0"
                )

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
        changed = [self._take_from(pair) for pair in self._pairs]
        while True:
            try:
                pair = self._open(self._pairs[-1].number + 1)
            except FileNotFoundError:
                break
            if pair is None:
                break
            changed.append(self._take_from(pair))
        if all(first is None for first in changed):
            return None
        self.meta = self._facts()
        return min(
            (first for first in changed if first is not None and first >= 0), default=self.steps[-1] if self.steps else None
        )

    def _facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for pair in [pair for pair in self._pairs if pair.has_claimed] or self._pairs[-1:]:
            found.update(pair.facts)
        return found

    def _take_from(self, pair: Pair) -> int | None:
        """The first step that changed; -1 if only facts did, None if nothing."""
        first: int | None = None
        available = -1.0
        limit = min((each.begins for each in self._pairs[pair.place + 1 :]), default=_NEVER)
        for record in pair.values.follow():
            try:
                if record.data[:1] != f.STEP:
                    touched = self._take_facts(pair, f.json_of(record.data), limit)
                else:
                    head = f.head_of(record.data)
                    if head.rows[1] > available:
                        available = self._rows_there(pair)
                        if head.rows[1] > available:
                            pair.values.offset = record.begin  # it is there with its rows
                            break
                    touched = self._take_step(pair, record.begin, head, f.ids_of(record.data, head), limit)
            except f.Unreadable:
                if not pair.has_head:
                    raise ValueError(f"{str(self._directory / pair.values.name)!r} is not a run of torch_gradmon") from None
                self.unreadable.append((pair.values.name, record.begin))
                continue
            if touched is not None:
                first = touched if first is None or first < 0 else min(first, touched) if touched >= 0 else first
        return first

    @staticmethod
    def _rows_there(pair: Pair) -> float:
        try:
            return _NEVER if time.time() - pair.values.modified > _SETTLED else pair.rows.size
        except OSError:
            return 0

    def _take_facts(self, pair: Pair, record: Mapping[str, Any], limit: float) -> int | None:
        what = record.get("is")
        if isinstance(facts := record.get("facts"), dict):
            pair.facts.update(facts)
        pair.has_claimed |= record.get("claims") is True
        if what == "head":
            if record.get("format") != f.FORMAT:
                raise ValueError(f"{pair.values.name!r} is of format {record.get('format')!r}, which this version does not know")
            pair.has_head = True
        if what == "keys":
            for each in record.get("keys", ()):
                if not (isinstance(each, list) and len(each) == 3 and all(isinstance(part, str) for part in each)):
                    raise f.Unreadable
                pair.ids.append(self.keys.setdefault(Key(*each), len(self.keys)))
            return None
        if what == "layouts":
            places = record.get("at", ())
            if not all(type(place) is int and place >= 0 for place in places):
                raise f.Unreadable
            pair.layouts[len(pair.layouts)] = tuple(places)
            return None
        if what == "rewind" and type(step := record.get("step")) is int:
            return self._cut(pair, step) if limit == _NEVER else None
        return -1

    def _take_step(self, pair: Pair, begin: int, head: f.StepHead, ids: bytes, limit: float) -> int | None:
        step = head.step
        if head.layouts not in pair.layouts:
            raise f.Unreadable
        members = self._set_of(pair, ids)
        known = self._frame_of.get(step)
        if head.flags & f.AMENDS:
            if known is None or self._pair[known[0]] != pair.place:
                return None
            known.append(self._framed(pair, begin, head, members))
            return step
        if step >= limit:  # of a writer that had been replaced
            return None
        if limit == _NEVER and not head.flags & f.BACKFILLS:
            pair.begins = min(pair.begins, step)
            if self.steps and step <= self.steps[-1]:
                self._cut(pair, step)
            self.steps.append(step)
        elif known is None:
            self.steps.insert(bisect_left(self.steps, step), step)
        self._frame_of[step] = [self._framed(pair, begin, head, members)]
        return step

    def _framed(self, pair: Pair, begin: int, head: f.StepHead, members: int) -> int:
        self._pair.append(pair.place)
        self._begin.append(begin)
        self._time.append(head.time)
        self._set.append(members)
        self._layouts.append(head.layouts)
        self._flags.append(head.flags)
        return len(self._begin) - 1

    def _set_of(self, pair: Pair, ids: bytes) -> int:
        found = self._sets.get((pair.number, ids))
        if found is None:
            local = np.frombuffer(ids, "<u4").tolist()
            if local and max(local) >= len(pair.ids):
                raise f.Unreadable
            found = self._sets[pair.number, ids] = len(self._members)
            self._members.append(tuple(pair.ids[each] for each in local))
        return found

    def _cut(self, pair: Pair, step: int) -> int:
        """Drop the steps from ``step`` on; returns ``step``."""
        pair.begins = min(pair.begins, step)
        cut = bisect_left(self.steps, step)
        for each in self.steps[cut:]:
            del self._frame_of[each]
        if cut < len(self.steps):
            self.begins = [begin for begin in self.begins if begin < step] + [step]
            del self.steps[cut:]
        return step

    # --- what is there --------------------------------------------------------------------------------------------------------------

    @property
    def damage(self) -> list[tuple[str, Damage]]:
        """The damaged parts of the files with values, by their names."""
        return [(pair.values.name, each) for pair in self._pairs for each in pair.values.damage]

    @property
    def version(self) -> tuple[int, ...]:
        """Changes with what is read."""
        return tuple(pair.values.offset for pair in self._pairs)

    def __contains__(self, step: int) -> bool:
        return step in self._frame_of

    def time(self, step: int) -> float:
        """When a step ended, in seconds since the epoch."""
        return self._time[self._frame_of[step][0]]

    def with_events(self) -> list[int]:
        """The steps with spikes."""
        flags = self._flags
        return [step for step in self.steps if any(flags[frame] & f.HAS_EVENTS for frame in self._frame_of[step])]

    def stored_keys(self) -> list[Key]:
        """The keys that any step has a stored value of, in the order of their first one."""
        members = {self._set[frame] for frames in self._frame_of.values() for frame in frames}
        there = {number for each in members for number in self._members[each]}
        return [key for key, number in self.keys.items() if number in there]

    def layouts(self) -> list[TableLayout]:
        """The layouts of the steps, in the order of their first use."""
        used = dict.fromkeys((self._pair[frame], self._layouts[frame]) for step in self.steps for frame in self._frame_of[step])
        places = dict.fromkeys((pair, place) for pair, number in used for place in self._pairs[pair].layouts[number])
        found = []
        for pair, place in places:
            try:
                found.append(self._pairs[pair].layout(place))
            except (f.Unreadable, OSError):
                self.unreadable.append((self._pairs[pair].values.name, place))
        return [layout for layout in found if isinstance(layout, TableLayout)]

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
            found.values.update(zip([pair.ids[each] for each in frame.ids.tolist()], frame.values.tolist(), strict=True))
        return found if found is not None else StoredStep(step, self.time(step), True)

    def rows(self, step: int) -> dict[str, tuple[TableLayout, bytes]]:
        """The packed rows of a step by source, and by ``"rng:<device>"`` the states of random generators."""
        found: dict[str, tuple[TableLayout, bytes]] = {}
        for pair, frame in self._frames(step):
            if not frame.rows[1]:
                continue
            try:
                record = pair.rows.at(*frame.rows)
                parts = [] if record is None else [(pair.layout(place), data) for place, data in f.tables_of(record, step)]
            except (f.Unreadable, OSError):
                record = None
            if record is None:
                self.unreadable.append((f.name_of(pair.number, f.ROWS), frame.rows[0]))
                continue
            for layout, data in parts:
                if isinstance(layout, str):
                    found[f"{RNG}{layout}"] = (_NO_LAYOUT, data)
                elif len(data) == (0 if layout.same_as else layout.width * len(layout.names)):
                    found[layout.source] = (layout, data)
                else:
                    self.unreadable.append((f.name_of(pair.number, f.ROWS), frame.rows[0]))
        return found

    def values(self, key: Key) -> dict[int, float]:
        """The stored value of a key by step."""
        number = self.keys.get(key)
        found: dict[int, float] = {}
        if number is None:
            return found
        places = {each: members.index(number) for each, members in enumerate(self._members) if number in members}
        for step in self.steps:
            for frame in self._frame_of[step]:
                place = places.get(self._set[frame])
                if place is not None and (record := self._pairs[self._pair[frame]].values.at(self._begin[frame])) is not None:
                    found[step] = f.value_at(record, place)
        return found

    def _frames(self, step: int) -> Iterator[tuple[Pair, f.StepFrame]]:
        for number in self._frame_of[step]:
            pair = self._pairs[self._pair[number]]
            record = pair.values.at(self._begin[number])
            if record is not None:  # it was there when the index was made
                yield pair, f.frame_of(record)

    def close(self) -> None:
        """Close the files."""
        for pair in self._pairs:
            pair.close()


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
        if (directory / f.OLD_NAME).exists():
            raise ValueError(f"the run in {str(path)!r} is of an older version, which this one does not read") from None
        raise FileNotFoundError(f"there is no run in {str(path)!r}") from None
    except PermissionError as error:
        raise ValueError(f"{str(error.filename or path)!r} could not be read: this user has no permission") from error
    except OSError as error:
        raise ValueError(f"{str(path)!r} could not be read: {error}") from error


def is_claimed_after(directory: Path, number: int) -> bool:
    """Whether a pair of files after this one was begun by a writer that has claimed the run."""
    while True:
        number += 1
        try:
            with contextlib.closing(LogReader(directory / f.name_of(number, f.VALUES))) as file:
                if any(record.data[:1] == f.STEP or f.json_of(record.data).get("claims") is True for record in file.follow()):
                    return True
        except FileNotFoundError:
            return False
        except (OSError, ValueError):  # a file of something else
            continue


_NO_LAYOUT = TableLayout("", (), frozenset(), (), "")

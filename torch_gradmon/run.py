"""Read a run directory, of a run that has ended, still goes on, or was killed."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from . import names as n
from .bulk import Bulk, events_in
from .errors import display, nearest
from .export.methods import ExportMethods
from .names import Key, format_key, parse_key
from .plan import evaluate_view
from .record import Event, StepRecord, Table
from .spikes.signals import value_in
from .spikes.suspects import REMEMBERED, Gradients, Suspect
from .stack import Stack
from .statistics.moments import ALWAYS, VIEWS, Column
from .steps_index import StepsIndex
from .store import noted, open_to_read, unpack
from .window import Window, Windows


def load_run(path: str | os.PathLike[str]) -> Run:
    """Open the run directory ``path`` for reading.

    Raises:
        FileNotFoundError: there is no run in it.
        ValueError: its file is not one of ours.
    """
    return Run(path)


_ROWS = "SELECT segment, step, columns, tensors, counts, same_as, data FROM rows JOIN layouts ON layout = id"


class Run(ExportMethods):
    """A run on disk. Where a run was resumed or rolled back, later segments take the place of the steps that they repeat."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path must be a run directory, got {display(path)}")
        self._db, self.meta = open_to_read(path)
        self.path = Path(path)
        self._tensors: dict[int, str] = {}
        self._index = StepsIndex(self._db)
        self._index.look()
        self._segment_of = self._index.segment_of
        self._bulk = Bulk(self._db, self._index, self._names)
        self._windows = Windows(self._db, self._index, self._names)

    def refresh(self) -> int | None:
        """Look at what was written since the run was opened, or since the last look, at a cost that does not grow with the run.

        Returns:
            The first step that may be new or changed, such as the last one known, which what is logged late amends, or the one that a
            rollback went back to; None where nothing was written.
        """
        first = self._index.look()
        if first is not None:
            self.meta = noted(self._db)
        return first

    @property
    def steps(self) -> list[int]:
        """The steps that were monitored, or recorded around a spike, ascending."""
        return list(self._index.steps)

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The first and the last step of what was written without a break; each begins where the run was taken back to."""
        return [(first, last) for _, first, last in self._index.spans(None, len(self._index.steps))]

    @property
    def sources(self) -> list[str]:
        """The sources that have statistics in some step."""
        there = {source for (source,) in self._db.execute("SELECT DISTINCT source FROM layouts").fetchall()}
        return [source for source in n.TENSOR_SOURCES if source in there]

    def tensors(self, source: str) -> list[str]:
        """The tensors that have statistics of ``source`` in some step, in model order."""
        layouts = self._db.execute("SELECT tensors FROM layouts WHERE source = ? ORDER BY id", (source,)).fetchall()
        # in the order of the layout that has most: a layer that was frozen at first comes in where it belongs
        known = sorted((self._names(tensors) for (tensors,) in layouts), key=lambda names: -len(names))
        return list(dict.fromkeys(name for names in known for name in names))

    @property
    def scalars(self) -> list[Key]:
        """The keys of all values but built-in statistics of tensors: of the whole model, custom metrics, and what was logged by hand."""
        return list(self._windows.keys().values())

    @property
    def events(self) -> list[Event]:
        """What the detectors found, in order."""
        found: list[Event] = []
        for segment, step, text in self._db.execute("SELECT segment, step, events FROM steps WHERE events != '[]' ORDER BY step"):
            if self._segment_of.get(step) == segment:
                found += events_in(text)
        return found

    def context(self, step: int) -> Mapping[str, Any]:
        """Learning rates, loss scale and tags of a step, and whether it was applied.

        Raises:
            KeyError: the step is not in the run.
        """
        time, applied, context = self._db.execute(
            "SELECT time, applied, context FROM steps WHERE segment = ? AND step = ?", self._where(step)
        ).fetchone()
        return {"time": time, "applied": bool(applied), **json.loads(context)}

    def metrics(self, step: int) -> dict[str, float]:
        """All scalars of a step: whole-model values, custom metrics, what was logged by hand.

        Raises:
            KeyError: the step is not in the run.
        """
        rows = self._db.execute(
            "SELECT source, name, metric, value FROM scalars JOIN keys ON key = id WHERE segment = ? AND step = ?",
            self._where(step),
        )
        return {format_key(Key(*key)): float(value) for *key, value in rows}

    def value(self, signal: str, step: int) -> float | None:
        """The value of one key in a step, or of a whole-model value by its name; None where there is none.

        Raises:
            KeyError: the step is not in the run.
        """
        metrics, key = self.metrics(step), parse_key(signal)
        found = metrics.get(signal, metrics.get(f"{n.SUMMARY}/{signal}"))
        return value_in(self.table(key.source, step), key) if found is None and key.source in n.TENSOR_SOURCES else found

    def table(self, source: str, step: int) -> Table | None:
        """The statistics of ``source`` in a step, or None where they were not measured.

        Raises:
            KeyError: the step is not in the run.
        """
        row = self._db.execute(f"{_ROWS} WHERE segment = ? AND step = ? AND source = ?", (*self._where(step), source)).fetchone()
        return None if row is None else self._table(*row)

    def records(self, since: int | None = None, wanted: Callable[[Key], bool] | None = None) -> Iterator[StepRecord]:
        """The steps from ``since`` on, ascending, in one go, without statistics; for these see :meth:`stacks`.

        Args:
            since: leave out earlier steps.
            wanted: says by key which values are read; by default all of them are.
        """
        return self._bulk.records(since, wanted)

    def stacks(self, source: str, since: int | None = None) -> Iterator[Stack]:
        """The statistics of ``source`` in the steps from ``since`` on that have them, ascending, some hundred steps at a time."""
        return self._bulk.stacks(source, since)

    def window(self, steps: Iterable[int]) -> Window:
        """All that is known of some steps, values as matrices; steps that the run does not have are left out."""
        return self._windows.read(steps)

    def rng_state(self, step: int) -> dict[str, torch.Tensor]:
        """The states of torch's random generators at the beginning of a step with a spike, by device: for ``torch.set_rng_state``.

        Raises:
            KeyError: the step is not in the run, or none was kept because it had no spike.
        """
        states = self._states(self._where(step))
        if not states:
            raise KeyError(f"no random state is kept of step {step}: only steps with a spike have one")
        return {device: torch.tensor(list(state), dtype=torch.uint8, device="cpu") for device, state in states}

    def _states(self, where: tuple[int, int]) -> list[tuple[str, bytes]]:
        try:
            return self._db.execute("SELECT device, state FROM rng WHERE segment = ? AND step = ?", where).fetchall()
        except sqlite3.OperationalError:  # a run of before these were kept
            return []

    def suspects(self, step: int) -> list[Suspect]:
        """The parameters of a step in the order of suspicion, see :class:`torch_gradmon.spikes.suspects.Suspect`.

        Raises:
            KeyError: the step is not in the run.
        """
        self._where(step)
        gradients = Gradients()
        for number in [number for number in self.steps if number <= step][-REMEMBERED:]:
            tables = {source: self.table(source, number) for source in (n.GRADIENT_BEFORE_CLIP, n.GRADIENT)}
            gradients.see(number, {source: table for source, table in tables.items() if table is not None})
        return gradients.suspects(step)

    def _table(self, segment: int, step: int, mask: int, tensors: bytes, counts: bytes, same_as: str, data: bytes) -> Table:
        if same_as:
            of = self._db.execute(f"{_ROWS} WHERE segment = ? AND step = ? AND source = ?", (segment, step, same_as)).fetchone()
            whole, kept = self._table(*of), set(self._names(tensors))
            rows = [row for row, name in enumerate(whole.names) if name in kept]
            return Table(tuple(whole.names[row] for row in rows), whole.rows[rows], whole.columns)
        return unpack(data, self._names(tensors), frozenset(c for c in Column if mask >> c & 1), counts)

    def _names(self, tensors: bytes) -> tuple[str, ...]:
        ids = array("I")
        ids.frombytes(tensors)
        if sys.byteorder == "big":
            ids.byteswap()
        if not self._tensors.keys() >= set(ids):
            self._tensors = dict(self._db.execute("SELECT id, name FROM tensors"))
        return tuple(self._tensors[i] for i in ids)

    def series(self, key: str) -> dict[int, float]:
        """Value by step for one key, such as ``gradmon/grad_norm`` or ``gradient_before_clip/h.0.attn.weight/std``.

        Any built-in metric of any tensor whose statistics were stored can be asked for. Steps without the value are left out.

        Raises:
            KeyError: nothing in the run has this key.
        """
        wanted = parse_key(key)
        # a value logged by hand may have a name that looks like one of ours
        found = self._scalars(wanted) or self._scalars(Key("", key, ""))
        if not found and wanted.metric in VIEWS:
            found = self._from_rows(wanted)
        if not found:
            raise KeyError(f"the run has no values for {key!r}{nearest(key, self.keys())}")
        return found

    def _scalars(self, key: Key) -> dict[int, float]:
        rows = self._db.execute(
            "SELECT segment, step, value FROM scalars JOIN keys ON key = id "
            "WHERE source = ? AND name = ? AND metric = ? ORDER BY step",
            key,
        )
        return {step: float(value) for segment, step, value in rows if self._segment_of.get(step) == segment}

    def _from_rows(self, wanted: Key) -> dict[int, float]:
        view, found = VIEWS[wanted.metric], {}
        for row in self._db.execute(f"{_ROWS} WHERE source = ? ORDER BY step", (wanted.source,)).fetchall():
            segment, step = row[:2]
            if self._segment_of.get(step) != segment:
                continue
            table = self._table(*row)
            if wanted.name in table.names and view.columns <= table.columns | ALWAYS:
                position = table.names.index(wanted.name)
                there, value = evaluate_view(view, table.rows[position : position + 1])
                if there[0]:
                    found[step] = value[0]
        return found

    def plot(self, kind: str = "heatmap", engine: str = "plotly", **options: Any) -> Any:
        """A figure of the run; see :meth:`ModuleMonitor.plot <torch_gradmon.ModuleMonitor.plot>`, which draws the same."""
        from .pictures import plot, reel

        return plot.plot(reel.Reel(reel.OfRun(self)), kind, engine, options)

    def keys(self) -> list[str]:
        """Every key that :meth:`series` answers."""
        keys = list(map(format_key, self.scalars))
        for source in n.TENSOR_SOURCES:
            for mask, tensors in self._db.execute("SELECT columns, tensors FROM layouts WHERE source = ?", (source,)).fetchall():
                columns = {c for c in Column if mask >> c & 1} | ALWAYS
                metrics = [metric for metric, view in VIEWS.items() if view.columns <= columns]
                keys += [format_key(Key(source, name, metric)) for name in self._names(tensors) for metric in metrics]
        return list(dict.fromkeys(keys))

    def _where(self, step: int) -> tuple[int, int]:
        if step not in self._segment_of:
            steps = self.steps
            span = f"{steps[0]} to {steps[-1]}" if steps else "none"
            raise KeyError(f"step {step} is not in the run; its {len(steps)} monitored steps are {span}")
        return self._segment_of[step], step

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __repr__(self) -> str:
        steps = self.steps
        span = f"{steps[0]} to {steps[-1]}" if steps else "none"
        return f"Run({len(steps)} steps: {span}, {len(self.events)} events)"

"""Read a run directory, of a run that has ended, still goes on, or was killed."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core import keys as n
from ..core.errors import display, nearest
from ..core.keys import Key, format_key, parse_key
from ..core.model_order import ModelOrder
from ..core.moments import ALWAYS, VIEWS, Column
from ..core.records import SpikeEvent, StatsTable, StepRecord
from ..step.plan import evaluate_view, value_in
from .scan import RunScan, events_in
from .stats_series import StatsSeries
from .step_index import StepIndex
from .window import LAYER_SOURCES, Window, WindowReader, is_of_layer
from .writer import open_to_read, stored_meta, unpack

_ROWS = "SELECT segment, step, columns, tensors, counts, same_as, data FROM rows JOIN layouts ON layout = id"


class RunReader:
    """A run on disk. Where a run was resumed or rolled back, later segments take the place of the steps that they repeat."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path must be a run directory, got {display(path)}")
        self._db, self.meta = open_to_read(path)
        self.path = Path(path)
        self._tensors: dict[int, str] = {}
        self._index = StepIndex(self._db)
        self._index.look()
        self._segment_of = self._index.segment_of
        self._bulk = RunScan(self._db, self._index, self._names)
        self._windows = WindowReader(self._db, self._index, self._names)

    def refresh(self) -> int | None:
        """Look at what was written since the run was opened, or since the last look, at a cost that does not grow with the run.

        Returns:
            The first step that may be new or changed, such as the last one known, which what is logged late amends, or the one that a
            rollback went back to; None where nothing was written.
        """
        first = self._index.look()
        if first is not None:
            self.meta = stored_meta(self._db)
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
        return self.in_model_order(source, self._measured(source))

    def tensors_as_measured(self, source: str) -> list[str]:
        """The same in the order in which they were measured: outputs in the order of the calls."""
        return list(dict.fromkeys(name for names in sorted(self._measured(source), key=len, reverse=True) for name in names))

    def in_model_order(self, source: str, measured: Iterable[Sequence[str]]) -> list[str]:
        """All names in ``measured``, which are of ``source``; see :class:`torch_gradmon.core.model_order.ModelOrder`."""
        return ModelOrder(self.meta.get("parameters", ()), self.meta.get("kinds", ())).sorted(source, measured)

    def _measured(self, source: str) -> list[tuple[str, ...]]:
        """The tensors of each layout of ``source``."""
        layouts = self._db.execute("SELECT tensors FROM layouts WHERE source = ? ORDER BY id", (source,)).fetchall()
        return [self._names(tensors) for (tensors,) in layouts]

    @property
    def scalars(self) -> list[Key]:
        """The keys of all values but built-in statistics of tensors: of the whole model, custom metrics, and what was logged by hand."""
        return list(self._windows.keys().values())

    @property
    def events(self) -> list[SpikeEvent]:
        """What the detectors found, in order."""
        found: list[SpikeEvent] = []
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

    def table(self, source: str, step: int) -> StatsTable | None:
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

    def stacks(self, source: str, since: int | None = None) -> Iterator[StatsSeries]:
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

    def _table(self, segment: int, step: int, mask: int, tensors: bytes, counts: bytes, same_as: str, data: bytes) -> StatsTable:
        if same_as:
            of = self._db.execute(f"{_ROWS} WHERE segment = ? AND step = ? AND source = ?", (segment, step, same_as)).fetchone()
            whole, kept = self._table(*of), set(self._names(tensors))
            rows = [row for row, name in enumerate(whole.names) if name in kept]
            return StatsTable(tuple(whole.names[row] for row in rows), whole.rows[rows], whole.columns)
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
        if wanted.metric in VIEWS:  # what was stored as a value in some steps may follow from statistics in others
            found = dict(sorted({**self._from_rows(wanted, found), **found}.items()))
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

    def _from_rows(self, wanted: Key, known: Container[int]) -> dict[int, float]:
        """From the statistics of the steps that are not ``known``."""
        view, found = VIEWS[wanted.metric], {}
        for row in self._db.execute(f"{_ROWS} WHERE source = ? ORDER BY step", (wanted.source,)).fetchall():
            segment, step = row[:2]
            if step in known or self._segment_of.get(step) != segment:
                continue
            table = self._table(*row)
            if wanted.name in table.names and view.columns <= table.columns | ALWAYS:
                position = table.names.index(wanted.name)
                there, value = evaluate_view(view, table.rows[position : position + 1])
                if there[0]:
                    found[step] = value[0]
        return found

    def keys(self) -> list[str]:
        """Every key that :meth:`series` answers: values of the whole model and what was logged, then tensors in model order."""
        scalars = self.scalars
        keys = [key for key in scalars if not is_of_layer(key)]
        for source in LAYER_SOURCES:
            keys += self._keys_of(source, [key for key in scalars if key.source == source and is_of_layer(key)])
        return list(dict.fromkeys(map(format_key, keys)))

    def _keys_of(self, source: str, own: Sequence[Key]) -> Iterator[Key]:
        """The keys of one source; ``own`` are those of values that are stored as such."""
        metrics: dict[str, dict[str, None]] = {}
        orders = [tuple(key.name for key in own)]
        for mask, tensors in self._db.execute("SELECT columns, tensors FROM layouts WHERE source = ?", (source,)).fetchall():
            columns = {c for c in Column if mask >> c & 1} | ALWAYS
            views = dict.fromkeys(metric for metric, view in VIEWS.items() if view.columns <= columns)
            orders.append(self._names(tensors))
            for name in orders[-1]:
                metrics.setdefault(name, {}).update(views)
        for key in own:
            metrics.setdefault(key.name, {})[key.metric] = None
        return (Key(source, name, metric) for name in self.in_model_order(source, orders) for metric in metrics[name])

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
        return f"{type(self).__name__}({len(steps)} steps: {span}, {len(self.events)} events)"

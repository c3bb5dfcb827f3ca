"""Read a run directory, of a run that has ended, is still running, or was killed."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core import keys as n
from ..core.errors import display
from ..core.keys import Key, format_key, parse_key
from ..core.model_order import ModelOrder
from ..core.records import SpikeEvent, StatsTable, StepRecord
from ..step.view_values import value_in
from .file import open_to_read, stored_meta
from .layouts import Layouts
from .scan import RunScan, events_in
from .series import SeriesReader
from .stats_series import StatsSeries
from .step_index import StepIndex
from .window import Window, WindowReader


class RunReader:
    """A run on disk. If it was resumed or rolled back, later segments replace the steps that they repeat."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path must be a run directory, got {display(path)}")
        self._db, self.meta = open_to_read(path)
        self.path = Path(path)
        self._index = StepIndex(self._db)
        self._index.look()
        self._layouts = Layouts(self._db, self._index)
        self._scan = RunScan(self._db, self._index, self._layouts)
        self._windows = WindowReader(self._db, self._index, self._layouts)
        self._series = SeriesReader(self._db, self._index, self._layouts, self._scan)

    def refresh(self) -> int | None:
        """Read what was written since the last look, at a cost that does not grow with the run.

        Returns:
            The first step that may be new or changed; None if nothing was written. A late value changes the last known step, and a
            rollback all steps from its target on.
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
        """First and last step of each unbroken part; each part begins where the run was rewound to."""
        return [(first, last) for _, first, last in self._index.spans(None, len(self._index.steps))]

    @property
    def sources(self) -> list[str]:
        """The sources with statistics in any step."""
        there = self._layouts.measured()
        return [source for source in n.TENSOR_SOURCES if source in there]

    def tensors(self, source: str) -> list[str]:
        """The tensors with statistics of ``source`` in any step, in model order."""
        return self.in_model_order(source, self._measured(source))

    def tensors_as_measured(self, source: str) -> list[str]:
        """The same in the order of measurement: outputs in the order of the calls."""
        return list(dict.fromkeys(name for names in sorted(self._measured(source), key=len, reverse=True) for name in names))

    def in_model_order(self, source: str, measured: Iterable[Sequence[str]]) -> list[str]:
        """All names in ``measured``, which are of ``source``; see :class:`torch_gradmon.core.model_order.ModelOrder`."""
        return ModelOrder(self.meta.get("parameters", ()), self.meta.get("kinds", ())).sorted(source, measured)

    def _measured(self, source: str) -> list[tuple[str, ...]]:
        return [layout.names for layout in self._layouts.measured().get(source, ())]

    @property
    def scalars(self) -> list[Key]:
        """The keys of all values that are not built-in statistics of tensors: of the whole model, custom metrics, logged values."""
        return self._series.stored_keys()

    @property
    def events(self) -> list[SpikeEvent]:
        """The spikes, in order."""
        found: list[SpikeEvent] = []
        for segment, step, text in self._db.execute("SELECT segment, step, events FROM steps WHERE events != '[]' ORDER BY step"):
            if self._index.segment_of.get(step) == segment:
                found += events_in(text)
        return found

    def context(self, step: int) -> Mapping[str, Any]:
        """Learning rates, loss scale and tags of a step, and whether it was applied.

        Raises:
            KeyError: the step is not in the run.
        """
        facts = self._at(step).facts[step]
        del facts["events"]
        return facts

    def metrics(self, step: int) -> dict[str, float]:
        """All scalars of a step: whole-model values, custom metrics, logged values.

        Raises:
            KeyError: the step is not in the run.
        """
        return {format_key(key): value for key, value in self._at(step).scalars(step).items()}

    def value(self, signal: str, step: int) -> float | None:
        """The value of a key in a step, or of a whole-model value by its name; None if there is none.

        Raises:
            KeyError: the step is not in the run.
        """
        metrics, key = self.metrics(step), parse_key(signal)
        found = metrics.get(signal, metrics.get(f"{n.SUMMARY}/{signal}"))
        return value_in(self.table(key.source, step), key) if found is None and key.source in n.TENSOR_SOURCES else found

    def table(self, source: str, step: int) -> StatsTable | None:
        """The statistics of ``source`` in a step, or None if they were not measured.

        Raises:
            KeyError: the step is not in the run.
        """
        return self._at(step).table(source, step)

    def records(self, since: int | None = None, wanted: Callable[[Key], bool] | None = None) -> Iterator[StepRecord]:
        """The steps from ``since`` on, ascending, without statistics; for these see :meth:`stacks`.

        Args:
            since: leave out earlier steps.
            wanted: which keys to read; by default all.
        """
        return self._scan.records(since, wanted)

    def stacks(self, source: str, since: int | None = None) -> Iterator[StatsSeries]:
        """The statistics of ``source`` in the steps from ``since`` on that have them, ascending, some hundred steps at a time."""
        return self._scan.stacks(source, since)

    def window(self, steps: Iterable[int]) -> Window:
        """All values of some steps, as matrices; steps that the run does not have are left out."""
        return self._windows.read(steps)

    def _check_step(self, step: int) -> None:
        if step not in self._index.segment_of:
            raise KeyError(f"step {step} is not in the run; its {len(self._index.steps)} monitored steps are {self._span()}")

    def _at(self, step: int) -> Window:
        self._check_step(step)
        return self.window([step])

    def rng_state(self, step: int) -> dict[str, torch.Tensor]:
        """The states of torch's random generators at the beginning of a step with a spike, by device, for ``torch.set_rng_state``.

        Raises:
            KeyError: the step is not in the run, or it had no spike, or a spike of NaN or Inf after eight others in a row.
        """
        self._check_step(step)
        where = (self._index.segment_of[step], step)
        try:
            states = self._db.execute("SELECT device, state FROM rng WHERE segment = ? AND step = ?", where).fetchall()
        except sqlite3.OperationalError:  # early files have no such table
            states = []
        if not states:
            raise KeyError(
                f"no random state is kept of step {step}: only steps with a spike have one, of NaN or Inf the first 8 in a row"
            )
        return {device: torch.tensor(list(state), dtype=torch.uint8, device="cpu") for device, state in states}

    def series(self, key: str) -> dict[int, float]:
        """Value by step for one key, such as ``gradmon/grad_norm`` or ``gradient_before_clip/h.0.attn.weight/std``.

        Any built-in metric of a tensor with stored statistics is available. Steps without the value are left out; it may be
        defined in none, as the largest finite element of a tensor that was NaN all along.

        Raises:
            KeyError: it is none of :meth:`keys`.
        """
        return self._series.values(key, self.keys)

    def stored(self, key: Key) -> dict[int, float]:
        """Value by step of one of :attr:`scalars`, in a few milliseconds; empty if there is none."""
        return self._series.stored(key)

    def keys(self) -> list[str]:
        """Every key that :meth:`series` accepts: whole-model and logged values, then tensors in model order."""
        return self._series.keys(self.in_model_order)

    def _span(self) -> str:
        steps = self._index.steps
        return f"{steps[0]} to {steps[-1]}" if steps else "none"

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._index.steps)} steps: {self._span()}, {len(self.events)} events)"

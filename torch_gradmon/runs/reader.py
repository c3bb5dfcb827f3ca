"""Read a run directory, of a run that has ended, is still running, or was killed."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..core import keys as n
from ..core.errors import display, nearest
from ..core.keys import Key, format_key, parse_key
from ..core.moments import ALWAYS, VIEWS
from ..core.records import ModelOrder, SpikeEvent, StatsTable, StepRecord
from ..step.plan import evaluate_view, value_in
from .index import RNG, StoredStep, open_run
from .liveness import RunStatus, status_in
from .packing import TableLayout
from .stats_series import StatsSeries
from .window import LAYER_SOURCES, Window, is_of_layer

#: Rows read at a time, in bytes and in steps.
_AT_ONCE, _STEPS = 4 << 20, 200


class RunReader:
    """A run on disk. If it was resumed or rolled back, later segments replace the steps that they repeat."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path must be a run directory, got {display(path)}")
        self.path = Path(path)
        self._index = open_run(path)

    @property
    def meta(self) -> dict[str, Any]:
        """Facts about the run."""
        return self._index.meta

    @property
    def damage(self) -> list[str]:
        """What could not be read because a file is damaged, each on one line; empty if nothing is."""
        damaged = [f"{name}: bytes {each.begin} to {each.end} are damaged" for name, each in self._index.damage]
        return damaged + [
            f"{name}: the record at byte {place} cannot be read" for name, place in dict.fromkeys(self._index.unreadable)
        ]

    @property
    def status(self) -> RunStatus:
        """Whether the run is still alive."""
        return status_in(self._index, self.path)

    def refresh(self) -> int | None:
        """Read what was written since the last look, at a cost that does not grow with the run.

        Returns:
            The first step that may be new or changed; None if nothing was written. A late value changes the last known step, and a
            rollback all steps from its target on.
        """
        return self._index.look()

    @property
    def steps(self) -> list[int]:
        """The steps that were monitored, or recorded around a spike, ascending."""
        return list(self._index.steps)

    @property
    def segments(self) -> list[tuple[int, int]]:
        """First and last step of each unbroken part; each part begins where the run was rewound to."""
        steps = self._index.steps
        bounds = [0, *(bisect_left(steps, begin) for begin in self._index.begins), len(steps)]
        return [(steps[begin], steps[end - 1]) for begin, end in pairwise(bounds) if end > begin]

    @property
    def sources(self) -> list[str]:
        """The sources with statistics in any step."""
        there = {layout.source for layout in self._index.layouts()}
        return [source for source in n.TENSOR_SOURCES if source in there]

    def tensors(self, source: str) -> list[str]:
        """The tensors with statistics of ``source`` in any step, in model order."""
        return self.in_model_order(source, self._measured(source))

    def tensors_as_measured(self, source: str) -> list[str]:
        """The same in the order of measurement: outputs in the order of the calls."""
        return list(dict.fromkeys(name for names in sorted(self._measured(source), key=len, reverse=True) for name in names))

    def in_model_order(self, source: str, measured: Iterable[Sequence[str]]) -> list[str]:
        """All names in ``measured``, which are of ``source``; see :class:`torch_gradmon.core.records.ModelOrder`."""
        return ModelOrder(self.meta.get("parameters", ()), self.meta.get("kinds", ())).sorted(source, measured)

    def _measured(self, source: str) -> list[tuple[str, ...]]:
        return [layout.names for layout in self._index.layouts() if layout.source == source]

    @property
    def scalars(self) -> list[Key]:
        """The keys of all values that are not built-in statistics of tensors: of the whole model, custom metrics, logged values."""
        return self._index.stored_keys()

    @property
    def events(self) -> list[SpikeEvent]:
        """The spikes, in order."""
        return [event for step in self._index.with_events() for event in self._index.read(step).spikes()]

    def context(self, step: int) -> Mapping[str, Any]:
        """Learning rates, loss scale and tags of a step, and whether it was applied.

        Raises:
            KeyError: the step is not in the run.
        """
        return self._read(step).facts()

    def metrics(self, step: int) -> dict[str, float]:
        """All scalars of a step: whole-model values, custom metrics, logged values.

        Raises:
            KeyError: the step is not in the run.
        """
        keys = list(self._index.keys)
        return {format_key(keys[number]): value for number, value in self._read(step).values.items()}

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
        self._check_step(step)
        return self.window([step]).table(source, step)

    def records(self, since: int | None = None, wanted: Callable[[Key], bool] | None = None) -> Iterator[StepRecord]:
        """The steps from ``since`` on, ascending, without statistics; for these see :meth:`stacks`.

        Args:
            since: leave out earlier steps.
            wanted: which keys to read; by default all.
        """
        keys = list(self._index.keys)
        chosen = {number: key for number, key in enumerate(keys) if wanted is None or wanted(key)}
        for step in self._since(since, self._index.steps):
            found = self._index.read(step)
            values = {chosen[number]: value for number, value in found.values.items() if number in chosen}
            yield StepRecord(step, found.time, found.applied, values, {}, found.parsed_context(), found.spikes())

    @staticmethod
    def _since(since: int | None, steps: list[int]) -> list[int]:
        return steps[0 if since is None else bisect_left(steps, since) :]

    def stacks(self, source: str, since: int | None = None) -> Iterator[StatsSeries]:
        """The statistics of ``source`` in the steps from ``since`` on that have them, ascending, some hundred steps at a time."""
        steps: list[int] = []
        blobs: list[bytes] = []
        last: TableLayout | None = None
        size = 0
        for step, layout, data in self._packed(source, since):
            if layout != last or size > _AT_ONCE or len(steps) >= _STEPS:
                if last is not None:
                    yield StatsSeries(tuple(steps), last.names, last.rows(blobs), last.columns)
                last, steps, blobs, size = layout, [], [], 0
            steps.append(step)
            blobs.append(data)
            size += len(data)
        if last is not None:
            yield StatsSeries(tuple(steps), last.names, last.rows(blobs), last.columns)

    def _packed(self, source: str, since: int | None) -> Iterator[tuple[int, TableLayout, bytes]]:
        """The packed statistics of ``source``."""
        for step in self._since(since, self._index.steps_with(source)):
            rows = self._index.rows(step)
            if source in rows:
                layout, data = rows[source]
                if not layout.same_as:
                    yield step, layout, data
                elif layout.same_as in rows:  # that another source of the same step stores
                    stored, data = rows[layout.same_as]
                    yield step, *stored.part(data, layout.names)

    def window(self, steps: Iterable[int]) -> Window:
        """All values of some steps, as matrices; steps that the run does not have are left out."""
        return Window(self._index, sorted(step for step in set(steps) if step in self._index))

    def present(self, steps: Iterable[int]) -> set[Key]:
        """The tensors with statistics in any of these steps, as keys without a metric, and the keys of other values; reads no step."""
        steps = list(steps)
        tensors = {Key(layout.source, name, "") for layout in self._index.layouts(steps) for name in layout.names}
        return tensors.union(self._index.stored_keys(steps))

    def _check_step(self, step: int) -> None:
        if step not in self._index:
            raise KeyError(f"step {step} is not in the run; its {len(self._index.steps)} monitored steps are {self._span()}")

    def _read(self, step: int) -> StoredStep:
        self._check_step(step)
        return self._index.read(step)

    def rng_state(self, step: int) -> dict[str, torch.Tensor]:
        """The states of torch's random generators at the beginning of a step with a spike, by device, for ``torch.set_rng_state``.

        Raises:
            KeyError: the step is not in the run, or it had no spike, or a spike of NaN or Inf after eight others in a row.
        """
        self._check_step(step)
        states = {
            source.removeprefix(RNG): data for source, (_, data) in self._index.rows(step).items() if source.startswith(RNG)
        }
        if not states:
            raise KeyError(
                f"no random state is kept of step {step}: only steps with a spike have one, of NaN or Inf the first 8 in a row"
            )
        return {device: torch.tensor(list(state), dtype=torch.uint8, device="cpu") for device, state in states.items()}

    def series(self, key: str) -> dict[int, float]:
        """Value by step for one key, such as ``gradmon/grad_norm`` or ``gradient_before_clip/h.0.attn.weight/std``.

        Any built-in metric of a tensor with stored statistics is available. Steps without the value are left out; it may be
        defined in none, as the largest finite element of a tensor that was NaN all along.

        Raises:
            KeyError: it is none of :meth:`keys`.
        """
        wanted = parse_key(key)
        # a logged value may have a name that looks like a key
        found = self.stored(wanted) or self.stored(Key("", key, ""))
        if wanted.metric in VIEWS:  # a value stored in some steps may follow from statistics in others
            found = dict(sorted({**self._from_statistics(wanted), **found}.items()))
        if not found and key not in (known := self.keys()):
            raise KeyError(f"the run has no values for {key!r}{nearest(key, known)}")
        return found

    def stored(self, key: Key) -> dict[int, float]:
        """Value by step of one of :attr:`scalars`, in a few milliseconds; empty if there is none."""
        return self._index.values(key)

    def _from_statistics(self, key: Key) -> dict[int, float]:
        found: dict[int, float] = {}
        if any(layout.source == key.source and key.name in layout.names for layout in self._index.layouts()):
            for stack in self.stacks(key.source):
                if key.name in stack.names and stack.has(key.metric):
                    there, values = evaluate_view(VIEWS[key.metric], stack.of((key.name,)).rows[:, 0])
                    found.update((step, value) for step, known, value in zip(stack.steps, there, values, strict=True) if known)
        return found

    def keys(self) -> list[str]:
        """Every key that :meth:`series` accepts: whole-model and logged values, then tensors in model order."""
        scalars, layouts = self.scalars, self._index.layouts()
        keys = [key for key in scalars if not is_of_layer(key)]
        for source in LAYER_SOURCES:
            own = [key for key in scalars if key.source == source and is_of_layer(key)]
            keys += self._keys_of(source, own, [layout for layout in layouts if layout.source == source])
        return list(dict.fromkeys(map(format_key, keys)))

    def _keys_of(self, source: str, own: Sequence[Key], layouts: Sequence[TableLayout]) -> Iterator[Key]:
        """The keys of one source; ``own`` are those of stored values."""
        metrics: dict[str, dict[str, None]] = {}
        for layout in layouts:
            views = dict.fromkeys(metric for metric, view in VIEWS.items() if view.columns <= layout.columns | ALWAYS)
            for name in layout.names:
                metrics.setdefault(name, {}).update(views)
        for key in own:
            metrics.setdefault(key.name, {})[key.metric] = None
        orders = [tuple(key.name for key in own), *(layout.names for layout in layouts)]
        return (Key(source, name, metric) for name in self.in_model_order(source, orders) for metric in metrics[name])

    def _span(self) -> str:
        steps = self._index.steps
        return f"{steps[0]} to {steps[-1]}" if steps else "none"

    def close(self) -> None:
        """Close the file."""
        self._index.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._index.steps)} steps: {self._span()}, {len(self.events)} events)"

"""One key over all steps of a run."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..core.errors import nearest
from ..core.keys import Key, format_key, parse_key
from ..core.moments import ALWAYS, VIEWS
from ..step.view_values import evaluate_view
from .layouts import Layouts, TableLayout
from .scan import RunScan, stored_keys
from .step_index import StepIndex
from .window import LAYER_SOURCES, is_of_layer

ModelOrdering = Callable[[str, Iterable[Sequence[str]]], list[str]]


class SeriesReader:
    """Reads series of values, stored or computed from statistics.

    Args:
        db: the file.
        index: its steps.
        layouts: of its statistics.
        scan: reads statistics.
    """

    def __init__(self, db: sqlite3.Connection, index: StepIndex, layouts: Layouts, scan: RunScan) -> None:
        self._db, self._index, self._layouts, self._scan = db, index, layouts, scan

    def values(self, key: str, keys: Callable[[], Sequence[str]]) -> dict[int, float]:
        """Value by step; ``keys`` returns the known keys, for the error.

        Raises:
            KeyError: it is none of these keys.
        """
        wanted = parse_key(key)
        # a logged value may have a name that looks like a key
        found = self.stored(wanted) or self.stored(Key("", key, ""))
        if wanted.metric in VIEWS:  # a value stored in some steps may follow from statistics in others
            found = dict(sorted({**self._from_statistics(wanted), **found}.items()))
        if not found and key not in (known := keys()):
            raise KeyError(f"the run has no values for {key!r}{nearest(key, known)}")
        return found

    def stored(self, key: Key) -> dict[int, float]:
        """Value by step of a key that is no built-in metric of a tensor; empty if there is none."""
        rows = self._db.execute(
            "SELECT segment, step, value FROM scalars JOIN keys ON key = id "
            "WHERE source = ? AND name = ? AND metric = ? ORDER BY step",
            key,
        )
        return {step: float(value) for segment, step, value in rows if self._index.segment_of.get(step) == segment}

    def _from_statistics(self, key: Key) -> dict[int, float]:
        found: dict[int, float] = {}
        for stack in self._scan.stacks(key.source):
            if key.name in stack.names and stack.has(key.metric):
                there, values = evaluate_view(VIEWS[key.metric], stack.of((key.name,)).rows[:, 0])
                found.update((step, value) for step, known, value in zip(stack.steps, there, values, strict=True) if known)
        return found

    def stored_keys(self) -> list[Key]:
        """The keys of stored values that any step of the run has."""
        return list(self._index.of_the_run(stored_keys(self._db), "key", "scalars").values())

    def keys(self, in_order: ModelOrdering) -> list[str]:
        """Every key with a value; ``in_order`` sorts names of a source."""
        scalars, layouts = self.stored_keys(), self._layouts.measured()
        keys = [key for key in scalars if not is_of_layer(key)]
        for source in LAYER_SOURCES:
            own = [key for key in scalars if key.source == source and is_of_layer(key)]
            keys += _keys_of(in_order, source, own, layouts.get(source, ()))
        return list(dict.fromkeys(map(format_key, keys)))


def _keys_of(in_order: ModelOrdering, source: str, own: Sequence[Key], layouts: Sequence[TableLayout]) -> Iterator[Key]:
    """The keys of one source; ``own`` are those of stored values."""
    metrics: dict[str, dict[str, None]] = {}
    for layout in layouts:
        views = dict.fromkeys(metric for metric, view in VIEWS.items() if view.columns <= layout.columns | ALWAYS)
        for name in layout.names:
            metrics.setdefault(name, {}).update(views)
    for key in own:
        metrics.setdefault(key.name, {})[key.metric] = None
    orders = [tuple(key.name for key in own), *(layout.names for layout in layouts)]
    return (Key(source, name, metric) for name in in_order(source, orders) for metric in metrics[name])

"""Where the value of a signal stands in the record of a step."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..core.keys import SPIKE_SCORE, SUMMARY, Key, format_key, parse_key
from ..core.moments import VIEWS
from ..core.records import StepRecord, Table
from ..step.plan import value_in, values_in


def value_of(signal: str, record: StepRecord, whole: Mapping[str, float]) -> float | None:
    """The value of ``signal``: the name of a whole-model value, of a scalar that was logged by hand, or a key. None without one.

    Any built-in metric of a tensor whose statistics were measured can be asked for, whether or not it was asked to be shown.
    """
    free = whole.get(signal, record.values.get(Key("", signal, "")))
    if free is not None:
        return free
    key = parse_key(signal)
    if key.source == SUMMARY:
        return whole.get(key.metric, record.values.get(key))
    if key in record.values:
        return record.values[key]
    return value_in(record.tables.get(key.source), key)


class Matches:
    """The values of all keys that a pattern is found in, those of :func:`value_of`."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._of_table: dict[str, tuple[Table, list[tuple[str, list[int], list[str]]]]] = {}
        self._of_key: dict[Key, str | None] = {}

    def values(self, record: StepRecord, with_tables: bool = True) -> dict[str, float]:
        """Value by key, those of the statistics ``with_tables`` only; what is not defined for a tensor is left out."""
        found: dict[str, float] = {}
        for source, table in record.tables.items() if with_tables else ():
            for metric, rows, keys in self._plan(source, table):
                pairs = zip(keys, values_in(metric, table, rows), strict=True)
                found.update((key, value) for key, value in pairs if value is not None)
        for key, value in record.values.items():
            if key.source == SPIKE_SCORE:
                continue
            if key not in self._of_key:
                text = format_key(key)
                self._of_key[key] = text if self._pattern.search(text) else None
            matched = self._of_key[key]
            if matched is not None:
                found[matched] = value
        return found

    def _plan(self, source: str, table: Table) -> list[tuple[str, list[int], list[str]]]:
        """Metric, rows and keys of a table: made once, as long as it has the same tensors and columns."""
        known = self._of_table.get(source)
        if known is not None and known[0].names == table.names and known[0].columns == table.columns:
            return known[1]
        plan = []
        for metric in VIEWS:
            if table.has(metric):
                keys = [format_key(Key(source, name, metric)) for name in table.names]
                rows = [row for row, key in enumerate(keys) if self._pattern.search(key)]
                if rows:
                    plan.append((metric, rows, [keys[row] for row in rows]))
        self._of_table[source] = table, plan
        return plan

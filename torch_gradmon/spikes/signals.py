"""Look up the value of a signal in a step's record."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..core.keys import SPIKE_SCORE, SUMMARY, Key, format_key, parse_key
from ..core.moments import VIEWS
from ..core.records import StatsTable, StepRecord
from ..step.view_values import value_in, values_in


def value_of(signal: str, record: StepRecord, whole: Mapping[str, float]) -> float | None:
    """The value of ``signal``, or None.

    ``signal`` names a whole-model value, a logged scalar, or a key. A key may ask for any built-in metric of a tensor whose statistics
    were measured, shown or not.
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


class MatchingValues:
    """The values of all keys that match a pattern, looked up as in :func:`value_of`."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._of_table: dict[str, tuple[StatsTable, list[tuple[str, list[int], list[str]]]]] = {}
        self._of_key: dict[Key, str | None] = {}

    def values(self, record: StepRecord, with_tables: bool = True) -> dict[str, float]:
        """Values by key; undefined ones are left out. ``with_tables=False`` skips the statistics of tensors."""
        found: dict[str, float] = {}
        for source, table in record.tables.items() if with_tables else ():
            for metric, rows, keys in self._plan(source, table):
                pairs = zip(keys, values_in(metric, table, rows), strict=True)
                found.update((key, value) for key, value in pairs if value is not None)
        # views of tables are found above
        for key, value in record.values_beside_views().by_key.items():
            if key.source == SPIKE_SCORE:
                continue
            if key not in self._of_key:
                text = format_key(key)
                self._of_key[key] = text if self._pattern.search(text) else None
            matched = self._of_key[key]
            if matched is not None:
                found[matched] = value
        return found

    def _plan(self, source: str, table: StatsTable) -> list[tuple[str, list[int], list[str]]]:
        """Metric, rows and keys of a table, cached while it has the same tensors and columns."""
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

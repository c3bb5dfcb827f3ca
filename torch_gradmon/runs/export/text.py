"""CSV and JSON lines, for which the standard library suffices."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from torch import Tensor

from ...core.json_numbers import plain
from .frames import ColumnValues, Field


class CsvFile:
    """Writes rows under a line of names. What is not there is empty, NaN and infinite values are ``nan`` and ``inf``.

    Args:
        path: of the file.
        fields: the columns.
    """

    def __init__(self, path: Path, fields: Sequence[Field]) -> None:
        self._fields = fields
        self._file = path.open("w", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(field.name for field in fields)

    def write(self, columns: Sequence[ColumnValues]) -> None:
        """Add rows."""
        self._writer.writerows(zip(*_cells(self._fields, columns), strict=True))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class JsonlFile:
    """Writes one object a row, without what is not there; NaN and infinite values are strings, as a :class:`JsonlSink` writes them.

    Args:
        path: of the file.
        fields: the columns.
    """

    def __init__(self, path: Path, fields: Sequence[Field]) -> None:
        self._fields, self._names = fields, [field.name for field in fields]
        self._file = path.open("w", encoding="utf-8")

    def write(self, columns: Sequence[ColumnValues]) -> None:
        """Add rows."""
        for row in zip(*_cells(self._fields, columns, nested=True), strict=True):
            found = {name: value for name, value in zip(self._names, row, strict=True) if value is not None}
            self._file.write(json.dumps(found, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _cells(fields: Sequence[Field], columns: Sequence[ColumnValues], nested: bool = False) -> list[list[Any]]:
    """The columns as Python's own values, None for what is not there; ``nested`` for JSON, of which texts are a part."""
    return [_column(field, column, nested) for field, column in zip(fields, columns, strict=True)]


def _column(field: Field, column: ColumnValues, nested: bool) -> list[Any]:
    if not isinstance(column.values, Tensor):
        return [json.loads(text) if nested and text is not None else text for text in column.values]
    found: list[Any] = column.values.tolist()
    if field.kind == "word":
        found = [field.words[number] for number in found]
    elif field.kind == "time":
        found = [datetime.fromtimestamp(0, timezone.utc) + timedelta(microseconds=number) for number in found]
        found = [moment.isoformat(timespec="microseconds") for moment in found]
    elif field.kind == "flag" and not nested:
        found = ["true" if flag else "false" for flag in found]
    elif field.kind == "real" and nested and not bool(column.values.isfinite().all()):
        found = [plain(value) for value in found]
    if column.there is None:
        return found
    return [value if there else None for value, there in zip(found, column.there.tolist(), strict=True)]

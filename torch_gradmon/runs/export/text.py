"""CSV and JSON lines, with the standard library."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import IO, Any

from torch import Tensor

from ...core.formatting import plain
from .frames import ColumnValues, Field


class _TextFile:
    def __init__(self, file: IO[bytes], fields: Sequence[Field]) -> None:
        self._fields = fields
        self._file = io.TextIOWrapper(file, encoding="utf-8", newline="")

    def close(self) -> None:
        """Complete the file, which stays open."""
        self._file.detach()


class CsvFile(_TextFile):
    """Writes rows below a header. Absent values are empty; NaN and infinite values are ``nan`` and ``inf``.

    Args:
        file: to write to; it stays open.
        fields: the columns.
    """

    def __init__(self, file: IO[bytes], fields: Sequence[Field]) -> None:
        super().__init__(file, fields)
        self._writer = csv.writer(self._file, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
        self._writer.writerow(_harmless(field.name) for field in fields)

    def write(self, columns: Sequence[ColumnValues]) -> None:
        """Add rows."""
        self._writer.writerows(zip(*_cells(self._fields, columns), strict=True))


def _harmless(text: str) -> str:
    """A text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


class JsonlFile(_TextFile):
    """Writes one object per row without absent values. NaN and infinite values are strings, as in :class:`JsonlSink`.

    Args:
        file: to write to; it stays open.
        fields: the columns.
    """

    def write(self, columns: Sequence[ColumnValues]) -> None:
        """Add rows."""
        names = [field.name for field in self._fields]
        for row in zip(*_cells(self._fields, columns, nested=True), strict=True):
            found = {name: value for name, value in zip(names, row, strict=True) if value is not None}
            self._file.write(json.dumps(found, allow_nan=False) + "\n")


def _cells(fields: Sequence[Field], columns: Sequence[ColumnValues], nested: bool = False) -> list[list[Any]]:
    """The columns as Python values, None where absent; ``nested`` decodes JSON texts."""
    return [_column(field, column, nested) for field, column in zip(fields, columns, strict=True)]


def _column(field: Field, column: ColumnValues, nested: bool) -> list[Any]:
    if not isinstance(column.values, Tensor):
        decoded: Callable[[str], Any] = json.loads if nested else _harmless
        return [None if text is None else decoded(text) for text in column.values]
    found: list[Any] = column.values.tolist()
    if field.kind == "word":
        words = field.words if nested else [*map(_harmless, field.words)]
        found = [words[number] for number in found]
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

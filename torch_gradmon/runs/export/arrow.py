"""Arrow and Parquet with pyarrow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from .frames import ColumnValues, Field, Frame

_TYPES = {
    "whole": pa.int64(),
    "real": pa.float64(),
    "flag": pa.bool_(),
    "time": pa.timestamp("us", "UTC"),
    "word": pa.dictionary(pa.int32(), pa.string()),
    "json": pa.string(),
}


class ParquetFile:
    """Writes each part as a row group.

    Args:
        file: to write to; it stays open.
        fields: the columns.
    """

    def __init__(self, file: IO[bytes], fields: Sequence[Field]) -> None:
        self._fields = fields
        self._writer = pq.ParquetWriter(file, schema(fields), compression="zstd")

    def write(self, columns: Sequence[ColumnValues]) -> None:
        """Add rows."""
        self._writer.write_batch(_batch(self._fields, columns))

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def schema(fields: Sequence[Field]) -> pa.Schema:
    """The Arrow types of the columns."""
    return pa.schema([(field.name, _TYPES[field.kind]) for field in fields])


def table(frame: Frame) -> pa.Table:
    """All rows in memory. Absent values are null, NaN stays NaN."""
    batches = [_batch(frame.fields, columns) for _, columns in frame.parts()]
    return pa.Table.from_batches(batches, schema(frame.fields))


def _batch(fields: Sequence[Field], columns: Sequence[ColumnValues]) -> pa.RecordBatch:
    arrays = [_array(field, column) for field, column in zip(fields, columns, strict=True)]
    return pa.record_batch(arrays, schema=schema(fields))


def _array(field: Field, column: ColumnValues) -> pa.Array:
    if not isinstance(column.values, Tensor):
        return pa.array(column.values, pa.string())
    mask = None if column.there is None else (~column.there).numpy()
    values = column.values.contiguous().numpy()
    if field.kind == "word":
        return pa.DictionaryArray.from_arrays(pa.array(values, pa.int32()), pa.array(field.words, pa.string()))
    return pa.array(values, _TYPES[field.kind], mask=mask, from_pandas=False)

"""Write tables into files that appear complete or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from ...core.files import replacing
from .frames import ColumnValues, Field, Frame
from .text import CsvFile, JsonlFile


class File(Protocol):
    """A file that rows are added to."""

    def write(self, columns: Sequence[ColumnValues]) -> None:
        """Add rows."""

    def close(self) -> None:
        """Close the file."""


def _parquet(file: IO[bytes], fields: Sequence[Field]) -> File:
    try:
        from .arrow import ParquetFile
    except ModuleNotFoundError as error:
        raise ImportError('Parquet needs pyarrow: pip install "torch_gradmon[export]"; .csv and .jsonl need nothing') from error
    return ParquetFile(file, fields)


#: Writers by file extension.
FORMATS: Mapping[str, Callable[[IO[bytes], Sequence[Field]], File]] = {".parquet": _parquet, ".csv": CsvFile, ".jsonl": JsonlFile}


def write(frames: Mapping[Path, Frame], advance: Callable[[int], None]) -> None:
    """Write each frame into its file, part by part. Files get their names once all are complete.

    Args:
        frames: by path; missing directories are created, existing files replaced.
        advance: called with the number of steps written.

    Raises:
        ValueError: a path has no supported extension.
        ImportError: a package is missing.
        OSError: a file could not be written; none is left.
    """
    for path in frames:
        check_path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for path, frame in frames.items():
            target = stack.enter_context(replacing(path))
            with contextlib.closing(FORMATS[path.suffix.lower()](target, frame.fields)) as file:
                for steps, columns in frame.parts():
                    file.write(columns)
                    advance(steps)


def check_path(path: Path) -> None:
    """Check the path of an output file before anything is read.

    Raises:
        ValueError: it has no supported extension, or is a directory.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{str(path)!r} ends in none of {', '.join(FORMATS)}, by which the format is chosen")
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a directory; name a file in it")

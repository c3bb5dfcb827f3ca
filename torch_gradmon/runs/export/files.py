"""Tables in files, which are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from .frames import ColumnValues, Field, Frame
from .text import CsvFile, JsonlFile


class File(Protocol):
    """A file that rows are added to."""

    def write(self, columns: Sequence[ColumnValues]) -> None:
        """Add rows."""

    def close(self) -> None:
        """Close the file."""


def _parquet(path: Path, fields: Sequence[Field]) -> File:
    try:
        from .arrow import ParquetFile
    except ModuleNotFoundError as error:
        raise ImportError('Parquet needs pyarrow: pip install "torch_gradmon[export]"; .csv and .jsonl need nothing') from error
    return ParquetFile(path, fields)


#: What writes a file, by its ending.
FORMATS: Mapping[str, Callable[[Path, Sequence[Field]], File]] = {".parquet": _parquet, ".csv": CsvFile, ".jsonl": JsonlFile}


def write(frames: Mapping[Path, Frame], advance: Callable[[int], None]) -> None:
    """Write all frames, each into a file, part by part; the files take their names when all of them are complete.

    Args:
        frames: by the path of the file; directories that are missing are made, and a file that is there is replaced.
        advance: told how many steps were written.

    Raises:
        ValueError: a file cannot have that name.
        ImportError: a package is missing.
        OSError: it could not be written; nothing of it is left.
    """
    for path in frames:
        check_path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as undo:
        done = {}
        for path, frame in frames.items():
            done[path] = path.with_name(f".{path.name}.{os.getpid()}.partial")
            undo.callback(done[path].unlink, missing_ok=True)
            with _open(FORMATS[path.suffix.lower()](done[path], frame.fields)) as file:
                for steps, columns in frame.parts():
                    file.write(columns)
                    advance(steps)
        for path, partial in done.items():
            os.replace(partial, path)


@contextlib.contextmanager
def _open(file: File) -> Iterator[File]:
    try:
        yield file
    finally:
        file.close()


def check_path(path: Path) -> None:
    """Whether a file may be written there, before anything is read.

    Raises:
        ValueError: it may not.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{str(path)!r} ends in none of {', '.join(FORMATS)}, by which the format is chosen")
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a directory; name a file in it")

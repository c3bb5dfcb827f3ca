"""One JSON object per line and step: appendable, readable during the run, and complete up to a crash."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from ..core.errors import display
from ..core.formatting import strict


class JsonlSink:
    """Appends ``{"step": 3, "gradmon/grad_norm": 0.71, ...}`` for each step.

    NaN and infinite values are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, since JSON has no such numbers.

    Args:
        path: the file; a missing directory is created. An existing file is continued.

    Raises:
        TypeError: ``path`` is not a path.
        IsADirectoryError: ``path`` is a directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path must be a file path, got {display(path)}")
        self.path = Path(path)
        if self.path.is_dir():
            raise IsADirectoryError(f"{str(self.path)!r} is a directory; give the file to write, such as 'metrics.jsonl'")
        self._file: IO[str] | None = None

    def __repr__(self) -> str:
        return f"JsonlSink({str(self.path)!r})"

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append one line and flush it to the operating system, so that it survives a crash of this process."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            broken = _ends_within_a_line(self.path)
            self._file = self.path.open("a", encoding="utf-8")
            if broken:
                self._file.write("\n")
        row = {"step": step, **values}
        row["step"] = step  # also if a value of that name was logged
        try:
            line = json.dumps(row, allow_nan=False)
        except ValueError:
            line = json.dumps(strict(row), allow_nan=False)
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError:
            # what the failed write left in Python's buffer would fail again when the file is closed
            with contextlib.suppress(OSError):
                self.close()
            raise

    def close(self) -> None:
        """Close the file; a later :meth:`log` opens it again."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


def _ends_within_a_line(path: Path) -> bool:
    """Whether a crash or a full disk cut the last line short; appending to it would lose the next row."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"

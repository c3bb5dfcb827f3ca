"""A progress bar for long operations."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class ProgressBar:
    """Progress bar; a no-op without tqdm or a terminal.

    Args:
        total: number of units.
        what: description.
        unit: name of the unit.
        wanted: whether to show it; by default if stderr is a terminal.
    """

    def __init__(self, total: int, what: str, unit: str, wanted: bool | None) -> None:
        self._bar: Any = None
        if wanted or (wanted is None and sys.stderr.isatty()):
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc=what, unit=unit, leave=False)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, count: int = 1) -> None:
        """Mark ``count`` units as done."""
        if self._bar is not None:
            self._bar.update(count)

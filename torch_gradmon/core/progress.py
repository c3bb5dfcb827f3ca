"""A progress bar for what takes long."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class ProgressBar:
    """A progress bar where tqdm is installed and somebody looks, and nothing elsewhere.

    Args:
        total: how much there is to do.
        what: is done.
        unit: of what.
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
        """So much more is done."""
        if self._bar is not None:
            self._bar.update(count)

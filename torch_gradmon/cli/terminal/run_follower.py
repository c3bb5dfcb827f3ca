"""Follows the run in a directory while it begins, continues, ends, or is replaced."""

from __future__ import annotations

import os

from ...analysis.run import load_run
from ...runs.format import identity
from .live import LiveRun


class RunFollower:
    """Follows the run in a directory.

    Args:
        path: the directory.
        window: number of the last steps to show.

    Attributes:
        name: the path as given.
        live: the run; None until it exists.
        problem: why there are no new steps, on one line; empty without a problem.
    """

    def __init__(self, path: str | os.PathLike[str], window: int) -> None:
        self.name = os.fspath(path)
        self._path, self._window = path, window
        self._file: tuple[int, int] | None = None
        self.live: LiveRun | None = None
        self.problem = ""

    def refresh(self) -> None:
        """Read what is new. An error is stored in ``problem``, and the next call tries again."""
        try:
            first = identity(self._path)
            if self.live is None or first != self._file:
                fresh = LiveRun(load_run(self._path), self._window)
                self.close()
                self.live, self._file = fresh, first
            else:
                self.live.refresh()
            self.problem = ""
        except FileNotFoundError:
            self.problem = f"there is no run in {os.fspath(self._path)!r}" + (" any more" if self.live is not None else " yet")
        except (OSError, ValueError) as error:
            self.problem = " ".join(str(error).split())

    def close(self) -> None:
        """Close the run's file."""
        if self.live is not None:
            self.live.run.close()

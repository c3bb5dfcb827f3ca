"""The console that commands print to. Needs rich."""

from __future__ import annotations

from rich.console import Console


class QuietConsole(Console):
    """Raises for a closed pipe, which the command line handles, and does not colour numbers."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """The reader has stopped reading."""
        raise BrokenPipeError

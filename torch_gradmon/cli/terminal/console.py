"""The console that commands print to. Needs rich."""

from __future__ import annotations

from rich.console import Console


class QuietConsole(Console):
    """Leaves what a closed pipe means to the command line, and the colours of numbers to whoever prints."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Somebody who reads has seen enough."""
        raise BrokenPipeError

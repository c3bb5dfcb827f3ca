"""Which steps are monitored: those that the script asks for, as the plugins change it."""

from __future__ import annotations

from collections.abc import Callable

from .plugin_set import PluginSet


class Cadence:
    """Answers for one step after the other.

    Args:
        asked: whether the script wants a step, by its number; need not give the same answer twice.
        plugins: each may change the answer.
    """

    def __init__(self, asked: Callable[[int], bool], plugins: PluginSet) -> None:
        self.asked = asked
        self.plugins = plugins
        self._answer: tuple[int, bool] | None = None

    def wants(self, step: int) -> bool:
        """Whether the next step is monitored, if it is ``step``. The script is asked once for each."""
        if self._answer is None or self._answer[0] != step:
            self._answer = step, bool(self.asked(step))
        return self.plugins.wants(step, self._answer[1])

    def ask_again(self) -> None:
        """Forget what the script said of the next step."""
        self._answer = None

    def foretells(self, step: int, ahead: int | None) -> bool:
        """Whether ``step`` would be monitored, by what is known now.

        Args:
            step: its number.
            ahead: how many steps lie between it and the next one; None for a step that is over.
        """
        return self.plugins.foretells(step, bool(self.asked(step)), ahead)

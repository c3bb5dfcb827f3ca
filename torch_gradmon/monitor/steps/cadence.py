"""Which steps are monitored: those that the script asks for, as the plugins change it."""

from __future__ import annotations

from collections.abc import Callable

from ..plugin_set import PluginSet


class Cadence:
    """Decides for each step whether it is monitored.

    Args:
        asked: whether the script requests a step, by its number. Two calls need not return the same answer.
        plugins: each may change the decision.
        every: the script requests each step that this divides, and no others; None if it decides otherwise.
    """

    def __init__(self, asked: Callable[[int], bool], plugins: PluginSet, every: int | None) -> None:
        self.asked, self.plugins, self.every = asked, plugins, every
        self._asked: tuple[int, bool] | None = None
        self._answer: tuple[int, bool] | None = None

    def wants(self, step: int) -> bool:
        """Whether the next step is monitored, if it is ``step``. The script is asked once for each, and so are the plugins unless
        :meth:`plugins_changed`.
        """
        if self._answer is None or self._answer[0] != step:
            if self._asked is None or self._asked[0] != step:
                self._asked = step, bool(self.asked(step))
            self._answer = step, self.plugins.wants(step, self._asked[1])
        return self._answer[1]

    def idle_ahead(self, step: int) -> int:
        """How many steps from ``step`` on are certainly idle and seen by no plugin, without the last one before a monitored one."""
        if self.every is None:
            return 0
        ahead = -step % self.every - 1
        return self.plugins.may_miss(ahead) if ahead > 0 else 0

    def plugins_changed(self) -> None:
        """Ask the plugins again."""
        self._answer = None

    def ask_again(self) -> None:
        """Forget the decision about the next step."""
        self._asked = self._answer = None

    def foretells(self, step: int, ahead: int | None) -> bool:
        """Whether ``step`` would be monitored, by what is known now.

        Args:
            step: its number.
            ahead: how many steps lie between it and the next one; None for a step that is over.
        """
        return self.plugins.foretells(step, bool(self.asked(step)), ahead)

"""A closer look after a spike: for some steps what modules return, and the gradients of that, are measured too."""

from __future__ import annotations

from ..capture.hooks import compiled_graphs
from ..capture.modules.compiled import is_compiled
from ..core import keys as n
from ..step.planner import Planner

#: What is measured: one-pass statistics, of which the run directory keeps all.
_METRICS = {n.ACTIVATION: ("std", "max", "nonfinite"), n.ACTIVATION_GRADIENT: ("norm", "nonfinite")}


class CloserLook:
    """For some steps after a spike every step is monitored, and the registry is lent more metrics.

    Args:
        planner: is told that the plan changed.
        steps: how many steps it takes; none for 0.
    """

    def __init__(self, planner: Planner, steps: int) -> None:
        self._planner, self._steps = planner, steps
        self._left = 0
        self._lends = False
        self._graphs = compiled_graphs()

    @property
    def left(self) -> int:
        """How many of the next steps are such steps."""
        return self._left

    @property
    def goes_on(self) -> bool:
        """Whether the next step is one of them."""
        return self._left > 0

    @property
    def may_hang(self) -> bool:
        """Whether modules may get hooks in the middle of a run. Not where anything was compiled since there is a monitor, for that
        may be the model, whose graph would not call them, or would be compiled again.
        """
        module = self._planner.module
        return module is not None and compiled_graphs() <= self._graphs and not is_compiled(module)

    def begin(self) -> bool:
        """A spike came: look closer from the next step on. Returns whether hooks are to be hung for it.

        No metrics are lent where modules may not get hooks.
        """
        self._left = self._steps
        if not self._steps or self._lends or not self.may_hang:
            return False
        registry = self._planner.registry
        registry.lend([registry.make(source, name, shown=False) for source, names in _METRICS.items() for name in names])
        self._planner.changed()
        self._lends = True
        return True

    def step_ended(self) -> bool:
        """A monitored step ended, and nothing is known of it yet. Returns whether hooks are to be taken away again."""
        ends = self._left == 1 and self._lends
        self._left -= self._left > 0
        if ends:
            self._lends = False
            self._planner.registry.take_back()
            self._planner.changed()
        return ends

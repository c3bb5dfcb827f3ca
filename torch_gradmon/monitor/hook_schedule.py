"""Which hooks hang: all that a monitored step needs, before it begins, and as few as may be while nothing is measured."""

from __future__ import annotations

from ..capture.modules.source import ModuleSource
from ..step.planner import Planner
from .follower import Follower
from .mixin import has_mixin


class Arming:
    """Hangs hooks on modules and parameters, and takes them away.

    Args:
        planner: knows the model, and what is to be measured.
        activations: has the hooks on modules.

    Attributes:
        follower: has the hooks on parameters; None where steps begin and end by hand.
    """

    def __init__(self, planner: Planner, activations: ModuleSource) -> None:
        self._planner, self._activations = planner, activations
        self.follower: Follower | None = None
        self._hung_for: tuple[int, bool] | None = None  # a version of the plan, and whether on modules too

    @property
    def is_partial(self) -> bool:
        """Whether hooks that a monitored step needs may be missing."""
        return self._hung_for is None or not self._hung_for[1]

    @property
    def is_loose(self) -> bool:
        """Whether any hook hangs that a step without measurements can do without."""
        return self._hung_for is not None or self._activations.has_removable_hooks

    def arm(self, on_modules: bool = True) -> None:
        """Hang the hooks that monitored steps need, where they do not hang already; ``on_modules`` too, or on parameters only."""
        wanted = self._planner.version, on_modules
        if self._hung_for == wanted or self._planner.module is None or self._planner.inventory is None:
            return
        before, self._hung_for = self._hung_for, wanted
        if on_modules:
            self.on_modules()
        elif self._activations.has_removable_hooks:
            self._activations.uninstall(self._planner.module_metrics())
        if self.follower is not None and (before is None or before[0] != wanted[0]):
            self.follower.arm(self._planner)

    def on_modules(self) -> None:
        """Hang those on modules by the plan as it is now."""
        module, inventory = self._planner.module, self._planner.inventory
        if module is not None and inventory is not None:
            metrics = self._planner.module_metrics()
            self._activations.install(module, inventory, metrics, self._planner.version, has_mixin(module))

    def disarm(self) -> None:
        """Take away what may go."""
        self._hung_for = None
        if self._activations.has_removable_hooks:
            self._activations.uninstall(self._planner.module_metrics())
        if self.follower is not None:
            self.follower.disarm()

    def forget(self) -> None:
        """What hangs may not be what is needed any more."""
        self._hung_for = None

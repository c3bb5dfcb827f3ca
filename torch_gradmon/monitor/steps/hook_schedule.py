"""Which hooks are registered: all that a monitored step needs, before it begins, and as few as possible while nothing is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.optim import Optimizer

from ...capture.modules.source import ModuleSource
from ...step.buffer import StepBuffer
from ...step.planner import Planner
from ..links import linkable
from ..loop.loop_hooks import LoopHooks
from .decisions import Decisions


class DrivingLoop(Protocol):
    """A loop whose hooks drive the steps."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers that still exist, in the order in which they step."""

    def groups_changed(self) -> bool:
        """Whether an optimizer got or lost parameters since hooks were registered."""

    def leave_unused(self, buffer: StepBuffer) -> None:
        """The step ends. Gradients of optimizers that did not step in it are of the steps that use them, if any do."""

    def install(self, planner: Planner) -> None:
        """Register the hooks on parameters that a monitored step needs."""

    def uninstall(self) -> None:
        """Take them away."""

    @property
    def hooks(self) -> LoopHooks:
        """Its hooks."""

    @property
    def decisions(self) -> Decisions:
        """Describes optimizers to plugins."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The GradScaler, if one is known by now."""


class HookSchedule:
    """Registers and removes hooks on modules and parameters.

    Args:
        planner: knows the model and the requested metrics.
        modules: owns the hooks on modules.

    Attributes:
        loop: owns the hooks on parameters; None where the script begins and ends steps itself.
        is_bare: only hooks that a step without measurements needs are registered.
    """

    def __init__(self, planner: Planner, modules: ModuleSource) -> None:
        self._planner, self._modules = planner, modules
        self.loop: DrivingLoop | None = None
        self._installed_for: tuple[int, bool] | None = None  # a version of the plan, and whether on modules too
        self.is_bare = False

    def follow(self, loop: DrivingLoop | None) -> None:
        """The hooks on parameters are this loop's from now on."""
        self.loop = loop

    def wake(self) -> None:
        """What is measured may have changed, or which steps are monitored: follow the loop again."""
        if self.loop is not None:
            self.loop.hooks.stretch.wake()

    def rest(self, steps: int) -> None:
        """The next ``steps`` steps are idle: only count them, if no hook is registered but those that every step needs."""
        if self.loop is not None and self.is_bare and not self._modules.hooks.on_root and self.loop.hooks.are_plain:
            self.loop.hooks.stretch.begin(steps)

    @property
    def is_partial(self) -> bool:
        """Whether hooks that a monitored step needs may be missing."""
        return self._installed_for is None or not self._installed_for[1]

    def install(self, on_modules: bool = True) -> None:
        """Register the hooks that monitored steps need, where they are missing; ``on_modules`` too, or on parameters only."""
        wanted = self._planner.version, on_modules
        if self._installed_for == wanted or self._planner.module is None or self._planner.inventory is None:
            return
        before, self._installed_for, self.is_bare = self._installed_for, wanted, False
        if on_modules:
            self.on_modules()
        elif self._modules.has_removable_hooks:
            self._modules.uninstall(self._planner.module_metrics())
        if self.loop is not None and (before is None or before[0] != wanted[0]):
            self.loop.install(self._planner)

    def on_modules(self) -> None:
        """Register those on modules by the plan as it is now."""
        module, inventory = self._planner.module, self._planner.inventory
        if module is not None and inventory is not None:
            metrics, self.is_bare = self._planner.module_metrics(), False
            self._modules.install(module, inventory, metrics, self._planner.version, bool(linkable(module)))

    def uninstall(self) -> None:
        """Take away what a step without measurements can do without."""
        self._installed_for = None
        if self._modules.has_removable_hooks:
            self._modules.uninstall(self._planner.module_metrics())
        if self.loop is not None:
            self.loop.uninstall()
        self.is_bare = not self._modules.hooks.has_hooks_on_parts

    def mark_stale(self) -> None:
        """What is registered may not be what is needed any more."""
        self._installed_for = None

    def check_groups(self) -> None:
        """Register hooks again where an optimizer got or lost parameters."""
        if self.loop is not None and self.loop.groups_changed():
            self.mark_stale()

    def groups(self) -> list[tuple[str, frozenset[str]]]:
        """Names of the parameters of each of the optimizers' groups."""
        index = self._planner.inventory
        if self.loop is None or index is None:
            return []
        groups = [group for optimizer in self.loop.optimizers for group in index.source.groups_of(optimizer)]
        members = index.groups or [frozenset(index.names[p] for p in index.positions(group)) for group in groups]
        return [(f"group_{number}", names) for number, names in enumerate(members)]

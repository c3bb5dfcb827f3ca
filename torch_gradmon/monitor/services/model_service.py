"""The watched model, its reference, and the names of its modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ...capture.modules.compiled import unwrapped
from ...capture.reference.source import frozen_copy
from ...core import validation as check
from ...core.errors import display
from ...core.torch_modes import outside_dispatch_modes
from ..links import link, linkable
from ..runtime import Runtime
from .metrics_service import MetricsService, Pattern


@dataclass(slots=True)
class ModelService:
    """Sets the model and the reference model of a runtime."""

    runtime: Runtime

    def set(self, module: nn.Module) -> None:
        """Watch ``module``."""
        check.module(module)
        watched = self.runtime.planner.module
        if watched is not None:
            raise ValueError(
                f"this monitor is one of a {type(watched).__name__} already; make another ModuleMonitor for another model"
            )
        self.runtime.planner.watch(module)

    def introduce(self, monitor: object) -> None:
        """Connect the runtime, and the model where there is one, with the ``monitor`` that users call."""
        runtime, planner = self.runtime, self.runtime.planner
        runtime.owner = monitor  # an attached runtime keeps the monitor for modules with MonitorMixin
        if planner.module is None:
            return
        MetricsService(runtime).warn_of_idle(planner.registry.metrics)
        assert planner.inventory is not None
        assert planner.representative is not None  # as the module
        runtime.factory.layers.warn_of_idle(planner.inventory.names)
        if not runtime.fence.inert:
            self.link()
            model = planner.representative
            runtime.pipeline.directory.annotate(model=type(model if model is None else unwrapped(model)).__name__)
            runtime.factory.model.update(planner.inventory.facts)

    def link(self) -> None:
        """Link the modules that ask for their monitor."""
        assert self.runtime.planner.module is not None
        for module in linkable(self.runtime.planner.module):
            link(module, self.runtime.owner)

    def expect(
        self,
        frozen: Pattern | None,
        trains: Pattern | None,
        dtype: Mapping[Pattern, torch.dtype] | None,
        batch_varies: bool | None,
    ) -> None:
        """Declare what is meant."""
        runtime = self.runtime
        if runtime.planner.module is None:
            raise ValueError("there is no module yet; pass it to ModuleMonitor(model) or call set_module(model) first")
        setup = runtime.plugin("setup_check")
        if setup is not None:
            setup.expectations.declare(runtime.planner, frozen, trains, dtype, batch_varies, is_watched=runtime.loop is not None)

    def names(self) -> dict[nn.Module, str]:
        """The canonical name of each watched module that is alive."""
        inventory = self.runtime.planner.inventory
        known = {} if inventory is None else inventory.modules
        return {module: name for name, reference in known.items() if (module := reference()) is not None}

    def name(self, module: str | nn.Module) -> str:
        """The canonical name of one watched module."""
        if isinstance(module, str):
            return module
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected a module of the watched model or a name for it, got {display(module)}")
        inventory = self.runtime.planner.inventory
        for name, reference in () if inventory is None else inventory.modules.items():
            if reference() is module:
                return name
        what = type(module).__name__
        raise ValueError(f"this {what} is not part of the watched model; pass its name as a str, or watch its model")

    def set_reference(self, module: nn.Module | str) -> None:
        """Compare with ``module``, or with a copy of the model as it is now."""
        watched = self.runtime.planner.module
        if isinstance(module, str):
            check.one_of("module", module, ("init",))
            if watched is None:
                raise ValueError("there is no module to copy; pass it to ModuleMonitor(model) or call set_module(model) first")
            with outside_dispatch_modes():
                self.runtime.set_reference(frozen_copy(watched), follows=True)
            return
        check.module(module)
        if watched is not None and unwrapped(module) is unwrapped(watched):
            raise ValueError("the reference is the watched model itself; pass a copy, or 'init' for one as it is now")
        self.runtime.set_reference(module, follows=False)

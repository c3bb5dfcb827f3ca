"""For modules that log values of their own from inside ``forward``."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core.pickling import Unsaved, unsaved_of

if TYPE_CHECKING:
    from .monitor import ModuleMonitor


class MonitorMixin:
    """Mix into an ``nn.Module`` to reach the monitor from its ``forward``; inert without a monitor.

    It needs no ``__init__`` of its own to be called, so it can stand anywhere among the base classes:

    >>> import torch
    >>> class Layer(torch.nn.Linear, MonitorMixin):
    ...     def forward(self, x):
    ...         y = super().forward(x)
    ...         if self.is_monitoring:
    ...             self.get_module_monitor().log_tensor("my_norm", y.norm(dim=-1))
    ...         return y
    >>> Layer(2, 2).is_monitoring
    False
    """

    @property
    def is_monitoring(self) -> bool:
        """Whether a monitor takes values now."""
        if torch.compiler.is_compiling():
            return False  # a graph must not depend on the state of a monitor
        monitor = self.get_module_monitor()
        return monitor is not None and monitor.is_monitoring()

    def get_module_monitor(self) -> ModuleMonitor | None:
        """The monitor that watches the model, or None."""
        unsaved = unsaved_of(getattr(self, "__dict__", {}).get("_forward_hooks"))
        return None if unsaved is None or unsaved.monitor is None else unsaved.monitor()


def has_mixin(module: nn.Module) -> bool:
    """Whether any part of ``module`` may log values of its own."""
    return any(isinstance(child, MonitorMixin) for child in module.modules())


def link(module: nn.Module, monitor: ModuleMonitor) -> None:
    """Connect a module with its monitor, which it does not keep alive; copied or saved, the module is connected with none."""
    hooks: Any = module._forward_hooks
    (unsaved_of(hooks) or Unsaved(hooks)).monitor = weakref.ref(monitor)


def unlink(module: nn.Module) -> None:
    """Disconnect a module."""
    if (unsaved := unsaved_of(vars(module).get("_forward_hooks"))) is not None:
        unsaved.monitor = None
        unsaved.leave_if_empty()

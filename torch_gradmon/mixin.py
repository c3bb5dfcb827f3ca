"""For modules that log values of their own from inside ``forward``."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from .monitor import ModuleMonitor

_ATTRIBUTE = "_gradmon_link"


class _Link:
    """The way from a module to its monitor; it keeps nothing alive and is left behind when the module is copied or saved."""

    def __init__(self, monitor: ModuleMonitor) -> None:
        self.monitor = weakref.ref(monitor)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


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
        link = getattr(self, "__dict__", {}).get(_ATTRIBUTE)
        return None if link is None else link.monitor()


def has_mixin(module: nn.Module) -> bool:
    """Whether any part of ``module`` may log values of its own."""
    return any(isinstance(child, MonitorMixin) for child in module.modules())


def link(module: object, monitor: ModuleMonitor) -> None:
    """Connect a module with its monitor."""
    module.__dict__[_ATTRIBUTE] = _Link(monitor)


def unlink(module: object) -> None:
    """Disconnect a module."""
    module.__dict__.pop(_ATTRIBUTE, None)

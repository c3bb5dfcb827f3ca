"""For modules that log values from their own ``forward``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.torch_modes import is_compiling
from .links import Linkable, linked

if TYPE_CHECKING:
    from .monitor import ModuleMonitor


class MonitorMixin(Linkable):
    """Mix into an ``nn.Module`` to reach the monitor from its ``forward``; inert without a monitor.

    Its ``__init__`` need not be called, so it may stand anywhere among the base classes:

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
        if is_compiling():
            return False  # a graph must not depend on the state of a monitor
        monitor = self.get_module_monitor()
        return monitor is not None and monitor.is_monitoring()

    def get_module_monitor(self) -> ModuleMonitor | None:
        """The monitor of the model, or None."""
        return linked(self)  # type: ignore[no-any-return]

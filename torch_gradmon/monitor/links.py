"""Links from modules to their monitor."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from ..core.torch_modes import Unsaved, unsaved_of


class Linkable:
    """Marks modules that get a link to their monitor; see :class:`torch_gradmon.MonitorMixin`."""


def linkable(model: nn.Module) -> list[nn.Module]:
    """The parts of ``model``, itself included, that get a link."""
    return [module for module in model.modules() if isinstance(module, Linkable)]


def link(module: nn.Module, monitor: object) -> None:
    """Link a module with its monitor, which it does not keep alive. Copies and saved files of the module have no link."""
    hooks: Any = module._forward_hooks
    (unsaved_of(hooks) or Unsaved(hooks)).monitor = weakref.ref(monitor)


def linked(module: object) -> Any:
    """The monitor that ``module`` is linked with, or None."""
    unsaved = unsaved_of(getattr(module, "__dict__", {}).get("_forward_hooks"))
    return None if unsaved is None or unsaved.monitor is None else unsaved.monitor()


def unlink(module: nn.Module) -> None:
    """Remove the link of a module, if it has one."""
    if (unsaved := unsaved_of(vars(module).get("_forward_hooks"))) is not None:
        unsaved.monitor = None
        unsaved.leave_if_empty()

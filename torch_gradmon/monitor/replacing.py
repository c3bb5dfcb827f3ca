"""A script has one monitor for a model: a second one replaces the first, with a warning.

The model has only a weak reference to its monitor. There is no global state, and copies and saved files of the model contain none of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..capture.modules.compiled import unwrapped
from ..core.errors import SpikeError, warn_user
from .monitor import ModuleMonitor
from .services.loop_service import LoopService


class Mark(weakref.ref[nn.Module]):
    """A weak reference to a model without its wrappers, which finds the monitor of that model. It keeps neither alive.

    Attributes:
        monitor: the monitor of the model.
        owner: the object that uses the monitor, such as a trainer; None where a script called :func:`torch_gradmon.watch`.
    """

    __slots__ = ("monitor", "owner")

    monitor: weakref.ref[ModuleMonitor]
    owner: weakref.ref[Any] | None

    def __new__(cls, model: nn.Module, monitor: ModuleMonitor, owner: Any) -> Mark:
        """Mark ``model``."""
        mark = super().__new__(cls, model)
        mark.monitor, mark.owner = weakref.ref(monitor), None if owner is None else weakref.ref(owner)
        return mark

    def __init__(self, model: nn.Module, monitor: ModuleMonitor, owner: Any) -> None:
        """Do nothing, because ``__new__`` sets everything."""

    def is_of(self, owner: Any) -> bool:
        """Whether this is the mark of a monitor of ``owner``, who may use several for one model."""
        return owner is not None and self.owner is not None and self.owner() is owner


def earlier(model: nn.Module, owner: Any = None) -> list[ModuleMonitor]:
    """The monitors of ``model`` under any wrappers, except those of the same ``owner``."""
    marks = [mark for mark in weakref.getweakrefs(unwrapped(model)) if isinstance(mark, Mark) and not mark.is_of(owner)]
    return [monitor for mark in marks if (monitor := mark.monitor()) is not None]


def attach(
    monitor: ModuleMonitor,
    optimizers: Sequence[Any],
    *,
    scaler: torch.amp.GradScaler | None = None,
    start_step: int | None = None,
    owner: Any = None,
) -> ModuleMonitor:
    """Attach ``monitor`` and detach earlier monitors of its model. All arguments are checked before that.

    Args:
        monitor: a monitor with a model.
        optimizers, scaler, start_step: see :meth:`ModuleMonitor.attach`.
        owner: the object that uses the monitor; it may use several for one model, as a trainer with two callbacks does.

    Raises:
        TypeError, ValueError: as :meth:`ModuleMonitor.attach`.
    """

    def before(_: nn.Module) -> None:
        module = monitor._runtime.planner.representative
        assert module is not None
        for other in earlier(module, owner):
            _replace(other, type(unwrapped(module)).__name__)
        monitor._runtime.mark = Mark(unwrapped(module), monitor, owner)

    LoopService(monitor._runtime).attach(optimizers, scaler, start_step, before)
    return monitor


def _replace(other: ModuleMonitor, kind: str) -> None:
    step = other.step
    is_open = step is not None and step != other.last_step
    when = "before its first step" if step is None else f"{'in' if is_open else 'after'} step {step}"
    remedy = "" if step is None else f"; start_step={step + (not is_open)} continues its numbers"
    message = f"this {kind} was watched already: the earlier monitor is detached {when}, and the new one replaces it{remedy}"
    warn_user(message)
    try:
        other.detach()
    except SpikeError as error:  # a spike in the last step must not stop a script that starts again
        warn_user(f"the earlier monitor ended with a spike: {error}")

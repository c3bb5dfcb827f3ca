"""One monitor watches a model for a script: a second one takes the place of the first, and says so.

What is known of the first hangs on the model by a weak reference alone: nothing is kept in a global, and nothing is added to what the
model is, is copied with, or is saved with.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..capture.modules.compiled import unwrapped
from ..core.errors import GradmonWarning, SpikeError
from .loop_service import LoopService
from .monitor import ModuleMonitor


class Mark(weakref.ref[nn.Module]):
    """A weak reference to a model inside of its wrappers, by which its monitor is found; it keeps neither alive.

    Attributes:
        monitor: what watches the model.
        owner: whose monitor that is, such as a trainer; None where a script called :func:`torch_gradmon.watch`.
    """

    __slots__ = ("monitor", "owner")

    monitor: weakref.ref[ModuleMonitor]
    owner: weakref.ref[Any] | None

    def __new__(cls, model: nn.Module, monitor: ModuleMonitor, owner: Any) -> Mark:
        """A mark of ``model``."""
        mark = super().__new__(cls, model)
        mark.monitor, mark.owner = weakref.ref(monitor), None if owner is None else weakref.ref(owner)
        return mark

    def __init__(self, model: nn.Module, monitor: ModuleMonitor, owner: Any) -> None:
        """Nothing is left to do."""

    def is_of(self, owner: Any) -> bool:
        """Whether ``owner`` has several monitors of one model, of which this is one."""
        return owner is not None and self.owner is not None and self.owner() is owner


def earlier(model: nn.Module, owner: Any = None) -> list[ModuleMonitor]:
    """The monitors that watch ``model``, whatever has been wrapped around it or taken off since, but for those of the same ``owner``."""
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
    """Attach ``monitor`` in the place of those that watch its model; all arguments are checked before these are touched.

    Args:
        monitor: of a model.
        optimizers: see :meth:`ModuleMonitor.attach`, as the next two.
        scaler: see there.
        start_step: see there.
        owner: whose monitor it is; one owner may have several of a model, as a trainer with two callbacks has.

    Raises:
        TypeError, ValueError: as :meth:`ModuleMonitor.attach`.
    """

    def before(module: nn.Module) -> None:
        for other in earlier(module, owner):
            _replace(other, type(unwrapped(module)).__name__)
        monitor._session.mark = Mark(unwrapped(module), monitor, owner)

    LoopService(monitor._session).attach(optimizers, scaler, start_step, before)
    return monitor


def _replace(other: ModuleMonitor, kind: str) -> None:
    step = other.step
    is_open = step is not None and step != other.last_step
    when = "before its first step" if step is None else f"{'in' if is_open else 'after'} step {step}"
    remedy = "" if step is None else f"; start_step={step + (not is_open)} goes on with its numbers"
    message = f"this {kind} was watched already: the earlier monitor is detached {when}, and the new one takes its place{remedy}"
    warnings.warn(f"torch_gradmon: {message}", GradmonWarning, stacklevel=6)
    try:
        other.detach()
    except SpikeError as error:  # in its last step, which is no reason to stop a script that begins anew
        warnings.warn(f"torch_gradmon: the earlier monitor ended with a spike: {error}", GradmonWarning, stacklevel=6)

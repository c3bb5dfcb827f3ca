"""The connection of a monitor with a training loop: by hooks on its optimizers, or none where it calls the monitor by hand."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..capture.gradients import reciprocal, scale_of
from ..core.torch_modes import outside_dispatch_modes
from .followed_loop import FollowedLoop
from .machine.step_machine import StepCycle
from .steps.step_lifecycle import StepLifecycle
from .steps.value_log import OverflowLog


class LoopConnection:
    """Connects the steps of a monitor with a loop.

    Args:
        lifecycle: carries out the steps.
        cycle: opens and closes them.

    Attributes:
        overflows: takes what a fused optimizer found.
        loop: the followed loop; None where steps begin and end by hand.
    """

    def __init__(self, lifecycle: StepLifecycle, cycle: StepCycle) -> None:
        self._lifecycle, self._cycle = lifecycle, cycle
        self.overflows = OverflowLog(lifecycle.values)
        self.loop: FollowedLoop | None = None
        self._scaler: torch.amp.GradScaler | None = None
        self._scale_by_hand()

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The GradScaler, if one is known."""
        return self._scaler if self.loop is None else self.loop.scaler

    def use_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        """The scaler that the script has named."""
        self._scaler = scaler

    def follow(
        self,
        owner: object,
        module: nn.Module,
        optimizers: list[Optimizer],
        scaler: torch.amp.GradScaler | None,
        wrappers: Sequence[tuple[Any, Optimizer]],
    ) -> None:
        """Follow the loop by hooks from now on.

        Args:
            owner: kept alive by the optimizers.
            module: the watched model.
            optimizers: in the order in which they step.
            scaler: their GradScaler, if one is known.
            wrappers: around the optimizers, each with the one inside.
        """
        lifecycle = self._lifecycle
        self._scaler = scaler
        lifecycle.values.follow(True)
        lifecycle.state.follow()
        with outside_dispatch_modes():
            loop = FollowedLoop(owner, self._cycle, lifecycle, self.overflows, module, optimizers, scaler, wrappers)
            self.loop = loop
            lifecycle.hooks.follow(loop)
            lifecycle.plugins.restart()
            lifecycle.plugins.call("on_attach", module, optimizers)
            lifecycle.hooks.mark_stale()
            lifecycle.captures.modules.connect(
                loop.measurement.inverse_scale, loop.hooks.model.root_called, loop.part_called, loop.hooks.backward.awaited
            )
            # also where the first step is not monitored: a model that will be compiled takes only the hooks that it has then
            lifecycle.hooks.install()
            lifecycle.fence.cost()

    def continue_at(self, step: int) -> None:
        """The next step has this number."""
        self._lifecycle.state.clock.continue_at(step)
        self._lifecycle.hooks.wake()

    def disconnect(self) -> None:
        """Take every hook away."""
        lifecycle = self._lifecycle
        lifecycle.values.follow(False)
        lifecycle.hooks.uninstall()
        lifecycle.captures.modules.remove()
        lifecycle.captures.modules.reference.forget()
        if self.loop is not None:
            self._scaler = self.loop.scaler
            self.loop.remove_hooks()
            lifecycle.plugins.call("on_detach")
            self.loop = None
            lifecycle.hooks.follow(None)
            lifecycle.state.unfollow()
            self._scale_by_hand()

    def _scale_by_hand(self) -> None:
        """Without a followed loop, what is known of gradients inside of the model is the scaler that was named."""
        connection = weakref.ref(self)

        def inverse_scale() -> Tensor | None:
            scaler = None if (alive := connection()) is None else alive.scaler
            return None if (scale := scale_of(scaler)) is None else reciprocal(scale)

        self._lifecycle.captures.modules.connect(inverse_scale)

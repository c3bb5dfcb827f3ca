"""All hooks that follow one loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...core.fence import Fence
from ..machine.step_machine import StepsInBackward
from .backward_hooks import BackwardHooks
from .idle_stretch import IdleStretch
from .listener import LoopDriver
from .model_hooks import ModelHooks
from .optimizer_hooks import OptimizerHooks
from .scaler_hooks import ScalerHooks


class LoopHooks:
    """Hooks on the model's forward, on parameters, optimizers and the scaler.

    Args:
        driver: receives the reports.
        fence: guards each report.
        module: the watched model.
        optimizers: in the order in which they step.
        scaler: their GradScaler, if one is known.
        wrappers: around the optimizers, each with the one inside.
        in_backward: which optimizers step within the backward pass.
        stretch: idle steps that are only counted.
    """

    def __init__(
        self,
        driver: LoopDriver,
        fence: Fence,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        wrappers: Sequence[tuple[Any, Optimizer]],
        in_backward: StepsInBackward,
        stretch: IdleStretch,
    ) -> None:
        self.stretch = stretch
        self.optimizers = OptimizerHooks(driver, fence, optimizers, wrappers, stretch, module if _is_container(module) else None)
        self.scaler = ScalerHooks(driver, fence, self.optimizers, scaler)
        self.backward = BackwardHooks(driver, fence, self.optimizers, in_backward)
        self.model = ModelHooks(driver, fence, module, self.optimizers, stretch)

    @property
    def are_plain(self) -> bool:
        """Whether a step of the optimizer is one call of its hooks, and nothing else belongs to it."""
        return self.optimizers.are_plain and not self.scaler.is_known

    def remove(self) -> None:
        """Remove all hooks; a second call does nothing."""
        self.backward.uninstall()
        self.optimizers.remove()
        self.model.remove()
        self.scaler.remove()


def _is_container(module: nn.Module) -> bool:
    """Whether only its modules are called, so that perhaps nothing else refers to it, as to one of the two networks of a GAN."""
    if isinstance(module, torch.jit.ScriptModule):  # which is no container, and has its forward elsewhere
        return False
    has_forward = "forward" in module.__dict__ or type(module).forward is not nn.Module.forward
    return not (has_forward or module._parameters or module._buffers)

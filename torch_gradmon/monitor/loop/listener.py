"""The moments of a training loop, for those that follow it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer


class LoopDriver:
    """What hooks report, and ask. Hooks decide nothing.

    All methods are called inside of the fence.
    """

    def may_train_in_eval(self) -> bool:
        """The model is called in evaluation mode, with gradients: whether that may be training."""
        raise NotImplementedError

    def moves_buffers(self, module: nn.Module) -> None:
        """The model is called in training mode, perhaps without gradients."""

    def forward_began(self, in_eval: bool, in_closure: bool, counts: bool) -> None:
        """The model is called in training, perhaps in evaluation mode. ``counts``: no other hook reports this call."""

    def root_began(self) -> None:
        """The hook on the model itself reported that."""

    def gradient_complete(self, position: int) -> None:
        """The gradient of this parameter is complete, and its optimizer may step before the backward pass is over."""

    def backward_ended(self, is_nested: bool) -> None:
        """A backward pass is over, and its gradients are accumulated and reduced."""

    def wrapper_began(self, optimizer: Optimizer) -> None:
        """A wrapper around the optimizer is about to step."""

    def wrapper_ended(self, optimizer: Optimizer) -> None:
        """The wrapper returned, and the optimizer has not stepped."""

    def step_began(self, optimizer: Optimizer, has_closure: bool, within: bool) -> bool:
        """The optimizer is about to step, or to call its closure; whether it must change nothing."""
        raise NotImplementedError

    def closure_ended(self, optimizer: Optimizer) -> bool:
        """The closure has computed the gradients that the optimizer will use; whether it must change nothing."""
        raise NotImplementedError

    def closure_raised(self, optimizer: Optimizer, error: str) -> None:
        """The closure raised, and so will the step."""

    def step_ended(self, optimizer: Optimizer, found_inf: Tensor | None, within: bool) -> None:
        """The optimizer has stepped, unless ``found_inf`` (of a fused optimizer under a GradScaler) is not zero."""

    def step_overflowed(self, optimizer: Optimizer) -> None:
        """The scaler skipped the optimizer's step."""

    def loss_scaled(self) -> None:
        """The scaler has scaled a loss."""

    def unscaling(self, optimizer: Optimizer) -> None:
        """The scaler is about to unscale the gradients of the optimizer."""

    def unscaled(self, optimizer: Optimizer) -> None:
        """The scaler has unscaled them."""

    def scaler_updated(self) -> None:
        """The scaler has ended the attempt."""

    def scale_mistaken(self, reason: str, scaler: GradScaler | None) -> None:
        """Another ``scaler`` than assumed scales the gradients, or none."""

    def holds_scaler(self) -> tuple[bool, bool]:
        """Whether the scaler must not count this attempt, and whether that holds although it found infinite gradients on this rank."""
        raise NotImplementedError

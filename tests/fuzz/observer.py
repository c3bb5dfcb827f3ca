"""What a loop tells of itself. A bare run has this one, which listens to nothing."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .loop import Loop


class Observer:
    """Is told at each moment by the loop itself, which knows what it does. It changes nothing that trains."""

    def built(self, loop: Loop) -> None:
        """Model, optimizers and scaler are there."""

    def iteration(self, number: int) -> None:
        """An iteration of the loop begins."""

    @contextlib.contextmanager
    def forward(self, trains: bool) -> Iterator[None]:
        """The model is called; ``trains``: in training mode and with gradients."""
        yield

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """A backward pass that accumulates gradients."""
        yield

    def edited(self) -> None:
        """The loop has called something that edits gradients."""

    def unscaled(self, index: int) -> None:
        """``scaler.unscale_`` has been called for this optimizer."""

    @contextlib.contextmanager
    def stepping(self, index: int) -> Iterator[None]:
        """The optimizer of this number steps."""
        yield

    def closure(self, index: int, closure: Callable[[], Tensor]) -> Tensor:
        """The optimizer of this number calls its closure."""
        return closure()

    def step_over(self) -> None:
        """What people call a step is over."""

    def log(self, key: str, value: Any) -> None:
        """The loop logs a number."""

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        """Clip by the norm."""
        return torch.nn.utils.clip_grad_norm_(parameters, limit)

    def act(self, what: str) -> None:
        """The loop does something with its monitor, if it has one."""

    def save(self, model: nn.Module) -> None:
        """The loop saves the whole model."""
        torch.save(model, io.BytesIO())

    def poll(self) -> None:
        """A good moment to read values: between two iterations."""

    def over(self) -> None:
        """The loop is over."""

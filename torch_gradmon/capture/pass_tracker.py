"""Which calls of a model and its parts are training: not those of evaluation, recomputation or a pause."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.torch_modes import capture_check
from .hooks import TRACER, Hook, is_called_by
from .module_values import tensors_of


class PassTracker:
    """The state of the running forward.

    Inside a backward pass a forward is a recomputation; grad mode does not show it, since checkpointing switches it.

    A part that is called without the root, while no step is open, either begins a step or is tried between two; only the backward pass
    shows which. Until the root was trained, each such call begins a step; from then on none does, and each does again once ``backward()``
    has reached the inputs or outputs of such a call.
    """

    def __init__(self) -> None:
        self.root_trains: bool | None = None  # whether the running forward of the root is training; None while none is running
        self.forward_seen = False  # the root was ever called
        self.is_paused = False  # nothing is measured; :attr:`paused` knows more
        self.awaits_part = False  # watch parts, because none was seen to be trained before the root so far
        self.missed = False  # parts turned out to have been called for a step before it began
        self.counts_eval = (
            False  # calls in evaluation mode are training, because such a call began the step or the loop trains so
        )
        self.is_tentative = False  # no backward pass has confirmed that so far
        self.by_hand = False  # the loop has begun the step explicitly, so training mode alone decides, as in torch-module-monitor
        self.is_open = True  # values count; False in a step without measurements
        self.builds_graph = True  # the root was called with gradients
        self._root_trained = self._parts_lead = False
        self._captures = capture_check()

    @property
    def paused(self) -> bool:
        """Nothing is measured at the moment: a reference runs, or a graph is captured, whose values come with its replays."""
        return self.is_paused or (self._captures is not None and self._captures())

    # --- steps -----------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    # --- the root --------------------------------------------------------------------------------------------------------------

    def root_began(self, module: nn.Module) -> bool:
        """Start a forward of the root. Returns whether it is training."""
        self.builds_graph = torch.is_grad_enabled()
        self.root_trains = self.trains(module)
        self.forward_seen = True
        return self.root_trains

    def trains(self, module: nn.Module) -> bool:
        if torch.is_grad_enabled():
            return module.training or self.counts_eval
        return self.by_hand and module.training and not is_called_by(TRACER)

    def training_began(self, end_is_seen: bool) -> None:
        """The root's training forward began, which its own hook may have missed; ``end_is_seen``: a hook will see its end."""
        self.forward_seen = True
        if not self.counts_eval:
            self._root_trained, self.awaits_part = True, False
        if end_is_seen:
            self.root_trains = True

    @property
    def in_training(self) -> bool:
        """False inside an evaluation pass and inside a recomputation, which happens while a backward pass runs."""
        return self.root_trains is not False and torch._C._current_graph_task_id() == -1

    def in_forward(self) -> bool:
        """Whether the root's training forward is running, and it is no recomputation."""
        return self.root_trains is True and torch._C._current_graph_task_id() == -1 and not self.paused

    # --- parts that are called directly ----------------------------------------------------------------------------------------

    def part_began(self) -> bool:
        """Whether a call of a part, made while no monitored step is open, begins a step if it is training."""
        # not after a step that is not monitored has begun
        self.awaits_part = (self.awaits_part or self.is_open) and not self._parts_lead
        return self._parts_lead or not self._root_trained

    def watch_part(self, module: nn.Module, value: Any, missed: bool) -> None:
        """Watch whether ``backward()`` reaches this part's inputs or outputs; ``missed``: the part did not begin the step."""
        counts = module.training or self.counts_eval
        if self.paused or not self.awaits_part or not counts or not self.in_training:
            return
        tensor = next((t for _, t in tensors_of(value, "") if t.requires_grad and t.grad_fn is not None), None)
        if tensor is not None:  # the hook is freed with the graph
            tensor.register_hook(Hook(self._reached, missed))  # type: ignore[no-untyped-call]

    def _reached(self, missed: bool, gradient: Tensor | None) -> None:
        # autograd.grad, which only inspects a model, does not count
        if gradient is not None and torch.autograd.Variable._execution_engine.is_checkpoint_valid():
            self._parts_lead = True
            self.missed |= missed and self.is_open

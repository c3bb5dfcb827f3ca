"""Which calls of a model and its parts are training ones: not those of evaluation, recomputation or a pause."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attention.function_patch import TRACER, is_called_by
from ..hooks import Hook
from .structure import tensors_of


class PassTracker:
    """What is known of the forward that is running.

    Inside a backward pass a forward is a recomputation; grad mode cannot tell, since checkpointing switches it.

    A part that somebody else than the root calls while no step is open either begins one or is tried between two, and only the
    backward pass tells which. So until the root was trained each such call begins a step, from then on none does, and each does
    again once ``backward()`` was seen to reach what such a call had taken or returned.

    Attributes:
        root_trains: whether the running forward of the root is a training one; None while none is running.
        forward_seen: whether the root was ever called.
        counts_eval: whether calls in evaluation mode are training, because such a call began the step or the loop trains so.
        is_tentative: whether no backward pass has confirmed that so far.
        paused: whether nothing is measured for the moment.
        is_open: whether values count; False in a step of which nothing is measured.
        awaits_part: whether parts are to be watched, because none was seen to be trained before the root so far.
        missed: whether parts turned out to have been called for a step before it began.
        by_hand: whether the step was begun by hand, so that training mode alone decides what is training, as in torch-module-monitor.
        builds_graph: whether the root was called with gradients.
    """

    def __init__(self) -> None:
        self.root_trains: bool | None = None
        self.forward_seen = self.paused = self.awaits_part = self.missed = False
        self.counts_eval = self.is_tentative = self.by_hand = False
        self.is_open = self.builds_graph = True
        self._root_trained = self._parts_lead = False

    def root_began(self, module: nn.Module) -> bool:
        """The root is called; whether that is training."""
        self.builds_graph = torch.is_grad_enabled()
        self.root_trains = self.trains(module)
        self.forward_seen = True
        return self.root_trains

    def trains(self, module: nn.Module) -> bool:
        """Whether ``module`` would be called in training now."""
        if torch.is_grad_enabled():
            return module.training or self.counts_eval
        return self.by_hand and module.training and not is_called_by(TRACER)

    def training_began(self, end_is_seen: bool) -> None:
        """The root's training forward began, which its own hook may not have told; ``end_is_seen``: a hook will tell of its end."""
        self.forward_seen = True
        if not self.counts_eval:
            self._root_trained, self.awaits_part = True, False
        if end_is_seen:
            self.root_trains = True

    def root_ended(self) -> bool:
        """The root has returned; whether that was the end of a forward, and not of its recomputation."""
        if torch._C._current_graph_task_id() != -1:
            return False
        self.root_trains, self.builds_graph = None, True
        return True

    @property
    def in_training(self) -> bool:
        """False inside an evaluation pass and inside recomputation, which happens while a backward pass runs."""
        return self.root_trains is not False and torch._C._current_graph_task_id() == -1

    def in_forward(self) -> bool:
        """Whether the root's training forward is running, and not in a recomputation."""
        return self.root_trains is True and torch._C._current_graph_task_id() == -1 and not self.paused

    # --- parts that are called alone -------------------------------------------------------------------------------------------

    def part_began(self) -> bool:
        """A part is called, and no monitored step is open; whether that begins a step, where it is training."""
        # not after the beginning of a step that is not monitored
        self.awaits_part = (self.awaits_part or self.is_open) and not self._parts_lead
        return self._parts_lead or not self._root_trained

    def watch_part(self, module: nn.Module, value: Any, missed: bool) -> None:
        """See whether ``backward()`` reaches what this part takes or returns; ``missed``: it did not begin the step."""
        counts = module.training or self.counts_eval
        if self.paused or not self.awaits_part or not counts or not self.in_training:
            return
        tensor = next((t for _, t in tensors_of(value, "") if t.requires_grad and t.grad_fn is not None), None)
        if tensor is not None:  # the hook goes when the graph does
            tensor.register_hook(Hook(self._reached, missed))  # type: ignore[no-untyped-call]

    def _reached(self, missed: bool, gradient: Tensor | None) -> None:
        # not by autograd.grad, with which one looks at a model
        if gradient is not None and torch.autograd.Variable._execution_engine.is_checkpoint_valid():
            self._parts_lead = True
            self.missed |= missed and self.is_open

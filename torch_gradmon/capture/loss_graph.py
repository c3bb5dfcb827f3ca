"""The loss of a running backward pass, and the nodes of autograd behind it."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.autograd.graph import Node

#: The most nodes of a loss that are visited.
_NODES = 64
#: Operations that only move, choose, copy or bound what they get.
_MOVES = (
    *("Alias", "Cat", "Clamp", "Clone", "Expand", "Gather", "Index", "IndexSelect", "MaskedSelect", "Permute", "ReshapeAlias"),
    *("Select", "Slice", "Squeeze", "Stack", "T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View", "_DDPSink"),
)


def notes_of(node: Node) -> dict[str, Any]:
    """The dict of a node of autograd that is there for notes. It goes with the graph, and must hold nothing of the model."""
    notes: Any = node.metadata  # a method in the stubs
    found: dict[str, Any] = notes
    return found


def losses_going_backward() -> Sequence[Tensor]:
    """The losses from which ``torch.autograd.backward`` goes backward now, in this thread or in one that waits for it.

    None if they are no single numbers, if it is asked for some gradients alone, or if it runs within another one, as those of checkpoints
    do, which accumulate the gradient of one loss in parts.
    """
    running: list[dict[str, Any]] = []
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code is torch.autograd.backward.__code__:
                running.append(frame.f_locals)
            frame = frame.f_back
    if len(running) != 1 or running[0].get("grad_tensors") is not None or running[0].get("inputs") is not None:
        return ()
    tensors = running[0].get("tensors")
    losses = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
    return losses if all(loss.numel() == 1 for loss in losses) else ()


def nodes_of(losses: Sequence[Tensor], until: str) -> Iterator[Node]:
    """The nodes of losses, the last ones first, and none behind those with the note ``until``."""
    waiting = [loss.grad_fn for loss in losses]
    seen: set[Node] = set()
    while waiting and len(seen) < _NODES:
        node = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if until not in notes_of(node):
            waiting += [each for each, _ in node.next_functions]


def is_made_by(node: Node | None, operations: Container[str]) -> bool:
    """Whether what the node gives is that of one of these operations, such as ``"Sigmoid"``, but moved."""
    while node is not None and operation_of(node) in _MOVES:
        node = node.next_functions[0][0]
    return node is not None and operation_of(node) in operations


def operation_of(node: Node) -> str:
    """Its name without number and ending."""
    return node.name().partition("Backward")[0]

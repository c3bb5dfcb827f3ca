"""The loss of a running backward pass, and the nodes of autograd behind it."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.autograd.graph import Node

#: The most nodes of a loss that are visited, those of a loss and its model, and those on the way to the model's inputs.
_NODES, _MANY, _ALL = 64, 1024, 1 << 15
#: The note at the output of a watched model.
OUTPUT = "torch_gradmon output"
#: Operations that only move, choose, copy or bound what they get.
_MOVES = frozenset(
    (
        *("Alias", "Cat", "Clamp", "ClampMax", "ClampMin", "Clone", "Expand", "Gather", "Index", "IndexSelect", "MaskedSelect"),
        *("NanToNum", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "SplitWithSizes", "Squeeze", "Stack", "T", "ToCopy"),
        *("Transpose", "Unbind", "UnsafeSplit", "UnsafeView", "Unsqueeze", "View", "_DDPSink"),
    )
)


def notes_of(node: Node) -> dict[str, Any]:
    """The dict of a node of autograd that is there for notes. It goes with the graph, and must hold nothing of the model."""
    return node.metadata  # type: ignore[return-value]  # a method in the stubs


def losses_going_backward() -> Sequence[Tensor]:
    """The losses from which ``torch.autograd.backward`` goes backward now, in this thread or in one that waits for it.

    None if they are no single numbers, if it is asked for some gradients alone, or if it runs within another one, as those of checkpoints
    do, which accumulate the gradient of one loss in parts.
    """
    running = []
    frames = list(sys._current_frames().values())
    while frames:  # none is kept, this function's own least of all: it would keep all that its callers hold
        frame: FrameType | None = frames.pop()
        while frame is not None:
            if frame.f_code is torch.autograd.backward.__code__:
                running.append((frame.f_locals.get("tensors"), frame.f_locals.get("inputs")))
            frame = frame.f_back
    if len(running) != 1:
        return ()
    (tensors, inputs), *_ = running
    losses = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
    is_whole = inputs is None or (isinstance(inputs, tuple) and not inputs)  # older releases make it a tuple
    return losses if is_whole and all(isinstance(loss, Tensor) and loss.numel() == 1 for loss in losses) else ()


def nodes_of(losses: Sequence[Tensor], until: str) -> Iterator[Node]:
    """The nodes of losses, the last ones first, and none behind those with the note ``until`` or with parameters of their own."""
    for node, inputs in _walk(losses, _NODES):
        yield node
        if until in notes_of(node):
            inputs.clear()
        if own := [each for each in inputs if not each.next_functions]:
            inputs[:] = own


def nodes_to(losses: Sequence[Tensor], parameters: Container[int]) -> list[Node]:
    """The nodes of losses and of the model before them through which these ``parameters``, by id, get their gradients, the last ones first
    and without parameters; not all of a large model.
    """
    walked = [*_walk(losses, _MANY)]
    followers: dict[Node, list[Node]] = {}
    for node, inputs in walked:
        for each in inputs:
            followers.setdefault(each, []).append(node)
    found: set[Node] = set()
    waiting = [node for node, _ in walked if id(getattr(node, "variable", None)) in parameters]
    while waiting:
        for node in followers.get(waiting.pop(), ()):
            if node not in found:
                found.add(node)
                waiting.append(node)
    return [node for node, _ in walked if node in found]


def reaches_input(losses: Sequence[Tensor]) -> bool:
    """Whether losses have a gradient in a leaf that is no parameter, such as an input that an adversarial attack moves."""
    leaves = (getattr(node, "variable", None) for node, _ in _walk(losses, _ALL))
    return any(leaf is not None and not isinstance(leaf, nn.Parameter) for leaf in leaves)


def _walk(losses: Sequence[Tensor], most: int) -> Iterator[tuple[Node, list[Node]]]:
    """Nodes and their inputs, breadth first; the caller may take some of these away."""
    waiting = [loss.grad_fn for loss in losses]
    seen: set[Node] = set()
    while waiting and len(seen) < most:
        node = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        inputs = inputs_of(node)
        yield node, inputs
        waiting += inputs


def inputs_of(node: Node) -> list[Node]:
    return [each for each, _ in node.next_functions if each is not None]


def is_made_by(node: Node | None, operations: Container[str], is_exact: bool = False) -> bool:
    """Whether what the node gives is that of one of these operations, such as ``"Sigmoid"``, but moved; or, unless ``is_exact``, with a
    number added, or joined by others.
    """
    while node is not None and operation_of(node) not in operations:
        inputs, operation = inputs_of(node), operation_of(node)
        is_moved, is_single = operation in _MOVES, len(inputs) == 1
        is_passed = is_moved and is_single if is_exact else is_moved or (operation in ("Add", "Sub") and is_single)
        node = inputs[0] if is_passed else None
    return node is not None


def is_move(node: Node) -> bool:
    """Whether it only moves, chooses, copies or bounds numbers."""
    return operation_of(node) in _MOVES


def operation_of(node: Node) -> str:
    return node.name().partition("Backward")[0]

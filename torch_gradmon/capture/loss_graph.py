"""The loss of a running backward pass, and the nodes of autograd behind it."""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
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
#: Changes of shape, losses that bring output and target to one shape, and products of matrices, which may be scaled.
_VIEWS = frozenset(("ReshapeAlias", "UnsafeView", "View"))
_ELEMENTWISE = frozenset(("HuberLoss", "MseLoss", "SmoothL1Loss"))
_PRODUCTS = frozenset(("Bmm",))
#: The most rows of an embedding that is of kinds of tokens, such as questions and answers, and not of tokens.
_SEGMENTS = 4


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


def pairs_rows(losses: Sequence[Tensor]) -> bool:
    """Whether an elementwise loss has broadcast N outputs, ``[N, 1]`` beside constants ``[N]``, to ``[N, N]``. Differences of all pairs
    that are written out may be meant.
    """
    for node, inputs in _walk(losses, _NODES):
        if operation_of(node) in _ELEMENTWISE and len(inputs) == 1 and operation_of(inputs[0]) == "Expand":
            shape, before = _shape_of(inputs[0]), _shape_of(inputs_of(inputs[0])[0])
            if len(shape) == 2 and shape[0] == shape[1] == math.prod(before) > 2:
                return True
    return False


def mixes_classes(losses: Sequence[Tensor]) -> bool:
    """Whether a cross-entropy views an output ``[N, classes, ...]`` as ``[rows, classes]`` without a permutation, so that a row has numbers
    of other classes and places. As many places as classes may be what is to be told apart.
    """
    for node, inputs in _walk(losses, _NODES):
        if operation_of(node) != "LogSoftmax" or not inputs or operation_of(view := inputs[0]) not in _VIEWS:
            continue
        output, shape = inputs_of(view)[0], _shape_of(view)
        before = _shape_of(output) if OUTPUT in notes_of(output) else ()
        is_moved = len(shape) == 2 and len(before) > 2 and before[1] == shape[1] != before[-1]
        if is_moved and math.prod(before[2:]) not in (1, shape[1]):
            return True
    return False


@dataclass
class Sources:
    """What an output was made from, as far as autograd keeps it: read as it is, since unpacked, a checkpoint would compute it anew."""

    tokens: list[Tensor] = field(default_factory=list)  # ids of embeddings, [N, T], those of the nearest one first
    masks: dict[int, Tensor] = field(default_factory=dict)  # of attention, boolean or added to the scores, by address
    lengths: set[int] = field(default_factory=set)  # of sequences that attend to themselves
    is_masked: bool = False  # some attention may be, otherwise than by these
    #: numbers of sequences, and of places of each, in attention with heads and in recurrent layers
    spans: list[tuple[int, int]] = field(default_factory=list)


def sources_of(output: Tensor) -> Sources:
    found = Sources()
    changed: set[Node] = set()
    for node, inputs in _walk([output], _MANY):
        operation, shape = operation_of(node), _shape_of(node)
        if operation == "Embedding" and getattr(node, "_saved_weight_sym_argsize_0", 0) > _SEGMENTS:
            found.tokens += [each for each in _kept(node, "_raw_saved_indices") if type(each) is Tensor and each.ndim == 2]
        elif operation.startswith("ScaledDotProduct") and len(shape) == 4:
            found.lengths.add(shape[-2])
            found.spans.append((shape[0], shape[-2]))
            masks = _kept(node, "_raw_saved_attn_mask", "_raw_saved_attn_bias")
            plain = {each.data_ptr(): each for each in masks if type(each) is Tensor}
            found.masks.update(plain)
            found.is_masked |= len(plain) < len(masks) or getattr(node, "_saved_is_causal", True)
        elif operation in ("Softmax", "SafeSoftmax") and len(shape) > 2 and shape[-1] == shape[-2] and len(inputs) == 1:
            scores = inputs[0]
            while operation_of(scores) in _MOVES | {"Div", "Mul"} and len(inputs_of(scores)) == 1:
                (scores,) = inputs_of(scores)
            found.lengths.add(shape[-2])
            found.spans += [(shape[0], shape[-2])] * (len(shape) == 4)
            # weights that are multiplied afterwards are dropped out, or masked
            found.is_masked |= operation_of(scores) not in _PRODUCTS or node in changed
        elif operation in ("MkldnnRnnLayer", "CudnnRnn") and len(shape) == 3:
            is_first = operation == "CudnnRnn" and getattr(node, "_saved_batch_first", False)  # the other one is moved behind it
            found.spans.append((shape[0], shape[1]) if is_first else (shape[1], shape[0]))
        elif operation in ("Div", "Mul"):
            changed.update(inputs)
    return found


def _kept(node: Node, *names: str) -> list[Any]:
    """What it has saved under these names, packed where a hook has done so."""
    return [data for name in names if (data := getattr(getattr(node, name, None), "data", None)) is not None]


def _shape_of(node: Node) -> tuple[int, ...]:
    """Of its first output; of 0 dimensions where torch does not tell: before 2.1, and of nested tensors."""
    known = getattr(node, "_input_metadata", None)
    return tuple(known[0].shape) if known and not known[0].is_nested_tensor else ()


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

"""Losses as autograd has them: some go backward again, in the same step or in later ones, and some get what they cannot take."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ...capture.loss_graph import (
    OUTPUT,
    inputs_of,
    is_made_by,
    is_move,
    losses_going_backward,
    nodes_of,
    nodes_to,
    notes_of,
    operation_of,
)
from ..tallies import Tallies
from .probe import Interval

if TYPE_CHECKING:
    from torch.autograd.graph import Node

#: Steps before losses are looked at, in a row where they have more accumulations than forwards; the number of backward passes in which
#: these are, and how many have to be from an old loss.
_STEPS, _LOOKS, _SAME = 5, 8, 3
#: The most nodes of a loss that are visited.
_NODES = 32
#: Operations whose outputs lie between 0 and 1, and those that take logits.
_SQUASHES = frozenset(("Sigmoid", "Softmax", "Hardsigmoid"))
_TAKE_LOGITS = frozenset(("LogSoftmax", "LogSigmoid", "Logsumexp", "BinaryCrossEntropyWithLogits"))
#: Operations that take logarithms of probabilities, and those that give them.
_TAKE_LOGARITHMS = frozenset(("NllLoss", "NllLoss2D", "NllLossNd"))
_GIVE_LOGARITHMS = frozenset(("Log", "Log1P", "LogSigmoid", "LogSoftmax", "Logaddexp", "Sub"))
#: Operations that add losses, that make another multiple of one, and that make one number of many.
_SUMS = frozenset(("Add", "Sub"))
_MULTIPLES = frozenset(("Div", "Mul", "Neg", "Squeeze", "ToCopy", "View"))
_REDUCTIONS = frozenset(("Mean", "Sum"))


class LossChecks:
    """Looks at the losses of a few backward passes of one optimizer.

    A loss that goes backward again is recognised by a mark at its nodes. Equal gradients would prove nothing: those of an absolute error
    are equal for many targets.

    Args:
        tallies: receive the findings.
        key: the optimizer's key there.

    Attributes:
        is_looking: the losses of the next backward passes are looked at.
        is_idle: there are none to look at, and none went backward again and again.
    """

    def __init__(self, tallies: Tallies, key: int) -> None:
        self.is_looking = self.is_idle = False
        self._tallies, self._key = tallies, key
        self._steps = self._counting = self._looks = self._same = 0
        self._mark, self._visited = f"torch_gradmon loss {id(self)}", f"torch_gradmon step {id(self)}"

    def step_began(self, forwards: int, fired: int, is_alone: bool, name: str) -> None:
        """Count the forwards and the accumulations since the last step; there were some of the latter.

        ``is_alone``: no other optimizer is attached, of whose losses the forwards may be; ``name``: of the probe.
        """
        self._steps += 1
        self._counting = self._counting + 1 if is_alone and forwards < fired else 0
        if self._counting == _STEPS:
            self._looks = 0  # whatever earlier passes were
        is_certain = is_alone and self._same >= _SAME
        self._tallies.check("backward-twice", self._key, is_certain, name)
        self.is_looking = self._steps >= _STEPS and self._looks < _LOOKS and not is_certain
        self.is_idle = self._looks >= _LOOKS and not is_certain

    def accumulated(self, interval: Interval, parameters: Container[int]) -> None:
        """Look at the loss of the running backward pass. Synchronises only for one that gets what it cannot take.

        ``parameters``: the optimizer's, by id; what another network made may have a loss of its own.
        """
        self._looks += 1
        self.is_looking = self._looks < _LOOKS and self._same < _SAME
        losses = losses_going_backward()
        terms = [node for loss in losses for node in _terms(loss)]
        nodes = nodes_to(losses, parameters)
        # a loop that clears the gradient in between may well look at it and begin again
        is_again = any(self._mark in notes_of(node) for node in terms) and not (interval.drops or interval.writes)
        is_old = any(notes_of(node).get(self._visited, self._steps) < self._steps for node in nodes if not _is_cast(node))
        self._same += is_again or is_old
        for node in terms:
            notes_of(node)[self._mark] = True
        for node in nodes:
            notes_of(node)[self._visited] = self._steps
        if losses:
            is_squashed = any(is_made_by(each, _SQUASHES) for each in _taken_by(_TAKE_LOGITS, losses))
            self._tallies.check("softmax-before-loss", self._key, is_squashed, "")
            is_raw = not all(is_made_by(each, _GIVE_LOGARITHMS) for each in _taken_by(_TAKE_LOGARITHMS, losses))
            is_below = is_raw and any(bool(loss < 0) for loss in losses)
            self._tallies.check("log-softmax-missing", self._key, is_below, "")


def _taken_by(operations: Container[str], losses: Sequence[Tensor]) -> Iterator[Node | None]:
    """What goes into these operations of losses."""
    return (node.next_functions[0][0] for node in nodes_of(losses, OUTPUT) if operation_of(node) in operations)


def _terms(loss: Tensor) -> list[Node]:
    """The node of a loss and those that it is a multiple, a mean or a sum of. Terms with factors may add up to what is meant: left out."""
    found: list[Node] = []
    node, is_number = loss.grad_fn, True
    while node is not None and len(found) < _NODES:
        found.append(node)
        inputs, operation = _inputs(node), operation_of(node)
        is_passed = is_number and len(inputs) == 1 and operation in _MULTIPLES | _REDUCTIONS
        node = inputs[0] if is_passed else None
        is_number &= operation not in _REDUCTIONS  # factors of its elements may differ
    waiting = found[:1]
    while waiting and len(found) < _NODES:
        node = waiting.pop()
        if operation_of(node) in _SUMS:
            terms = [each for each in _inputs(node) if each not in found]
            found, waiting = [*found, *terms], [*waiting, *terms]
    return found


def _is_cast(node: Node) -> bool:
    """Whether it casts or moves a parameter, which autocast does once for all calls within it."""
    return is_move(node) and not _inputs(node)


def _inputs(node: Node) -> list[Node]:
    """Those with a gradient, without parameters."""
    return [each for each in inputs_of(node) if each.next_functions]

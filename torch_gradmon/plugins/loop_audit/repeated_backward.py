"""Backward passes from a loss that has had one: in the same step, or in later ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ...capture.loss_graph import losses_going_backward, notes_of, operation_of
from .probe import Interval

if TYPE_CHECKING:
    from torch.autograd.graph import Node

#: Steps before losses are looked at, in a row where they have more accumulations than forwards; the number of backward passes in which
#: these are, and how many have to be from an old loss.
_STEPS, _LOOKS, _SAME = 5, 8, 3
#: The most nodes of a loss that are visited.
_NODES = 32
#: Operations that add losses, that make another multiple of one, and that make one number of many.
_SUMS = frozenset(("Add", "Sub"))
_MULTIPLES = frozenset(("Div", "Mul", "Neg", "Squeeze", "ToCopy", "View"))
_REDUCTIONS = frozenset(("Mean", "Sum"))


class RepeatedBackward:
    """Recognises losses that go backward again, by looking at those of a few backward passes.

    Equal gradients would prove nothing: those of an absolute error are equal for many targets. So the nodes of a loss get a mark.

    Attributes:
        is_looking: the losses of the next backward passes are looked at.
        is_certain: losses went backward again and again.
        is_idle: neither that, nor are there losses to look at.
    """

    def __init__(self) -> None:
        self.is_looking = self.is_certain = self.is_idle = False
        self._steps = self._counting = self._looks = self._same = 0
        self._has_looked = False
        self._mark = f"torch_gradmon {id(self)}"

    def step_began(self, forwards: int, fired: int) -> None:
        """Count the forwards and the accumulations since the last step; there were some of the latter."""
        self._steps += 1
        self._counting = self._counting + 1 if forwards < fired else 0
        self.is_certain = self._same >= _SAME
        if self._counting == _STEPS:
            self._looks, self._has_looked = 0, False  # whatever earlier passes were
        self.is_looking = self._steps >= _STEPS and not (self._has_looked or self.is_certain)
        self.is_idle = self._has_looked and not self.is_certain

    def accumulated(self, interval: Interval) -> None:
        """Look at the loss of the running backward pass. Synchronises nothing."""
        self._looks += 1
        nodes = [node for loss in losses_going_backward() for node in _terms(loss)]
        # a loop that clears the gradient in between may well look at it and begin again
        self._same += any(self._mark in notes_of(node) for node in nodes) and not (interval.drops or interval.writes)
        for node in nodes:
            notes_of(node)[self._mark] = True
        self._has_looked = self._looks >= _LOOKS
        self.is_looking = not self._has_looked and self._same < _SAME


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


def _inputs(node: Node) -> list[Node]:
    """Those with a gradient, without parameters."""
    return [each for each, _ in node.next_functions if each is not None and each.next_functions]

"""Backward passes from a loss that has had one: in the same step, or in later ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ...capture.loss_graph import losses_going_backward, notes_of
from .probe import Interval

if TYPE_CHECKING:
    from torch.autograd.graph import Node

#: Steps in a row before losses are looked at, the backward passes in which these are, and how many have to be from an old loss.
_STEPS, _LOOKS, _SAME = 5, 8, 3
#: The most nodes of a loss that are visited.
_NODES = 32
#: Nodes that add losses, and those that multiply one by a number.
_SUMS, _MULTIPLES = frozenset(("AddBackward0", "SubBackward0")), frozenset(("MulBackward0", "DivBackward0", "NegBackward0"))


class RepeatedBackward:
    """Recognises losses that go backward again, where there are more accumulations than forwards.

    Equal gradients would prove nothing: those of an absolute error are equal for many targets. So the nodes of a loss get a mark.

    Attributes:
        is_counting: the last step had more accumulations than forwards.
        is_certain: losses went backward again and again.
    """

    def __init__(self) -> None:
        self.is_counting = self.is_certain = False
        self._steps = self._looks = self._same = 0
        self._mark = f"torch_gradmon {id(self)}"

    def step_began(self, forwards: int, fired: int) -> None:
        """Count the forwards and the accumulations since the last step; there were some of the latter."""
        self.is_counting = forwards < fired
        self._steps = self._steps + 1 if self.is_counting else 0
        self.is_certain = self.is_counting and self._same >= _SAME

    def accumulated(self, interval: Interval) -> None:
        """Look at the loss of the running backward pass, a few times. Synchronises nothing."""
        if self._steps < _STEPS or self._looks >= _LOOKS or self._same >= _SAME:
            return
        self._looks += 1
        nodes = [node for loss in losses_going_backward() for node in _terms(loss)]
        # a loop that clears the gradient in between may well look at it and begin again
        self._same += any(self._mark in notes_of(node) for node in nodes) and not (interval.drops or interval.writes)
        for node in nodes:
            notes_of(node)[self._mark] = True


def _terms(loss: Tensor) -> list[Node]:
    """The nodes of a loss, and of the losses that it is a weighted sum of."""
    found: list[Node] = []
    waiting = [loss.grad_fn]
    while waiting and len(found) < _NODES:
        node = waiting.pop()
        if node is None or node in found:
            continue
        found.append(node)
        nodes = [each for each, _ in node.next_functions if each is not None]
        if node.name() in _SUMS or (node.name() in _MULTIPLES and len(nodes) == 1):
            waiting += nodes
    return found

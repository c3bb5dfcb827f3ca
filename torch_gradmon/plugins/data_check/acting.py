"""Whether the data of a training depend on its model, as those of a policy or of a GAN do: the loss need not fall then."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...capture.loss_graph import OUTPUT, nodes_of, notes_of

#: Elements of a row that are compared, and rows that are kept.
_COMPARED, _KEPT = 64, 4096
#: The least share of rows in the training that the model has acted on, and the largest share of calls on rows that had one before.
_TRAINED, _REPEATED = 0.05, 0.1
#: The least share of rows that it has acted on just before their step, as it also does for a look at some of them.
_AT_ONCE = 0.5
#: The fewest rows of a training with acted ones.
_FEWEST = 8
#: The least share of steps, and their fewest number, in which another model trains through this one.
_THROUGH, _STEPS = 1 / 16, 4


class Acting:
    """Looks for rows that the model was called on without gradients, in training mode and for the first time, and that it trains on later.

    Such calls are of fewer rows than a batch: others prepare a step. A validation is on rows that are never trained on, or again and
    again. All is compared on the device, and nothing is synchronised.

    It also looks for an opponent: another model that trains through this one, between the steps of this one. If that is watched, too, it
    gets a note.

    Args:
        note: writes facts about the run to the run directory.

    Attributes:
        is_so: the data depend on the model, as far as is known.
    """

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note
        self.is_so = False
        self._batch = 0  # the most rows of a step
        self._kept: Tensor | None = None  # identities of rows that it was called on, [_KEPT]
        self._again: Tensor | None = None  # how many of the rows since the last step had a call before
        self._next = self._fresh = 0  # the place of the next row, and how many came since the last step
        self._sums = [0.0] * 5
        self._steps = self._through = self._opposed = 0

    @torch.inference_mode(False)
    @torch.no_grad()
    def called(self, tensors: Sequence[Tensor]) -> None:
        """The model is called without gradients, in inference mode perhaps."""
        data = _rows(tensors)
        if data is None or 2 * len(data) >= max(self._batch, 2) or (self._kept is not None and self._kept.device != data.device):
            return
        rows = _identities(data)
        if self._kept is None:
            self._kept = torch.full((_KEPT,), -1, dtype=torch.int64, device=rows.device)
        again = torch.isin(rows, self._kept).sum()
        self._again = again if self._again is None else self._again + again
        self._kept[(torch.arange(len(rows), device=rows.device) + self._next) % _KEPT] = rows
        self._next, self._fresh = (self._next + len(rows)) % _KEPT, self._fresh + len(rows)

    @torch.no_grad()
    def trained(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """A step of the training begins, with these inputs.

        Returns:
            Numbers of rows, int64 ``[5]``: in this step, of these acted on before the last one and since then, in calls since the last
            step, and of these called on before. None without any calls.
        """
        data = _rows(tensors)
        if data is None:
            return None
        self._batch, self._steps = max(self._batch, len(data)), self._steps + 1
        if self._kept is None or self._kept.device != data.device:
            return None
        rows = _identities(data)
        is_data = rows != 0  # rows of zeros are padding
        in_turn = self._kept.roll(-self._next)  # the oldest first
        at = max(_KEPT - self._fresh, 0)
        acted, at_once = ((torch.isin(rows, known) & is_data).sum() for known in (in_turn[:at], in_turn[at:]))
        counts = [torch.full_like(acted, number) for number in (len(rows), self._fresh)]
        again = torch.zeros_like(acted) if self._again is None else self._again
        self._again, self._fresh = None, 0
        return torch.stack([counts[0], acted, at_once, counts[1], again])

    def made(self, output: Tensor) -> None:
        """The model made this output, which has a graph."""
        if output.grad_fn is not None:
            notes_of(output.grad_fn)[OUTPUT] = weakref.ref(self)

    def pass_through(self, data: Tensor) -> bool:
        """Whether the first input of a step comes from another model that is trained through this one, and not only from other tensors
        with a gradient, as adversarial ones do.
        """
        nodes = list(nodes_of([data], OUTPUT))
        makers = [maker for node in nodes if (maker := notes_of(node).get(OUTPUT, _nothing)()) is not None]
        if not makers and not any(isinstance(getattr(node, "variable", None), nn.Parameter) for node in nodes):
            return False
        self._through += 1
        for maker in makers if self._has_opponent else ():
            maker.meet_opponent()
        self._judge()
        return True

    def meet_opponent(self) -> None:
        """What the model made went through its opponent."""
        self._opposed += 1
        self._judge()

    @property
    def _has_opponent(self) -> bool:
        return self._through >= max(_STEPS, _THROUGH * self._steps) and self._steps >= _STEPS

    def add(self, numbers: Sequence[float]) -> None:
        """Count what one step returned, once it is on the host."""
        self._sums = [one + other for one, other in zip(self._sums, numbers, strict=True)]
        self._judge()

    def _judge(self) -> None:
        trained, acted, at_once, called, again = self._sums
        is_so = acted >= max(_FEWEST, _TRAINED * trained) or acted + at_once >= max(_FEWEST, _AT_ONCE * trained)
        is_so &= again <= _REPEATED * called
        is_so |= self._has_opponent or self._opposed >= _STEPS
        if is_so != self.is_so:
            self.is_so = is_so
            self._note(acts=is_so)


def _nothing() -> None:
    """Of a node without a note."""


def _rows(tensors: Sequence[Tensor]) -> Tensor | None:
    """The first input of floating point as ``[rows, elements]``; of images, a row is an image."""
    first = next((tensor for tensor in tensors if torch.is_floating_point(tensor) and tensor.ndim), None)
    if first is None or not first.numel():
        return None
    return first.detach().flatten(1) if first.ndim >= 4 else first.detach().reshape(-1, first.shape[-1])


def _identities(rows: Tensor) -> Tensor:
    """One number for each of the first rows, int64 ``[rows]``."""
    bits = rows[:_KEPT, :_COMPARED].float().contiguous().view(torch.int32).long()
    odd = torch.arange(1, bits.shape[1] + 1, device=bits.device) * 2654435761 % 2**31 * 2 + 1  # Knuth's multiplier
    return (bits * odd).sum(1)  # whole numbers: the same in any order and shape

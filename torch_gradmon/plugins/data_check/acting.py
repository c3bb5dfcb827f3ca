"""Whether the data of a training depend on its model, as those of a policy or of a GAN do: the loss need not fall then."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...capture.loss_graph import notes_of
from .head import OUTPUT

#: Elements of a row that are compared, and rows that are kept.
_COMPARED, _KEPT = 64, 4096
#: The least share of rows in the training that the model has acted on, and the largest share of calls on rows that had one before.
_TRAINED, _REPEATED = 0.05, 0.1
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
        self._next = 0
        self._called: list[Tensor] = []  # by call since the last step: rows, and those of them that had a call before
        self._sums = [0.0, 0.0, 0.0, 0.0]
        self._steps = self._through = self._opposed = 0

    @torch.no_grad()
    def called(self, tensors: Sequence[Tensor]) -> None:
        """The model is called without gradients."""
        rows = _identities(tensors)
        if rows is None or 2 * len(rows) >= max(self._batch, 2) or (self._kept is not None and self._kept.device != rows.device):
            return
        if self._kept is None:
            self._kept = torch.full((_KEPT,), -1, dtype=torch.int64, device=rows.device)
        rows = rows[:_KEPT]
        again = torch.isin(rows, self._kept).sum()
        self._called.append(torch.stack([torch.full_like(again, len(rows)), again]))
        places = (torch.arange(len(rows), device=rows.device) + self._next) % _KEPT
        self._kept[places] = rows
        self._next = (self._next + len(rows)) % _KEPT

    @torch.no_grad()
    def trained(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """A step of the training begins, with these inputs.

        Returns:
            Numbers of rows, int64 ``[4]``: in this step, of these acted on, in calls since the last step, of these called on before. None
            without any calls.
        """
        rows = _identities(tensors)
        if rows is None:
            return None
        self._batch, self._steps = max(self._batch, len(rows)), self._steps + 1
        if self._kept is None or self._kept.device != rows.device:
            return None
        acted = (torch.isin(rows, self._kept) & (rows != 0)).sum()  # rows of zeros are padding
        calls = torch.stack(self._called).sum(0) if self._called else torch.zeros(2, dtype=torch.int64, device=rows.device)
        self._called.clear()
        return torch.cat([torch.stack([torch.full_like(acted, len(rows)), acted]), calls])

    def made(self, output: Tensor) -> None:
        """The model made this output, which has a graph."""
        if output.grad_fn is not None:
            notes_of(output.grad_fn)[OUTPUT] = weakref.ref(self)

    def passed_through(self, data: Tensor) -> None:
        """The first input of a step has a graph of its own: another model is trained through this one."""
        self._through += 1
        if self._has_opponent and data.grad_fn is not None:
            maker = notes_of(data.grad_fn).get(OUTPUT, lambda: None)()
            if maker is not None:
                maker.meet_opponent()
        self._judge()

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
        trained, acted, called, again = self._sums
        is_so = acted >= max(_FEWEST, _TRAINED * trained) and again <= _REPEATED * called
        is_so |= self._has_opponent or self._opposed >= _STEPS
        if is_so != self.is_so:
            self.is_so = is_so
            self._note(acts=is_so)


def _identities(tensors: Sequence[Tensor]) -> Tensor | None:
    """One number for each row of the first input of floating point, int64 ``[rows]``; of images, a row is an image."""
    first = next((tensor for tensor in tensors if torch.is_floating_point(tensor) and tensor.ndim), None)
    if first is None or not first.numel():
        return None
    rows = first.detach().flatten(1) if first.ndim >= 4 else first.detach().reshape(-1, first.shape[-1])
    bits = rows[:, :_COMPARED].float().contiguous().view(torch.int32).long()
    odd = torch.arange(1, bits.shape[1] + 1, device=bits.device) * 2654435761 % 2**31 * 2 + 1  # Knuth's multiplier
    return (bits * odd).sum(1)  # whole numbers: the same in any order and shape

"""Data that a loop holds and does not train on, where it has had the same batch all the time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FrameType

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ...core.setup_mistakes import IN_LOADER, IN_LOOP

#: The most elements of a tensor that is searched for a batch.
_MOST = 1 << 24


def left_out(batch: Sequence[Tensor]) -> dict[str, float]:
    """What the functions that called this one hold beside their batch: a loader of more such batches, or a tensor that it is a part of.

    Evidence for a finding; empty if there is none. Tensors are searched on the CPU only, and nothing is synchronised.
    """
    if not batch:
        return {}
    rows = len(batch[0]) if batch[0].ndim else 0
    for value in _locals():
        if isinstance(value, DataLoader) and (batches := _batches(value)) > 1 and value.batch_size == rows:
            return {IN_LOADER: float(batches)}
        if isinstance(value, Tensor) and any(_holds(value, part) for part in batch):
            return {IN_LOOP: float(len(value)), "rows that it trains on": float(rows)}
    return {}


def _locals() -> Iterator[object]:
    """The local variables of the callers, the nearest first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield from list(frame.f_locals.values())
        frame = frame.f_back


def _batches(loader: DataLoader[object]) -> int:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # of a stream
        return 0


@torch.no_grad()
def _holds(whole: Tensor, part: Tensor) -> bool:
    """Whether the first and the last row of ``part`` are rows of the larger tensor ``whole``."""
    if type(whole) is not Tensor or whole.device.type != "cpu" or part.device.type != "cpu" or whole.dtype != part.dtype:
        return False
    if part.ndim < 2 or whole.shape[1:] != part.shape[1:] or len(whole) <= len(part) or not 0 < whole.numel() <= _MOST:
        return False
    return all(bool((whole == row).flatten(1).all(1).any()) for row in (part[0], part[-1]))

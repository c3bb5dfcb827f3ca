"""Batches small tensors, to amortise call overhead."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor

from ...statistics.eager import SMALL
from ...statistics.tensor_access import NARROW, is_plain

#: Elements in the buffer: 4 MB of float32, copied while they are in a cache.
CAPACITY = 1 << 20
T = TypeVar("T")


class SmallTensorBatch(Generic[T]):
    """A bounded buffer of copies of small CPU tensors, each with an item of data."""

    def __init__(self) -> None:
        self._pool: Tensor | None = None
        self._used = 0
        self._waiting: list[tuple[T, Tensor]] = []

    def takes(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` should be batched: it is on the CPU, small, and exact in float32."""
        return tensor.numel() <= SMALL and tensor.dtype in NARROW and is_plain(tensor)

    def has_room(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` fits without draining the buffer."""
        return self._used + tensor.numel() <= CAPACITY

    def put(self, item: T, tensor: Tensor, inverse_scale: Tensor | None = None) -> None:
        """Copy ``tensor``, for which there must be room, times ``inverse_scale``, in float32 as ``GradScaler.unscale_`` does."""
        if self._pool is None:
            with torch.inference_mode(False):  # the buffer is written to outside of that mode
                self._pool = torch.empty(CAPACITY, dtype=torch.float32, device="cpu")
        copy = self._pool[self._used : self._used + tensor.numel()].view(tensor.shape).copy_(tensor)
        if inverse_scale is not None:
            copy.mul_(inverse_scale)
        self._used += tensor.numel()
        self._waiting.append((item, copy))

    def drain(self) -> list[tuple[T, Tensor]]:
        """All items and copies, in order; the copies are valid until the next :meth:`put`."""
        waiting, self._waiting, self._used = self._waiting, [], 0
        return waiting

"""Small tensors wait together: measured one by one, each would cost a dozen calls for a few numbers."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor

from ...statistics.eager import SMALL
from ...statistics.tensor_access import NARROW, is_plain

#: Elements that wait at most: 4 MB of float32, copied while they are in a cache anyway.
CAPACITY = 1 << 20
T = TypeVar("T")


class SmallTensorBatch(Generic[T]):
    """A bounded buffer of copies of small CPU tensors, each with what is known of it."""

    def __init__(self) -> None:
        self._pool: Tensor | None = None
        self._used = 0
        self._waiting: list[tuple[T, Tensor]] = []

    def takes(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is one that should wait: on the CPU, small, and exact in float32."""
        return tensor.numel() <= SMALL and tensor.dtype in NARROW and is_plain(tensor)

    def has_room(self, tensor: Tensor) -> bool:
        """Whether it can be put without emptying the buffer first."""
        return self._used + tensor.numel() <= CAPACITY

    def put(self, item: T, tensor: Tensor, inverse_scale: Tensor | None = None) -> None:
        """Copy ``tensor``, for which there is room; times ``inverse_scale``, in float32 as ``GradScaler.unscale_`` does."""
        if self._pool is None:
            with torch.inference_mode(False):  # it will be written to outside of that mode
                self._pool = torch.empty(CAPACITY, dtype=torch.float32, device="cpu")
        copy = self._pool[self._used : self._used + tensor.numel()].view(tensor.shape).copy_(tensor)
        if inverse_scale is not None:
            copy.mul_(inverse_scale)
        self._used += tensor.numel()
        self._waiting.append((item, copy))

    def drain(self) -> list[tuple[T, Tensor]]:
        """All that waits, in order; the copies are good until the next one is put."""
        waiting, self._waiting, self._used = self._waiting, [], 0
        return waiting

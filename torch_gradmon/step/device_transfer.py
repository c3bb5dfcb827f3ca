"""The one way of measured values to the host: started when a step ends, waited for when somebody asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..statistics.tensor_access import accumulator_dtype


class _DeviceGroup(NamedTuple):
    """All values from one device."""

    positions: list[int]
    packed: Tensor
    copied: torch.cuda.Event | None  # None: `packed` is still on its device


class DeviceToHostCopy:
    """Tensors on their way to the host, as float64, in one packed copy for each device that they are on.

    From a CUDA device the copy goes to pinned memory and runs behind what the device is doing; nothing waits for it but
    :meth:`land`. Other devices are read when :meth:`land` is called.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        by_device: dict[torch.device, list[int]] = {}
        for position, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device, []).append(position)
        self._parcels = [_send(device, positions, tensors) for device, positions in by_device.items()]

    @property
    def is_local(self) -> bool:
        """Whether all of it is on the host already."""
        return all(parcel.packed.device.type == "cpu" and parcel.copied is None for parcel in self._parcels)

    def is_ready(self) -> bool:
        """Whether :meth:`land` would wait for nothing. Does not synchronise."""
        return all(
            parcel.packed.device.type == "cpu" if parcel.copied is None else parcel.copied.query()  # type: ignore[no-untyped-call]
            for parcel in self._parcels
        )

    def wait(self) -> None:
        """Wait for the copies that are on their way."""
        for parcel in self._parcels:
            if parcel.copied is not None:
                parcel.copied.synchronize()

    def land(self) -> list[Tensor]:
        """The tensors on the host, in order. Waits for the copies, and for nothing that was queued after them."""
        self.wait()
        host = list(self._tensors)
        for parcel in self._parcels:
            values = parcel.packed.to("cpu", torch.float64)
            pieces = torch.split(values, [self._tensors[p].numel() for p in parcel.positions])
            for position, piece in zip(parcel.positions, pieces, strict=True):
                host[position] = piece.reshape(self._tensors[position].shape)
        return host


def _send(device: torch.device, positions: list[int], tensors: Sequence[Tensor]) -> _DeviceGroup:
    packed = torch.cat([tensors[p].reshape(-1).to(accumulator_dtype(device)) for p in positions])
    if device.type != "cuda":
        return _DeviceGroup(positions, packed, None)
    # the caching allocator for pinned memory keeps these few kilobytes for the next step
    pinned = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
    with torch.cuda.device(device):
        pinned.copy_(packed, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
    return _DeviceGroup(positions, pinned, copied)

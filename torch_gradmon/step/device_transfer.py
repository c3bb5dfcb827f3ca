"""The only transfer of measured values to the host: started when a step ends, awaited when the values are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.accelerator import copied_to_host
from ..statistics.tensor_access import accumulator_dtype


class _DeviceGroup(NamedTuple):
    """All values from one device."""

    positions: list[int]
    packed: Tensor
    copied: Any  # the event to wait for; None: `packed` is still on its device


class DeviceToHostCopy:
    """An asynchronous copy of tensors to the host, as float64, packed into one copy per device.

    The copy goes to pinned memory, queued behind the device's work; only :meth:`land` waits for it. Devices without streams are read in
    :meth:`land`.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._host: list[Tensor] = []  # those of other devices are replaced when they land
        by_device: dict[torch.device, list[int]] = {}
        for position, tensor in enumerate(tensors):
            if tensor.is_cpu:  # without packing it
                tensor = tensor.to(torch.float64, copy=True)
            else:
                by_device.setdefault(tensor.device, []).append(position)
            self._host.append(tensor)
        self._groups = [_send(device, positions, tensors) for device, positions in by_device.items()]

    @property
    def is_local(self) -> bool:
        """Whether all tensors were on the host already."""
        return not self._groups

    def is_ready(self) -> bool:
        """Whether :meth:`land` would not wait. Does not synchronise."""
        return all(group.copied is not None and group.copied.query() for group in self._groups)

    def wait(self) -> None:
        """Wait for the copies."""
        for group in self._groups:
            if group.copied is not None:
                group.copied.synchronize()

    def land(self) -> list[Tensor]:
        """The tensors on the host, in order. Waits for the copies, but not for work queued after them."""
        self.wait()
        for group in self._groups:
            values = group.packed.to("cpu", torch.float64)
            pieces = torch.split(values, [self._host[p].numel() for p in group.positions])
            for position, piece in zip(group.positions, pieces, strict=True):
                self._host[position] = piece.reshape(self._host[position].shape)
        self._groups = []
        return self._host


def _send(device: torch.device, positions: list[int], tensors: Sequence[Tensor]) -> _DeviceGroup:
    packed = torch.cat([tensors[p].reshape(-1).to(accumulator_dtype(device)) for p in positions])
    return _DeviceGroup(positions, *copied_to_host(packed))

"""The fingerprints of one check on one rank: computed on the devices, copied to the host without a wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ...statistics.fingerprint import fingerprints, packed, unpacked
from ...step.buffer import DeviceToHostCopy
from ...step.ranks import digest_of
from .items import PARAMETER, Item

#: Fingerprints by kind and name.
Found = dict[tuple[str, str], int]


class Snapshot:
    """The fingerprints of all that ranks have in common in one step.

    Args:
        step: its number.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._labels: list[tuple[str, str, str]] = []
        self._layout: list[tuple[str, str, tuple[int, ...], str]] = []
        self._parts: list[Tensor] = []
        self._batch, self._has_buffers = 0, False
        self._copy: DeviceToHostCopy | None = None

    def add_batch(self, tensors: Sequence[Tensor]) -> None:
        """Take the fingerprints of this rank's first batch of the step."""
        if not self._batch and tensors and not self._parts and len({tensor.device for tensor in tensors}) == 1:
            self._batch = len(tensors)
            self._parts.append(packed(fingerprints(tensors)))

    def add_buffers(self, items: Sequence[Item]) -> None:
        """Take the fingerprints of buffers as they are in the first pass of the step."""
        if not self._has_buffers:
            self._has_buffers = True
            self.add(items)

    def add(self, items: Sequence[Item]) -> None:
        """Take the fingerprints of ``items`` as they are now."""
        by_device: dict[torch.device, list[Item]] = {}
        for item in items:
            by_device.setdefault(item.tensor.device, []).append(item)
        for each in by_device.values():
            self._labels += [(item.share, item.kind, item.name) for item in each]
            self._parts.append(packed(fingerprints([item.tensor for item in each])))
        parameters = [item for item in items if item.kind == PARAMETER]
        self._layout += [(item.share, item.name, tuple(item.tensor.shape), str(item.tensor.dtype)) for item in parameters]

    def start_copy(self) -> None:
        """All is there: send it to the host."""
        self._copy = DeviceToHostCopy(self._parts)

    def is_ready(self) -> bool:
        """Whether the values are on the host."""
        return self._copy is not None and self._copy.is_ready()

    @cached_property
    def _values(self) -> list[int]:
        assert self._copy is not None
        parts = [unpacked(part) for part in self._copy.land()]
        found: list[int] = torch.cat(parts).tolist() if parts else []
        return found

    @property
    def batch(self) -> str | None:
        """A digest of the batch; None if it is not known."""
        return digest_of(self._values[: self._batch]) if self._batch else None

    @cached_property
    def by_share(self) -> Mapping[str, Found]:
        """Fingerprints by what ranks should have in common. Ranks with other parameters have other keys. Waits for the copy."""
        layout = digest_of(sorted(self._layout))
        found: dict[str, Found] = {}
        for (share, kind, name), value in zip(self._labels, self._values[self._batch :], strict=True):
            found.setdefault(f"{layout}|{share}", {})[kind, name] = value
        return found

    def digests(self) -> dict[str, str]:
        """One digest for each share: equal if all fingerprints are."""
        return {share: digest_of(sorted(found.items())) for share, found in self.by_share.items()}

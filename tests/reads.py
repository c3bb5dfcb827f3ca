"""Counts what brings values to the host."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchDispatchMode):
    """Counts what brings values from ``device`` to the host: scalars, and copies to another device."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = device
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._local_scalar_dense.default and args[0].device.type == self.device:
            self.counts["scalar"] += 1
        from_device = any(isinstance(x, torch.Tensor) and x.device.type == self.device for x in args)
        if from_device and isinstance(result, torch.Tensor) and result.device.type != self.device:
            self.counts["copy"] += 1
        return result

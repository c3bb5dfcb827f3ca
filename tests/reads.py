"""Instruments that see the monitor's operations; and one that counts what brings values to the host."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_gradmon.core import torch_modes as modes


class Instrument(TorchDispatchMode):
    """A dispatch mode that also sees the monitor's operations, which are outside of all modes otherwise."""

    def __enter__(self) -> Any:
        self._hidden = modes._disable_current_modes
        modes._disable_current_modes = nullcontext  # type: ignore[assignment]
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        modes._disable_current_modes = self._hidden


class HostReads(Instrument):
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

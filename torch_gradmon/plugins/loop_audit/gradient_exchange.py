"""Exchanges of gradients between ranks, within the backward pass."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from .probe import Probe


class GradientExchange:
    """Knows when a backward pass exchanges gradients, and when that has ended.

    Args:
        module: the watched model.
        call: calls a function within the monitor's fence.

    Attributes:
        has_ranks: gradients may be exchanged.
        is_active: accumulations have to be reported.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._call, self._settling = call, set[Probe]()
        parallel = sys.modules.get("torch.nn.parallel.distributed")
        kind = getattr(parallel, "DistributedDataParallel", ())
        # the wrapper whose flag shows whether a backward pass exchanges gradients
        self._ddp = next((weakref.ref(child) for child in module.modules() if isinstance(child, kind)), None)
        self.update()

    def update(self) -> None:
        """Look whether there are ranks by now."""
        distributed = torch.distributed
        self.has_ranks = distributed.is_available() and distributed.is_initialized()
        self.is_active = self.has_ranks or self._ddp is not None

    def accumulated(self, probe: Probe) -> None:
        """Count the exchange of a gradient that was accumulated, if there is any."""
        ddp = None if self._ddp is None else self._ddp()
        if probe.is_sharded or (ddp is not None and bool(getattr(ddp, "require_backward_grad_sync", False))):
            probe.interval.exchanged()
        if self.has_ranks and probe not in self._settling:
            # look again when DDP has copied the reduced gradients back, which it does in such a callback
            self._settling.add(probe)
            engine = Variable._execution_engine
            settle = functools.partial(self._call, self._settled, probe)
            engine.queue_callback(lambda: engine.queue_callback(settle))

    def _settled(self, probe: Probe) -> None:
        self._settling.discard(probe)
        probe.settled()

"""Which calls are running: what is to report its end, and was interrupted, runs no longer."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

import torch
from torch import nn


def running_calls(module: nn.Module) -> int:
    """How many calls of ``module`` are running, in all threads. Slow."""
    return _running(nn.Module._call_impl.__code__, module)


def is_in_backward() -> bool:
    """Whether a backward pass is running, in any thread. Slow, unless it is in this one."""
    return torch._C._current_graph_task_id() != -1 or _running(torch.autograd.graph._engine_run_backward.__code__) > 0


def _running(code: CodeType, of: object = None) -> int:
    calls = 0
    for last in sys._current_frames().values():
        frame: FrameType | None = last
        while frame is not None:
            if frame.f_code is code:
                values = frame.f_locals
                calls += of is None or values.get("self") is of
                if isinstance(values, dict):
                    values.clear()  # the snapshot would keep all values alive until the frame ends
            frame = frame.f_back
    return calls

"""Modes of torch: what others put around the model's forward must not see our operations; and the random generators."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def unseen() -> AbstractContextManager[object]:
    """A context outside of all dispatch modes.

    Selective activation checkpointing keeps the results of operations in order, and would hand ours to the model's
    recomputation; flop counters would count them.
    """
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def rng_states() -> dict[str, Tensor]:
    """The states of torch's random generators by device, uint8 on the CPU: that of the CPU, and of the current GPU if it is used.

    They are on the host, so nothing waits for a device.
    """
    with unseen():
        states = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            with contextlib.suppress(RuntimeError):  # while a graph is captured it cannot be asked for
                device = torch.cuda.current_device()
                states[f"cuda:{device}"] = torch.cuda.get_rng_state(device)
    return states

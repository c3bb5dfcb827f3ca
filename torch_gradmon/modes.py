"""What others put around the model's forward to see its operations must not see ours."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes


def unseen() -> AbstractContextManager[object]:
    """A context outside of all dispatch modes.

    Selective activation checkpointing keeps the results of operations in order, and would hand ours to the model's
    recomputation; flop counters would count them.
    """
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()

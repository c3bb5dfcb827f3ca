"""What differs between releases of torch, from 2.6 on. Private names of torch that changed are here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def fsdp_param_groups(state: Any) -> Sequence[Any]:
    """The groups of parameters of a module under ``fully_shard``, from its state. Before torch 2.10 a module had at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]

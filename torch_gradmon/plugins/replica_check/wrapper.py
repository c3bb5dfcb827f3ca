"""What ``DistributedDataParallel`` keeps equal: on which ranks, and which buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...step.ranks import digest_of


def is_ddp(module: nn.Module) -> TypeGuard[DistributedDataParallel]:
    """Whether the module is wrapped in DDP."""
    return isinstance(module, DistributedDataParallel)


def copies_of(module: nn.Module, members: Sequence[int]) -> str:
    """A name of the ranks over which DDP copies ``module``; empty if these are all ``members``, or if it is not wrapped in DDP.

    The others have other parts of the model, as in tensor parallelism by plain tensors.
    """
    if not is_ddp(module):
        return ""
    from torch.distributed import get_process_group_ranks

    ranks = get_process_group_ranks(module.process_group)
    return "" if sorted(ranks) == sorted(members) else digest_of(sorted(ranks))


def is_broadcasting(module: DistributedDataParallel) -> bool:
    """Whether DDP, when it is called now, sends the buffers of its first rank to all before it calls the module."""
    # after a hook of the user, buffers are as that has left them
    sends: bool = module.will_sync_module_buffers()  # type: ignore[no-untyped-call]
    return sends and not hasattr(module, "buffer_hook")


def broadcast_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that DDP sends, by name."""
    if not is_ddp(module):
        return {}
    ignored: Any = module.parameters_to_ignore
    return {name: buffer for name, buffer in module.module.named_buffers() if name not in ignored}

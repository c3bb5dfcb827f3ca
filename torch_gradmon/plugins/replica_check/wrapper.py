"""What ``DistributedDataParallel`` keeps equal: which parameters, on which ranks, and which buffers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...step.ranks import digest_of


def is_ddp(module: nn.Module) -> TypeGuard[DistributedDataParallel]:
    """Whether the module is wrapped in DDP."""
    return isinstance(module, DistributedDataParallel)


def ranks_of(module: DistributedDataParallel) -> list[int]:
    """The ranks over which it copies its module, among all processes, ascending."""
    from torch.distributed import get_process_group_ranks

    return sorted(get_process_group_ranks(module.process_group))


class Wrappers:
    """The DDP modules in a model, at any depth. Does not keep them alive.

    Args:
        model: the watched one.
        members: the ranks that are compared.
    """

    def __init__(self, model: nn.Module, members: Sequence[int]) -> None:
        found = [module for module in model.modules() if is_ddp(module)]
        self._references = [weakref.ref(module) for module in found]
        self._copies: dict[int, str] = {}
        self._ignored: set[int] = set()
        for module in found:  # the innermost one last
            ranks = ranks_of(module)
            name = "" if ranks == sorted(members) else digest_of(ranks)
            self._copies.update((id(parameter), name) for parameter in module.parameters())
            left_out: Any = module.parameters_to_ignore
            self._ignored.update(id(p) for name, p in module.module.named_parameters() if name in left_out)

    @property
    def only(self) -> DistributedDataParallel | None:
        """The only one of them, if there is one."""
        return self._references[0]() if len(self._references) == 1 else None

    @property
    def is_joining(self) -> bool:
        """Whether ranks may be in different steps, within ``join()``."""
        return any(module._join_config.enable for reference in self._references if (module := reference()) is not None)

    def copies(self, parameter: Tensor) -> str:
        """A name of the ranks over which DDP copies the parameter; empty if these are all, or it is below no DDP.

        Other ranks have other parts of the model, as in tensor parallelism by plain tensors.
        """
        return self._copies.get(id(parameter), "")

    def ignores(self, parameter: Tensor) -> bool:
        """Whether DDP leaves the parameter to each rank."""
        return id(parameter) in self._ignored


def is_broadcasting(module: DistributedDataParallel) -> bool:
    """Whether DDP, when it is called now, sends the buffers of its first rank to all before it calls the module."""
    # after a hook of the user, buffers are as that has left them
    sends: bool = module.will_sync_module_buffers()  # type: ignore[no-untyped-call]
    return sends and not hasattr(module, "buffer_hook")


def broadcast_buffers(module: DistributedDataParallel) -> dict[str, Tensor]:
    """The buffers that it sends, by name."""
    ignored: Any = module.parameters_to_ignore
    return {name: buffer for name, buffer in module.module.named_buffers() if name not in ignored}

"""Where the parameters of a model under ``fully_shard`` are while a pass runs."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn


class Shelf:
    """The parameters of modules under ``fully_shard``, which are out of sight while a forward or backward pass runs: in their
    places stand parameters for the time of the pass, whose storage is freed behind it. The optimizer has those of the shelf.

    Args:
        root: the watched model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._kept: list[tuple[Any, int]] = []
        #: By the id of the module and the parameter's name there.
        self.places: dict[tuple[int, str], weakref.ref[nn.Parameter]] = {}
        fsdp = sys.modules.get("torch.distributed.fsdp")
        for module in root.modules() if hasattr(fsdp, "FSDPModule") else ():
            if isinstance(module, fsdp.FSDPModule):  # type: ignore[union-attr]
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    for held in group.fsdp_params:
                        self._put(held)

    def _put(self, held: Any) -> None:
        info = held._module_info
        self._kept.append((weakref.ref(held), id(held.sharded_param)))
        owners = zip([info.module, *info.shared_modules], [info.param_name, *info.shared_param_names], strict=True)
        self.places.update(((id(module), name), weakref.ref(held.sharded_param)) for module, name in owners)

    def is_current(self) -> bool:
        """False once one of them was replaced."""
        return all((held := kept()) is not None and id(held.sharded_param) == known for kept, known in self._kept)

    def named_parameters(self, root: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of ``root``, as ``nn.Module.named_parameters`` has them between two passes."""
        seen: set[int] = set()
        for path, module in root.named_modules(remove_duplicate=remove_duplicate):
            for name, parameter in module._parameters.items():
                shelved = self.places.get((id(module), name))
                there = parameter if shelved is None else shelved()
                if there is not None and not (remove_duplicate and id(there) in seen):
                    seen.add(id(there))
                    yield f"{path}.{name}" if path else name, there

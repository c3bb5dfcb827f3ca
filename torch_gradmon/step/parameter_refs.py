"""Where the parameters of a model are, without holding them: in their modules, or while a pass runs on the shelf of ``fully_shard``.

A tensor that anybody refers to weakly cannot be swapped for another, as ``module.to(dtype)`` does with DTensors; so what is held
weakly here is what holds the parameter.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

#: Gives a parameter, while it is there.
Place = Callable[[], "nn.Parameter | None"]


class ModuleParameterRef:
    """The parameter of this name in a module, whichever that is."""

    __slots__ = ("_module", "_name")

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = weakref.ref(module), name

    def __call__(self) -> nn.Parameter | None:
        """It is None where the module is gone, or has no such parameter any more."""
        module = self._module()
        try:  # by the few methods that the parameters of TorchScript have
            return None if module is None else module._parameters[self._name]
        except KeyError:
            return None


class FsdpParameterRef:
    """A parameter that ``fully_shard`` keeps. In its place in the module stands another one while a forward or backward pass runs,
    whose storage is freed behind it.
    """

    __slots__ = ("_held",)

    def __init__(self, held: Any) -> None:
        self._held = weakref.ref(held)

    def __call__(self) -> nn.Parameter | None:
        """It is None where the model is gone."""
        held = self._held()
        return None if held is None else held.sharded_param

    @property
    def is_offloaded(self) -> bool:
        """Whether it is kept in the memory of the host."""
        return bool(getattr(self._held(), "offload_to_cpu", False))


def _told(parameter: nn.Parameter) -> tuple[int, bool]:
    return id(parameter), parameter.requires_grad


class ParameterRefs:
    """The parameters of modules under ``fully_shard``, those that the optimizer has.

    Args:
        root: the watched model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._kept: list[tuple[FsdpParameterRef, tuple[int, bool]]] = []
        #: By the id of the module and the parameter's name there.
        self.places: dict[tuple[int, str], FsdpParameterRef] = {}
        fsdp = sys.modules.get("torch.distributed.fsdp")
        for module in root.modules() if hasattr(fsdp, "FSDPModule") else ():
            if isinstance(module, fsdp.FSDPModule):  # type: ignore[union-attr]
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    for held in group.fsdp_params:
                        self._put(held)

    def _put(self, held: Any) -> None:
        info, place = held._module_info, FsdpParameterRef(held)
        self._kept.append((place, _told(held.sharded_param)))
        owners = zip([info.module, *info.shared_modules], [info.param_name, *info.shared_param_names], strict=True)
        self.places.update(((id(module), name), place) for module, name in owners)

    def is_current(self) -> bool:
        """False once one of them was replaced, froze or thawed."""
        return all((parameter := place()) is not None and _told(parameter) == known for place, known in self._kept)

    def parameters(self, root: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter, Place]]:
        """Those of ``root`` with names and places, as ``nn.Module.named_parameters`` has them between two passes."""
        seen: set[int] = set()
        for path, module in root.named_modules(remove_duplicate=remove_duplicate):
            for name in list(module._parameters.keys()):
                place: Place = self.places.get((id(module), name)) or ModuleParameterRef(module, name)
                parameter = place()
                if parameter is not None and not (remove_duplicate and id(parameter) in seen):
                    seen.add(id(parameter))
                    yield f"{path}.{name}" if path else name, parameter, place

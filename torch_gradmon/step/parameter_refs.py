"""References to the parameters of a model that do not keep them alive: through their modules, or through ``fully_shard``.

A tensor with a weak reference cannot be swapped for another one, as ``module.to(dtype)`` does with DTensors. So the owner of the parameter
is referenced weakly, not the parameter.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ..core.compat import fsdp_param_groups

#: Returns a parameter while it exists.
Place = Callable[[], "nn.Parameter | None"]


class ModuleParameterRef:
    """The parameter of a module by its name."""

    __slots__ = ("_module", "_name")

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = weakref.ref(module), name

    def __call__(self) -> nn.Parameter | None:
        """The parameter; None if the module is gone or has no such parameter any more."""
        module = self._module()
        try:  # parameters of TorchScript have few methods
            return None if module is None else module._parameters[self._name]
        except KeyError:
            return None


class FsdpParameterRef:
    """A sharded parameter of ``fully_shard``. During a forward or backward pass another one, whose storage is freed afterwards, is in its
    place.
    """

    __slots__ = ("_held",)

    def __init__(self, held: Any) -> None:
        self._held = weakref.ref(held)

    def __call__(self) -> nn.Parameter | None:
        """The parameter; None if the model is gone."""
        held = self._held()
        return None if held is None else held.sharded_param

    @property
    def is_offloaded(self) -> bool:
        """Whether it is in host memory."""
        return bool(getattr(self._held(), "offload_to_cpu", False))


def _identity(parameter: nn.Parameter) -> tuple[int, bool]:
    return id(parameter), parameter.requires_grad


class ParameterRefs:
    """The parameters of modules under ``fully_shard``, as the optimizer has them.

    Args:
        root: the watched model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._kept: list[tuple[FsdpParameterRef, tuple[int, bool]]] = []
        self.places: dict[tuple[int, str], FsdpParameterRef] = {}  # by the id of the module and the parameter's name in it
        fsdp = sys.modules.get("torch.distributed.fsdp")
        for module in root.modules() if hasattr(fsdp, "FSDPModule") else ():
            if isinstance(module, fsdp.FSDPModule):  # type: ignore[union-attr]
                for group in fsdp_param_groups(module._get_fsdp_state()):
                    for held in group.fsdp_params:
                        self._put(held)

    def _put(self, held: Any) -> None:
        info, place = held._module_info, FsdpParameterRef(held)
        self._kept.append((place, _identity(held.sharded_param)))
        owners = zip([info.module, *info.shared_modules], [info.param_name, *info.shared_param_names], strict=True)
        self.places.update(((id(module), name), place) for module, name in owners)

    def is_current(self) -> bool:
        """False once one of them was replaced, frozen or thawed."""
        return all((parameter := place()) is not None and _identity(parameter) == known for place, known in self._kept)

    def parameters(self, root: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter, Place]]:
        """The parameters of ``root`` with names and references, as ``nn.Module.named_parameters`` returns them between two passes."""
        seen: set[int] = set()
        for path, module in root.named_modules(remove_duplicate=remove_duplicate):
            for name in list(module._parameters.keys()):
                place: Place = self.places.get((id(module), name)) or ModuleParameterRef(module, name)
                parameter = place()
                if parameter is not None and not (remove_duplicate and id(parameter) in seen):
                    seen.add(id(parameter))
                    yield f"{path}.{name}" if path else name, parameter, place

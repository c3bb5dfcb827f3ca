"""What must be equal on several ranks: which tensors, and on which ranks."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...capture.gradients import scale_of
from ...step.ranks import digest_of, is_dtensor
from .wrapper import Wrappers, broadcast_buffers

#: Kinds of items, each a possible cause of differences in the next ones.
NUMBER, BUFFER, GRADIENT, STATE, PARAMETER = "number", "buffer", "gradient", "state", "parameter"
#: The name of a GradScaler's scale.
SCALE = "scale of the GradScaler"
#: Attributes with which Megatron-LM and DeepSpeed mark parameters that only some ranks have.
_MARKS = (("tensor_model_parallel", True), ("allreduce", False))
#: What identifies the ranks of a mesh, which takes long to describe.
_meshes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class Item(NamedTuple):
    """A tensor that is equal on all ranks with the same ``share``.

    Attributes:
        kind: such as :data:`GRADIENT`.
        name: of the parameter or number; for state with its key.
        share: which part of a sharded tensor this is; empty for a whole tensor.
        tensor: its values, plain and dense.
    """

    kind: str
    name: str
    share: str
    tensor: Tensor


class Common:
    """What ranks have in common.

    Args:
        distinct: parameters that differ between ranks.
        wrappers: DDP in the model; None before it is known.
    """

    def __init__(self, distinct: re.Pattern[str] | None, wrappers: Wrappers | None = None) -> None:
        self._distinct, self._wrappers = distinct, wrappers

    @property
    def pattern(self) -> str:
        """That of the parameters that differ."""
        return "" if self._distinct is None else self._distinct.pattern

    def within(self, wrappers: Wrappers) -> Common:
        """The same for a model with these."""
        return Common(self._distinct, wrappers)

    def copies(self, parameter: Tensor) -> str:
        """A name of the ranks that have copies of the parameter, where these are not all ranks; else empty."""
        return "" if self._wrappers is None else self._wrappers.copies(parameter)

    def items(self, kind: str, name: str, tensor: Tensor, copies: str) -> Iterator[Item]:
        """One for each set of ranks that have ``tensor``, or this part of it; none if only this rank has it."""
        tensor = tensor.detach()
        if is_dtensor(tensor):
            if (part := _replica(tensor)) is not None and _is_dense(part[1]):
                yield Item(kind, name, *part)
            if not copies or any(placement.is_partial() for placement in tensor.placements):  # type: ignore[attr-defined]
                return
            tensor = _local(tensor)
        if _is_dense(tensor):
            yield Item(kind, name, copies, tensor)

    def includes(self, name: str, tensor: Tensor) -> bool:
        """Whether a parameter, or a buffer, is equal on ranks: no pattern names it, and no library marks it or leaves it out."""
        is_marked = any(getattr(tensor, mark, not is_so) is is_so for mark, is_so in _MARKS)
        is_ignored = self._wrappers is not None and self._wrappers.ignores(tensor)
        return not (is_marked or is_ignored) and (self._distinct is None or not self._distinct.search(name))


def items_of(
    optimizer: Optimizer, names: Mapping[int, str], common: Common, is_averaged: bool = False, first: int = 0
) -> Iterator[Item]:
    """Everything that ranks must have in common when the optimizer has stepped.

    Args:
        optimizer: of this rank.
        names: of parameters, by their ids.
        common: what ranks have in common.
        is_averaged: only the parameters are equal, since ranks train by themselves and average them now and then.
        first: number of its first group among those of all optimizers.
    """
    for number, group in enumerate(optimizer.param_groups, first):
        copies = next(map(common.copies, group["params"]), "")
        rate = group.get("lr")
        if isinstance(rate, (int, float)):
            rate = torch.tensor(float(rate), dtype=torch.float64, device="cpu")
        if isinstance(rate, Tensor):
            yield from common.items(NUMBER, rate_name(number), rate, copies)
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None or not common.includes(name, parameter):
                continue
            copies = common.copies(parameter)
            yield from common.items(PARAMETER, name, parameter, copies)
            if is_averaged:
                continue
            if parameter.grad is not None:
                yield from common.items(GRADIENT, name, parameter.grad, copies)
            state = optimizer.state.get(parameter, {})
            for key in sorted(key for key, value in state.items() if isinstance(value, Tensor)):
                yield from common.items(STATE, f"{name}/{key}", state[key], copies)


def others_of(parameters: Mapping[str, Tensor], common: Common) -> Iterator[Item]:
    """Parameters that no optimizer has, by name."""
    for name, parameter in parameters.items():
        if common.includes(name, parameter):
            yield from common.items(PARAMETER, name, parameter, common.copies(parameter))


def buffers_of(module: DistributedDataParallel, common: Common) -> Iterator[Item]:
    """Those that it has just sent."""
    copies = next(map(common.copies, module.parameters()), "")
    for name, buffer in broadcast_buffers(module).items():
        if common.includes(name, buffer):
            yield from common.items(BUFFER, name, buffer, copies)


def scale_items(scaler: torch.amp.GradScaler | None, optimizer: Optimizer, common: Common) -> Iterator[Item]:
    """The scale of a GradScaler, and its count of steps since that grew."""
    copies = next((common.copies(parameter) for group in optimizer.param_groups for parameter in group["params"]), "")
    scale, count = scale_of(scaler), getattr(scaler, "_growth_tracker", None)
    if isinstance(scale, Tensor):
        yield from common.items(NUMBER, SCALE, scale, copies)
    if isinstance(count, Tensor):
        yield from common.items(NUMBER, "steps since the GradScaler's scale grew", count, copies)


def rate_name(group: int) -> str:
    """The name of the learning rate of a parameter group, counted over all optimizers."""
    return f"learning rate of group {group}"


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type != "meta"


def _local(sharded: Any) -> Tensor:
    local: Tensor = sharded.to_local()
    if hasattr(local, "wait"):
        local = local.wait()
    return local


def _replica(sharded: Any) -> tuple[str, Tensor] | None:
    """Which part of a DTensor this rank has, and that part; None if no other rank of its mesh has the same."""
    mesh, coordinate = sharded.device_mesh, sharded.device_mesh.get_coordinate()
    replicates = [placement.is_replicate() for placement in sharded.placements]
    is_partial = any(placement.is_partial() for placement in sharded.placements)
    has_copies = any(is_so and mesh.size(dim) > 1 for dim, is_so in enumerate(replicates))
    if is_partial or coordinate is None or not has_copies:
        return None
    if mesh not in _meshes:
        _meshes[mesh] = digest_of(mesh.mesh.tolist())
    where = ["*" if is_so else str(place) for is_so, place in zip(replicates, coordinate, strict=True)]
    return f"{_meshes[mesh]}:{','.join(where)}", _local(sharded)

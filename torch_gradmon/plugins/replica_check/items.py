"""What must be equal on several ranks: which tensors, and on which ranks."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...step.ranks import digest_of, is_dtensor

#: Kinds of items, each a possible cause of differences in the next ones.
NUMBER, GRADIENT, STATE, PARAMETER = "number", "gradient", "state", "parameter"
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


def items_of(
    optimizer: Optimizer, names: Mapping[int, str], distinct: re.Pattern[str] | None, is_averaged: bool = False, first: int = 0
) -> Iterator[Item]:
    """Everything that ranks must have in common when the optimizer has stepped.

    Args:
        optimizer: of this rank.
        names: of parameters, by their ids.
        distinct: parameters that differ between ranks.
        is_averaged: only the parameters are equal, since ranks train by themselves and average them now and then.
        first: number of its first group among those of all optimizers.
    """
    for number, group in enumerate(optimizer.param_groups, first):
        rate = group.get("lr")
        if isinstance(rate, (int, float)):
            rate = torch.tensor(float(rate), dtype=torch.float64, device="cpu")
        if isinstance(rate, Tensor):
            yield Item(NUMBER, rate_name(number), "", rate.detach())
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None or not _is_common(name, parameter, distinct):
                continue
            yield from _shared(PARAMETER, name, parameter)
            if is_averaged:
                continue
            if parameter.grad is not None:
                yield from _shared(GRADIENT, name, parameter.grad)
            state = optimizer.state.get(parameter, {})
            for key in sorted(key for key, value in state.items() if isinstance(value, Tensor)):
                yield from _shared(STATE, f"{name}/{key}", state[key])


def others_of(parameters: Mapping[str, nn.Parameter], distinct: re.Pattern[str] | None) -> Iterator[Item]:
    """Parameters that no optimizer has, by name."""
    for name, parameter in parameters.items():
        if _is_common(name, parameter, distinct):
            yield from _shared(PARAMETER, name, parameter)


def rate_name(group: int) -> str:
    """The name of the learning rate of a parameter group, counted over all optimizers."""
    return f"learning rate of group {group}"


def _is_common(name: str, parameter: nn.Parameter, distinct: re.Pattern[str] | None) -> bool:
    is_marked = any(getattr(parameter, mark, not is_so) is is_so for mark, is_so in _MARKS)
    return not is_marked and (distinct is None or not distinct.search(name))


def _shared(kind: str, name: str, tensor: Tensor) -> Iterable[Item]:
    tensor = tensor.detach()
    share = ""
    if is_dtensor(tensor):
        part = _replica(tensor)
        if part is None:
            return ()
        share, tensor = part
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type == "meta":
        return ()
    return (Item(kind, name, share, tensor),)


def _replica(sharded: Any) -> tuple[str, Tensor] | None:
    """Which part of a DTensor this rank has, and that part; None if no other rank has the same."""
    mesh, coordinate = sharded.device_mesh, sharded.device_mesh.get_coordinate()
    replicates = [placement.is_replicate() for placement in sharded.placements]
    is_partial = any(placement.is_partial() for placement in sharded.placements)
    has_copies = any(is_so and mesh.size(dim) > 1 for dim, is_so in enumerate(replicates))
    if is_partial or coordinate is None or not has_copies:
        return None
    local = sharded.to_local()
    if hasattr(local, "wait"):
        local = local.wait()
    if mesh not in _meshes:
        _meshes[mesh] = digest_of(mesh.mesh.tolist())
    where = ["*" if is_so else str(place) for is_so, place in zip(replicates, coordinate, strict=True)]
    return f"{_meshes[mesh]}:{','.join(where)}", local

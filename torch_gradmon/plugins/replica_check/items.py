"""What must be equal on several ranks: which tensors, and on which ranks."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...capture.gradients import scale_of
from ...statistics.fingerprint import fingerprints, packed, unpacked
from ...step.buffer import DeviceToHostCopy
from ...step.ranks import digest_of, is_dtensor, local_part


def is_ddp(module: nn.Module) -> TypeGuard[DistributedDataParallel]:
    return isinstance(module, DistributedDataParallel)


def ranks_of(module: DistributedDataParallel) -> list[int]:
    """The ranks over which it copies its module, among all processes, ascending."""
    from torch.distributed import get_process_group_ranks

    return sorted(get_process_group_ranks(module.process_group))


def is_broadcasting(module: DistributedDataParallel) -> bool:
    """Whether DDP, when it is called now, sends the buffers of its first rank to all before it calls the module."""
    # after a hook of the user, buffers are as that has left them
    sends: bool = module.will_sync_module_buffers()  # type: ignore[no-untyped-call]
    return sends and not hasattr(module, "buffer_hook")


# --- What must be equal on several ranks: which tensors, and on which ranks ---


#: Kinds of items, each a possible cause of differences in the next ones.
NUMBER, BUFFER, GRADIENT, STATE, PARAMETER = "number", "buffer", "gradient", "state", "parameter"
#: The name of a GradScaler's scale.
SCALE = "scale of the GradScaler"
#: Attributes with which Megatron-LM and DeepSpeed mark parameters that only some ranks have.
_MARKS = (("tensor_model_parallel", True), ("allreduce", False))
#: What identifies the ranks of a mesh, which takes long to describe.
_meshes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class Item(NamedTuple):
    """A tensor, plain and dense, that is equal on all ranks with the same ``share``: a part of a sharded tensor, or empty for all of it."""

    kind: str
    name: str  # of the parameter or number; for state with its key
    share: str
    tensor: Tensor


class Common:
    """What the ranks ``members`` have in common: all that DDP copies in ``model``, at any depth, which is not kept alive."""

    def __init__(self, distinct: re.Pattern[str] | None, model: nn.Module | None = None, members: Sequence[int] = ()) -> None:
        self._distinct = distinct
        found = [] if model is None else [module for module in model.modules() if is_ddp(module)]
        self._wrappers = [weakref.ref(module) for module in found]
        self._copies: dict[int, str] = {}
        self._ignored: set[int] = set()
        for module in found:  # the innermost one last
            ranks = ranks_of(module)
            name = "" if ranks == sorted(members) else digest_of(ranks)
            self._copies.update((id(parameter), name) for parameter in module.parameters())
            left_out: Any = module.parameters_to_ignore
            self._ignored.update(id(p) for name, p in module.module.named_parameters() if name in left_out)

    @property
    def wrapper(self) -> DistributedDataParallel | None:
        """The only DDP module, if there is one alone."""
        return self._wrappers[0]() if len(self._wrappers) == 1 else None

    @property
    def is_joining(self) -> bool:
        """Whether ranks may be in different steps, within ``join()``."""
        return any(module._join_config.enable for reference in self._wrappers if (module := reference()) is not None)

    def copies(self, parameter: Tensor) -> str:
        """A name of the ranks over which DDP copies the parameter; empty if these are all, or it is below no DDP.

        Other ranks have other parts of the model, as in tensor parallelism by plain tensors.
        """
        return self._copies.get(id(parameter), "")

    def items(self, kind: str, name: str, tensor: Tensor, copies: str) -> Iterator[Item]:
        """One for each set of ranks that have ``tensor``, or this part of it; none if only this rank has it."""
        tensor = tensor.detach()
        if is_dtensor(tensor):
            if (part := _replica(tensor)) is not None and _is_dense(part[1]):
                yield Item(kind, name, *part)
            if not copies or any(placement.is_partial() for placement in tensor.placements):  # type: ignore[attr-defined]
                return
            tensor = local_part(tensor)
        if _is_dense(tensor):
            yield Item(kind, name, copies, tensor)

    def includes(self, name: str, tensor: Tensor) -> bool:
        """Whether a parameter, or a buffer, is equal on ranks: no pattern names it, and no library marks it or leaves it out."""
        is_marked = any(getattr(tensor, mark, not is_so) is is_so for mark, is_so in _MARKS)
        is_distinct = self._distinct is not None and self._distinct.search(name)
        return not (is_marked or is_distinct or id(tensor) in self._ignored)


def items_of(
    optimizer: Optimizer, names: Mapping[int, str], common: Common, is_averaged: bool = False, first: int = 0
) -> Iterator[Item]:
    """Everything that ranks must have in common when the optimizer has stepped; with ``is_averaged`` only parameters, since ranks train by
    themselves and average them now and then. ``names`` of parameters, by id; ``first``: its first group's number among all optimizers'.
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
    ignored: Any = module.parameters_to_ignore
    for name, buffer in module.module.named_buffers():
        if name not in ignored and common.includes(name, buffer):
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
    return f"{_meshes[mesh]}:{','.join(where)}", local_part(sharded)


#: Fingerprints by kind and name.
Found = dict[tuple[str, str], int]


class Snapshot:
    """The fingerprints of all that ranks have in common in one step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._labels: list[tuple[str, str, str]] = []
        self._layout: list[tuple[str, str, tuple[int, ...], str]] = []
        self._parts: list[Tensor] = []
        self._batch, self._has_buffers = 0, False
        self._copy: DeviceToHostCopy | None = None

    def add_batch(self, tensors: Sequence[Tensor]) -> None:
        """Take the fingerprints of this rank's first batch of the step."""
        if not self._batch and tensors and not self._parts and len({tensor.device for tensor in tensors}) == 1:
            self._batch = len(tensors)
            self._parts.append(packed(fingerprints(tensors)))

    def add_buffers(self, items: Sequence[Item]) -> None:
        """Take the fingerprints of buffers as they are in the first pass of the step."""
        if not self._has_buffers:
            self._has_buffers = True
            self.add(items)

    def add(self, items: Sequence[Item]) -> None:
        by_device: dict[torch.device, list[Item]] = {}
        for item in items:
            by_device.setdefault(item.tensor.device, []).append(item)
        for each in by_device.values():
            self._labels += [(item.share, item.kind, item.name) for item in each]
            self._parts.append(packed(fingerprints([item.tensor for item in each])))
        parameters = [item for item in items if item.kind == PARAMETER]
        self._layout += [(item.share, item.name, tuple(item.tensor.shape), str(item.tensor.dtype)) for item in parameters]

    def start_copy(self) -> None:
        self._copy = DeviceToHostCopy(self._parts)

    def is_ready(self) -> bool:
        return self._copy is not None and self._copy.is_ready()

    @cached_property
    def _values(self) -> list[int]:
        assert self._copy is not None
        parts = [unpacked(part) for part in self._copy.land()]
        found: list[int] = torch.cat(parts).tolist() if parts else []
        return found

    @property
    def batch(self) -> str | None:
        """A digest of the batch; None if it is not known."""
        return digest_of(self._values[: self._batch]) if self._batch else None

    @cached_property
    def by_share(self) -> Mapping[str, Found]:
        """Fingerprints by what ranks should have in common. Ranks with other parameters have other keys. Waits for the copy."""
        layout = digest_of(sorted(self._layout))
        found: dict[str, Found] = {}
        for (share, kind, name), value in zip(self._labels, self._values[self._batch :], strict=True):
            found.setdefault(f"{layout}|{share}", {})[kind, name] = value
        return found

    def digests(self) -> dict[str, str]:
        """One digest for each share: equal if all fingerprints are."""
        return {share: digest_of(sorted(found.items())) for share, found in self.by_share.items()}

"""Ranks: which elements of a tensor this rank counts, and the collectives at the end of a step.

A sharded tensor (a DTensor of FSDP2 or tensor parallelism) is measured in place: each rank makes the row of its own elements, and rows
merge over ranks by the same operations as over micro-batches. No data as large as a tensor is sent, except for gradients that are partial
sums (norm weights under sequence parallelism), which must be added up first.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import torch_modes
from ..core.moments import ALWAYS, SUMMED, Column, identity
from ..core.moments import merge as merge_rows
from ..statistics.request import PLAIN

#: Parts of what ranks must have in common to exchange values: the names of tensors, the metrics, and what else has to be equal.
NAMES, METRICS, CADENCE = "names of parameters", "metrics", "every="
#: What a rank sends to the others beside the values of a step; of one that sends nothing.
EMPTY_SLOT: tuple[float, ...] = (0.0,) * 5
#: Up to this number of bytes of all ranks, one all-gather is used; beyond, two all-reduces move less.
GATHERED = 1 << 20
#: Backends of process groups for memory of the host, which may take that of some devices too.
_OF_HOSTS = ("gloo", "mpi")


def is_sharded(tensor: Tensor) -> bool:
    return is_dtensor(tensor) and tensor.device_mesh.size() > 1 and not all(p.is_replicate() for p in tensor.placements)  # type: ignore[attr-defined]


def is_dtensor(tensor: Tensor) -> bool:
    return type(tensor) not in PLAIN and hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def local_part(tensor: Tensor) -> Tensor:
    """What of a DTensor is on this rank; a plain tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part.wait() if hasattr(part, "wait") else part  # the result of an asynchronous collective


def digest_of(value: object) -> str:
    """16 characters that are equal on two ranks if their values are, by ``repr``: for what is too long to be sent or to be a key."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


class Ranks:
    """The processes whose rows are merged; ``group``: a process group, None for all processes."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.is_alone = False  # others have no monitor of the same tensors, so that no collective is entered for one of them
        self.has_parts = False  # of tensors that not all ranks have
        self._homes: Sequence[int] | None = None
        self._counting: dict[tuple[Any, tuple[Any, ...], int | None], bool] = {}

    def count_at(self, homes: Sequence[int]) -> None:
        """A parameter is counted by the rank at its position in ``homes``, among all processes, or by the ranks that share it with that
        one: not all ranks have it.
        """
        self.has_parts, self._homes = True, homes

    def is_at_home(self, position: int, tensors: Sequence[Tensor]) -> bool:
        """Whether this rank counts all elements of the parameter at ``position``, whose tensors these are, and no other rank counts any."""
        here = self._homes is not None and self._homes[position] == torch.distributed.get_rank()
        return here and not any(map(is_dtensor, tensors))

    @property
    def count(self) -> int:
        """Number of ranks; one without ``torch.distributed``."""
        return torch.distributed.get_world_size(self.group) if torch_modes.has_group() else 1

    @property
    def rank(self) -> int:
        return torch.distributed.get_rank(self.group) if torch_modes.has_group() else 0

    @property
    def members(self) -> list[int]:
        if not torch_modes.has_group():
            return [0]
        return torch.distributed.get_process_group_ranks(self.group or torch.distributed.group.WORLD)

    @property
    def is_first(self) -> bool:
        """Whether this is the reporting rank, see :func:`torch_gradmon.core.torch_modes.is_muted`."""
        return not torch_modes.is_muted(self.group)

    def own_parts(self, tensors: Mapping[int, Tensor], spread: Container[int]) -> Mapping[int, Tensor]:
        """:meth:`own_part` of each, by position; ``spread`` has the positions of those whose rows will be merged."""
        if self._homes is None and PLAIN.issuperset(map(type, tensors.values())):
            return tensors
        return {position: self.part_at(position, tensor, position in spread) for position, tensor in tensors.items()}

    def part_at(self, position: int, tensor: Tensor, spread: bool = True) -> Tensor:
        return self.own_part(tensor, spread, None if self._homes is None else self._homes[position])

    def own_part(self, tensor: Tensor, spread: bool, home: int | None = None) -> Tensor:
        """The elements of ``tensor`` that this rank counts, as a plain tensor; a plain tensor is returned unchanged.

        Partial sums are added up first, which is a collective. ``spread``: the rows of all ranks will be merged, so an element that
        several ranks have is counted by one of them, and the others get an empty part. ``home``: a rank that has the tensor, where not all
        do.
        """
        if not is_dtensor(tensor):
            is_elsewhere = spread and home is not None and home != torch.distributed.get_rank()
            return tensor.new_empty(0) if is_elsewhere else tensor
        from torch.distributed.tensor import Replicate  # loaded already, since there is a DTensor

        sharded: Any = tensor.detach()
        placements = tuple(Replicate() if p.is_partial() or not spread else p for p in sharded.placements)
        if placements != tuple(sharded.placements):
            if self.is_alone:
                return tensor  # no other rank would come to the collective; such a tensor is refused later
            sharded = sharded.redistribute(placements=placements)
        local = local_part(sharded)
        return local if not spread or self._counts(sharded.device_mesh, placements, home) else local.new_empty(0)

    def _counts(self, mesh: Any, placements: tuple[Any, ...], home: int | None) -> bool:
        """Whether this rank counts its elements: it is the first on each replicating dimension of the mesh, and among several equal
        meshes in that of the first rank.
        """
        known = self._counting.get((mesh, placements, home))
        if known is None:
            first = self.members[0] if home is None else home
            coordinate = mesh.get_coordinate()
            known = (
                coordinate is not None
                and first in mesh.mesh.flatten().tolist()
                and all(place == 0 for place, p in zip(coordinate, placements, strict=True) if p.is_replicate())
            )
            self._counting[mesh, placements, home] = known
        return known

    def merged(self, rows: Tensor, columns: frozenset[Column]) -> Tensor:
        """``rows``, ``[n, 8]`` on :attr:`device`, merged with as many of the other ranks; the same bits on each rank. Collective. Does not
        synchronise the host with the device.
        """
        sent = sorted(columns | ALWAYS)
        found = identity(len(rows), rows.device, rows.dtype)
        found[:, sent] = self._exchanged(rows[:, sent], sent)
        return found

    def gathered(self, thing: Any) -> list[Any]:
        """``thing`` of each rank, as JSON. Two collectives, which synchronise the device."""
        if self.count == 1:
            return [thing]
        sent = torch.frombuffer(bytearray(json.dumps(thing).encode()), dtype=torch.uint8)
        sizes = self._gathered(torch.tensor([len(sent)], dtype=torch.int64, device="cpu")).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: len(sent)] = sent
        found = self._gathered(padded).to("cpu")
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(found, sizes, strict=True)]

    def _gathered(self, own: Tensor) -> Tensor:
        """``own``, one dimension, of each rank: ``[ranks, n]``."""
        flat = torch.empty(self.count * own.numel(), dtype=own.dtype, device=self.device)
        gather = getattr(torch.distributed, "all_gather_single", None)  # the newer name; if it exists, the older one warns
        (gather or torch.distributed.all_gather_into_tensor)(flat, own.to(self.device), group=self.group)
        return flat.view(self.count, -1)

    def _exchanged(self, rows: Tensor, columns: Sequence[Column]) -> Tensor:
        if rows.numel() * rows.element_size() * self.count <= GATHERED:
            wide = identity(self.count * len(rows), rows.device, rows.dtype)
            wide[:, columns] = self._gathered(rows.reshape(-1)).view(-1, len(columns))
            return merge_rows(wide.view(self.count, len(rows), -1))[:, columns]
        sums, extremes = [c for c in columns if c < SUMMED], [c for c in columns if c >= SUMMED]
        place = {column: index for index, column in enumerate(columns)}
        added = rows[:, [place[c] for c in sums]].contiguous()
        torch.distributed.all_reduce(added, group=self.group)
        found = rows.clone()
        found[:, [place[c] for c in sums]] = added
        if extremes:
            signs = rows.new_tensor([-1.0 if c is Column.MIN else 1.0 for c in extremes])
            largest = rows[:, [place[c] for c in extremes]] * signs
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=self.group)
            found[:, [place[c] for c in extremes]] = largest * signs
        return found

    @functools.cached_property
    def device(self) -> torch.device:
        """The device that the group's backend works on: of the same kind on each rank, whatever a rank has measured."""
        kind, backend = torch_modes.accelerator_kind(), torch.distributed.get_backend(self.group)
        if kind is None or kind.type == "mps" or any(of_hosts in backend for of_hosts in _OF_HOSTS):
            return torch.device("cpu")
        return torch.device(kind.type, getattr(torch_modes.functions_of(kind), "current_device", lambda: 0)())

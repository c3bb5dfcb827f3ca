"""Gradients under FSDP1 (``FullyShardedDataParallel``): each rank has a part of flat tensors of many parameters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .gradient_source import GradientSource
from .parameter_refs import Place


class _FlatPlace:
    """The flat parameter of a handle of FSDP1."""

    def __init__(self, handle: weakref.ref[Any]) -> None:
        self._handle = handle

    def __call__(self) -> nn.Parameter | None:
        """The parameter; None if the model is gone."""
        handle = self._handle()
        return None if handle is None else handle.flat_param


class Fsdp1Source(GradientSource):
    """Gradients are in ``.grad``, of the part that this rank has; with ``use_orig_params=False`` parameters are the flat ones.

    Args:
        model: with FSDP1 modules.
    """

    def __init__(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel  # loaded already, since there is one

        self._handles: list[weakref.ref[Any]] = []
        self._known: set[int] = set()  # flat parameters, and original ones
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._lengths: dict[int, int] = {}  # of flat parameters, without the padding behind the last one
        self._parts: set[int] = set()
        self._copies: set[int] = set()  # parts that a rank of an earlier group has too
        for unit in model.modules():
            handle = unit._handle if isinstance(unit, FullyShardedDataParallel) else None
            if handle is None:
                continue
            flat: Any = handle.flat_param
            self._handles.append(weakref.ref(handle))
            self._known.add(id(flat))
            originals = flat._params or []
            self._shapes.update((id(p), tuple(shape)) for p, shape in zip(originals, flat._shapes, strict=bool(originals)))
            there = [info for info in flat._shard_param_infos if info.in_shard] if handle.uses_sharded_strategy else []
            if handle.uses_sharded_strategy:
                self._lengths[id(flat)] = max((info.offset_in_shard + info.numel_in_shard for info in there), default=0)
                self._parts.update(map(id, originals or [flat]))
                replicas = getattr(unit, "_inter_node_pg", None)
                if replicas is not None and torch.distributed.get_rank(replicas):
                    self._copies.update(map(id, originals or [flat]))
        self._known.update(self._shapes)
        for name, parameter in model.named_parameters():
            if getattr(parameter, "_fsdp_flattened", False) and id(parameter) not in self._known:
                raise ValueError(
                    f"{name} is a part of a flat parameter of FSDP1 above this module: watch the outermost FullyShardedDataParallel"
                )

    def hook_places(self, places: Sequence[Place]) -> Sequence[Place]:
        """The flat parameters, which original ones are views of, and all others."""
        flat: list[Place] = [_FlatPlace(handle) for handle in self._handles]
        return [*flat, *(place for place in places if id(place()) not in self._known)]

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """That of the whole parameter."""
        return self._shapes.get(id(parameter), tuple(parameter.shape))

    def is_part(self, parameter: nn.Parameter) -> bool:
        """Where FSDP shards."""
        return id(parameter) in self._parts

    def value(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part."""
        return self._own(parameter, parameter)

    def accumulated(self, parameter: nn.Parameter) -> Tensor | None:
        """This rank's part of the average."""
        return None if parameter.grad is None else self._own(parameter, parameter.grad)

    used = accumulated

    def _own(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        if id(parameter) in self._copies:
            return tensor.detach().new_empty(0)
        return tensor.detach().view(-1)[: self._lengths[id(parameter)]] if id(parameter) in self._lengths else tensor

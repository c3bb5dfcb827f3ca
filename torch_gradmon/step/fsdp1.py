"""Gradients under FSDP1 (``FullyShardedDataParallel``): each rank has a part of flat tensors of many parameters."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from .gradient_source import GradientSource


def units(model: nn.Module) -> list[Any]:
    """The FSDP1 modules in a model, outermost first."""
    return [module for module in model.modules() if is_fsdp1(module)]


def is_fsdp1(module: nn.Module) -> bool:
    """Whether the module is wrapped in FSDP1."""
    return any(
        kind.__name__ == "FullyShardedDataParallel" and kind.__module__.startswith("torch.") for kind in type(module).__mro__
    )


class Fsdp1Source(GradientSource):
    """Gradients are in ``.grad``, of the part that this rank has; with ``use_orig_params=False`` parameters are the flat ones.

    No hook of torch sees when they are reduced, so they are measured before ``clip_grad_norm_`` of the outermost FSDP module, or, in a
    loop that does not clip, when the optimizer steps.

    Args:
        model: with FSDP1 modules.
    """

    is_final_at_step = True
    boundary_method, is_after = "clip_grad_norm_", False

    def __init__(self, model: nn.Module) -> None:
        found = units(model)
        self._root = weakref.ref(found[0])
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._lengths: dict[int, int] = {}  # of flat parameters, without the padding behind the last one
        self._parts: set[int] = set()
        self._copies: set[int] = set()  # parts that a rank of an earlier group has too
        for unit in found:
            handle = unit._handle
            if handle is None:
                continue
            flat = handle.flat_param
            originals = flat._params or []
            self._shapes.update((id(p), tuple(shape)) for p, shape in zip(originals, flat._shapes, strict=bool(originals)))
            there = [info for info in flat._shard_param_infos if info.in_shard] if handle.uses_sharded_strategy else []
            if handle.uses_sharded_strategy:
                self._lengths[id(flat)] = max((info.offset_in_shard + info.numel_in_shard for info in there), default=0)
                self._parts.update(map(id, originals or [flat]))
                replicas = getattr(unit, "_inter_node_pg", None)
                if replicas is not None and torch.distributed.get_rank(replicas):
                    self._copies.update(map(id, originals or [flat]))

    @property
    def boundary(self) -> Any:
        """The outermost FSDP module."""
        return self._root()

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

"""What should differ between ranks: their batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...core.loop_findings import LoopFinding
from ...step.ranks import is_dtensor

#: Types of arguments that are no batch.
_SETTINGS = (type(None), bool, int, float, str)


def has_own_batches(module: nn.Module, count: int) -> bool:
    """Whether each of ``count`` ranks has a batch of its own: under DDP or FSDP2 over all of them, and no tensor parallelism."""
    if isinstance(module, DistributedDataParallel):
        ranks: int = module.process_group.size()
        return ranks == count
    if not any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
        return False
    sharded: list[Any] = [parameter for parameter in module.parameters() if is_dtensor(parameter)]
    return bool(sharded) and all(
        each.device_mesh.size() == count and all(p.is_replicate() for p in each.placements[:-1]) for each in sharded
    )


def same_batches(step: int, messages: Mapping[int, Mapping[str, Any]]) -> list[LoopFinding]:
    """The finding that all ranks had the same batch in this check and in the last one; ``messages`` by rank."""
    now = {message["batch"] for message in messages.values()}
    before = {message["batch before"] for message in messages.values()}
    # a batch that never changes is no batch, or the whole data
    if len(now) == len(before) == 1 and None not in now | before and now != before:
        return [LoopFinding("same-batches-on-all-ranks", step, step, 1, (), {"ranks": float(len(messages))})]
    return []


def batch_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a model, and one level inside of lists and dicts.

    None of them if an argument is of another kind, since the batch may be in there; nor if all have a single element.
    """
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, Tensor) and not is_dtensor(each) and not each.is_sparse and not each.is_nested:
                found.append(each)
            elif not isinstance(each, _SETTINGS):
                return []
    return found if any(tensor.numel() > 1 for tensor in found) else []

"""Call a module without side effects: on copies of its inputs and of the tensors it writes to, invisible to foreign hooks and modes."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...core import torch_modes as accelerator
from ...core.torch_modes import SharedContext, autocast_cache_kept, outside_dispatch_modes
from ...statistics.request import PLAIN
from ..metric_functions import untouched_rng
from ..modules.compiled import is_compiled

#: Called with a tensor and its copy.
Note = Callable[[Tensor, Tensor], object]
_SEALED = (type, types.FunctionType, types.ModuleType, nn.Module)  # not searched for tensors


def private(inputs: Any, carry: Callable[[Tensor], Tensor], note: Note | None = None) -> Any:
    """A deep copy of ``inputs`` in which each tensor is replaced by ``carry(tensor)``; types and identities are kept."""
    carried = [(tensor, carry(tensor)) for tensor in tensors_inside(inputs, {})]
    if note is not None:
        for pair in carried:
            note(*pair)
    try:
        return copy.deepcopy(inputs, {id(tensor): twin for tensor, twin in carried})
    except Exception as error:
        raise TypeError(f"an input cannot be copied, and might be changed otherwise ({type(error).__name__}: {error})") from error


def tensors_inside(value: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    """Each tensor in containers and attributes. Visited objects stay alive in ``seen``, so that no id is reused."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen:
        seen[id(value)] = value
        if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
            for item in value.values() if isinstance(value, Mapping) else value:
                yield from tensors_inside(item, seen)
        if hasattr(value, "__dict__") and not isinstance(value, _SEALED):
            yield from tensors_inside(vars(value), seen)


def carrier(root: nn.Module, reference: nn.Module) -> Callable[[Tensor], Tensor]:
    """A function that makes the reference's inputs: a copy, on the reference's device if the tensor is on the model's.

    Other tensors stay where they are: lengths of sequences belong on the CPU. DDP with ``device_ids`` also moves CPU tensors.
    """
    here, there = (next((t.device for t in chain(m.parameters(), m.buffers())), None) for m in (root, reference))
    carried = {here}
    outer = dict(root._modules.items()).get("_orig_mod", root)
    if isinstance(outer, DistributedDataParallel) and outer.device_ids:
        carried.add(torch.device("cpu"))
    return lambda t: t.detach().to(there) if there and t.device in carried - {there} else _twin(t)


def _twin(tensor: Tensor) -> Tensor:
    """A copy with the same strides and alignment, since both select kernels, which round differently."""
    if type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if 0 < extent <= 4 * tensor.numel():  # not if most of it is gaps
            shift = tensor.data_ptr() % 64 // tensor.element_size()  # torch allocates at multiples of 64 bytes
            memory = tensor.new_empty(shift + extent)
            memory[shift:].copy_(tensor.as_strided((extent,), (1,)))
            return memory.as_strided(tensor.shape, tensor.stride(), shift)
    return tensor.clone()


@contextlib.contextmanager
def call_isolated(module: nn.Module, inputs: Iterable[Tensor] = ()) -> Iterator[None]:
    """Run ``module`` without autograd and without side effects."""
    with (
        outside_dispatch_modes(),
        torch.no_grad(),
        untouched_rng(),
        _protected(module, inputs),
        _unchanged(module),
        _WITHOUT_ADVICE,
    ):
        yield


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Let ``module`` write to copies of its buffers, and restore the attributes of its parts afterwards.

    Attributes describe buffers, such as the length up to which a cache was computed. An embedding with ``max_norm`` writes to its
    parameter, as nothing else in torch does.
    """
    parts, flags = list(module.modules()), [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    of_script = [part for part in parts if isinstance(part, torch.jit.ScriptModule)]  # which have no other attributes
    plain = [part for part in parts if not isinstance(part, torch.jit.ScriptModule)]
    tables: list[Any] = [table for p in plain for table in (vars(p), p._parameters, p._buffers, p._modules)]
    contents = [dict(table) for table in tables]
    buffers = [(part._buffers, name, buffer) for part in of_script for name, buffer in part._buffers.items()]
    written = {id(buffer) for p in parts for buffer in p._buffers.values() if buffer is not None}
    written |= {id(p.weight) for p in parts if isinstance(p, (nn.Embedding, nn.EmbeddingBag)) and p.max_norm is not None}
    twin = functools.cache(_twin)
    try:
        for table, content in zip(tables, contents, strict=True):
            table.update((name, twin(item)) for name, item in content.items() if id(item) in written)
        for table, name, buffer in buffers:
            table[name] = twin(buffer)
        yield
    finally:
        for table, content in zip(tables, contents, strict=True):
            table.clear()
            table.update(content)
        for table, name, buffer in buffers:
            table[name] = buffer
        for parameter, flag in flags:
            parameter.requires_grad = flag


@contextlib.contextmanager
def _protected(module: nn.Module, inputs: Iterable[Tensor] = ()) -> Iterator[None]:
    """Protect autocast's cache of cast weights, compiled graphs, and the generators of their accelerators."""
    devices = {t.device for t in chain(module.parameters(), module.buffers(), inputs)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(autocast_cache_kept())
        stack.enter_context(accelerator.untouched_generators(devices))
        if is_compiled(module):
            stack.enter_context(_EAGER)
        yield


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Suppress the warning of re-entrant checkpoints that no input has gradients, as intended here.

    A filter of warnings is no option: setting one makes warnings that were shown once appear again.
    """
    module = sys.modules.get("torch.utils.checkpoint")
    check = getattr(module, "check_backward_validity", None)
    if module is None or check is None:
        yield
        return
    module.check_backward_validity = _accept  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.check_backward_validity = check  # type: ignore[attr-defined]


def _accept(_: Iterable[Any]) -> None:
    return None


#: Both change the whole process.
_EAGER, _WITHOUT_ADVICE = SharedContext(lambda: torch.compiler.set_stance("force_eager")), SharedContext(_without_advice)

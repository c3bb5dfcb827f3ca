"""Tensors of a simulated device: each has a tensor in the host's memory that only operations of the device see."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .graph import tensors_in
from .timeline import Memory

if TYPE_CHECKING:
    from .device import SimulatedDevice

_ATEN = torch.ops.aten
#: Operations that allocate memory and run nothing.
_ALLOCATE = frozenset({"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"})
#: Operations whose result is a number or a shape on the host, which waits for the device.
_READ = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::masked_select"})


class SimulatedTensor(Tensor):
    """A tensor of the device: a wrapper, since only a Python type survives in what autograd saves.

    Args:
        raw: its values, a plain CPU tensor.
        owner: the device.
        memory: that of the tensor that it is a view of; None for memory of its own.
    """

    raw: Tensor
    owner: SimulatedDevice
    memory: Memory

    @staticmethod
    def __new__(cls, raw: Tensor, owner: SimulatedDevice, memory: Memory | None = None) -> SimulatedTensor:
        """Shape, strides and dtype are those of ``raw``."""
        if raw.dtype in (torch.float64, torch.complex128) and not owner.has_float64:
            raise TypeError(f"{owner.torch_device} has no {raw.dtype}")
        found: SimulatedTensor = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=owner.torch_device
        )
        return found

    def __init__(self, raw: Tensor, owner: SimulatedDevice, memory: Memory | None = None) -> None:
        self.raw, self.owner = raw, owner
        self.memory = Memory(owner.timeline) if memory is None else memory

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run one operation, as the device does."""
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        """Its values, which waits for the device."""
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        """Its memory is used on ``stream`` too."""
        self.memory.keep_for(stream.stream_id)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.raw!r})"


class _Operation:
    """What holds of an operation in each call."""

    def __init__(self, func: Any) -> None:
        self.name: str = func._schema.name
        self.is_view: bool = func.is_view
        self.allocates, self.reads = self.name in _ALLOCATE, self.name in _READ
        self.moves = func in (_ATEN._to_copy.default, _ATEN.copy_.default)
        #: Place and name of each argument that is written to, by the schema.
        self.written = [
            (place, argument.name)
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        returns = func._schema.returns
        self.returns_written = bool(returns) and returns[0].alias_info is not None
        self.returns_one = len(returns) == 1


_operation = cache(_Operation)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    of = _operation(func)
    tensors: list[Tensor] = []
    raw_args, raw_kwargs = tuple(_raw(args, tensors)), dict(zip(kwargs, _raw(kwargs.values(), tensors), strict=True))
    inputs = [x for x in tensors if isinstance(x, SimulatedTensor)]
    owner = inputs[0].owner
    if of.moves:
        moved = _moved(owner, func, args, kwargs)
        if moved is not None:
            return moved
    # a 0-d tensor of the host is a number
    if foreign := [x for x in tensors if not isinstance(x, SimulatedTensor) and x.dim()]:
        raise RuntimeError(f"{of.name}: all tensors must be on {owner.torch_device}, got one of {foreign[0].device}")
    written = [
        args[place] if place < len(args) else kwargs[name] for place, name in of.written if place < len(args) or name in kwargs
    ]
    if "device" in kwargs and torch.device(kwargs["device"]).type == owner.torch_device.type:
        raw_kwargs["device"] = "cpu"
    changed = [x for x in tensors_in(written) if isinstance(x, SimulatedTensor)]
    graph = None if of.is_view or of.allocates else owner.graph
    if graph is not None and of.reads:
        graph.refuse(f"{of.name} waits for the device")
    result = func(*raw_args, **raw_kwargs) if graph is None else graph.run(func, raw_args, raw_kwargs, [x.raw for x in changed])
    if of.is_view:
        owner.count(of.name, "view")
        return _wrapped(result, owner, inputs[0].memory)
    if of.allocates:
        return _wrapped(result, owner)
    if graph is None:
        owner.count(of.name, "kernel", _launches(of.name, tensors))
        owner.timeline.queue(of.name, [x.memory for x in inputs], [x.memory for x in changed])
    if of.reads:
        owner.count(of.name, "read")
        owner.timeline.wait(owner.timeline.clock_of(owner.timeline.current))
    if not isinstance(result, (Tensor, list, tuple)):
        return result
    if written and of.returns_written:
        return written[0] if of.returns_one else tuple(written)
    made = _wrapped(result, owner)
    for tensor in tensors_in([made]) if graph is None else ():
        tensor.memory.touch(*owner.timeline.here, is_written=True)  # type: ignore[attr-defined]
    return made


def _launches(name: str, tensors: list[Tensor]) -> int:
    """As those of CUDA: ``cat`` reads 128 tensors at once, and one by one if their dtypes differ."""
    if name not in ("aten::cat", "aten::stack"):
        return 1
    return len(tensors) if len({tensor.dtype for tensor in tensors}) > 1 else -(-len(tensors) // 128)


# arguments of an operation are tensors, lists of them, or plain values; pytrees of torch are five times as slow


def _raw(values: Iterable[Any], tensors: list[Tensor]) -> list[Any]:
    """Arguments as the host has them; appends their tensors to ``tensors``."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            found.append(value.raw if isinstance(value, SimulatedTensor) else value)
        else:
            found.append(type(value)(_raw(value, tensors)) if isinstance(value, (list, tuple)) else value)
    return found


def _wrapped(result: Any, owner: SimulatedDevice, memory: Memory | None = None) -> Any:
    if isinstance(result, Tensor):
        return SimulatedTensor(result, owner, memory)
    return type(result)(_wrapped(item, owner, memory) for item in result) if isinstance(result, (list, tuple)) else result


def _moved(owner: SimulatedDevice, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The result of a copy between host and device; None for one within the device."""
    if func is _ATEN.copy_.default:
        target, source, *rest = args
        is_async = bool(rest[0] if rest else kwargs.get("non_blocking", False))
        if isinstance(target, SimulatedTensor):
            return None if isinstance(source, SimulatedTensor) else copied_to_device(owner, target, source, is_async)
        return _to_host(owner, target, source, is_async)
    source, device = args[0], kwargs.get("device")
    if device is None or torch.device(device).type == source.device.type:
        return None
    host = torch.empty_like(source.raw, dtype=kwargs.get("dtype") or source.dtype)
    return _to_host(owner, host, source, bool(kwargs.get("non_blocking", False)))


def _to_host(owner: SimulatedDevice, host: Tensor, source: SimulatedTensor, is_async: bool) -> Tensor:
    if owner.graph is not None:
        owner.graph.refuse("a copy to the host")
    owner.count_copy("to host", source.raw.nbytes, is_async)
    owner.timeline.queue("copy to the host", [source.memory], [])
    if is_async:
        owner.timeline.copy_to_host(host, source.raw)
    else:
        owner.timeline.wait(owner.timeline.clock_of(owner.timeline.current))
        host.copy_(source.raw)
    return host


def copied_to_device(owner: SimulatedDevice, target: SimulatedTensor, host: Tensor, is_async: bool) -> Tensor:
    """Copy a tensor of the host to one of the device."""
    if owner.graph is not None:
        owner.graph.refuse("a copy from the host")
    owner.count_copy("to device", host.nbytes, is_async)
    owner.timeline.queue("copy to the device", [], [target.memory])
    if is_async:
        owner.timeline.copy_from_host(host)
    else:
        owner.timeline.wait(owner.timeline.clock_of(owner.timeline.current))
    target.raw.copy_(host)
    return target

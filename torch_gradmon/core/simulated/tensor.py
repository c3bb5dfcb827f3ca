"""Tensors of a simulated device: each has a tensor in the host's memory that only operations of the device see."""

from __future__ import annotations

from collections.abc import Callable
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
        kwargs = dict(kwargs or {})
        owner = next(x.owner for x in tensors_in((*args, *kwargs.values())) if isinstance(x, SimulatedTensor))
        return _run(owner, func, args, kwargs)

    def tolist(self) -> Any:
        """Its values, which waits for the device."""
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        """Its memory is used on ``stream`` too."""
        self.memory.keep_for(stream.stream_id)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.raw!r})"


def _run(owner: SimulatedDevice, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    if func in (_ATEN._to_copy.default, _ATEN.copy_.default):
        moved = _moved(owner, func, args, kwargs)
        if moved is not None:
            return moved
    tensors = list(tensors_in((*args, *kwargs.values())))
    inputs = [x for x in tensors if isinstance(x, SimulatedTensor)]
    # a 0-d tensor of the host is a number
    if foreign := [x for x in tensors if not isinstance(x, SimulatedTensor) and x.dim()]:
        raise RuntimeError(f"{name}: all tensors must be on {owner.torch_device}, got one of {foreign[0].device}")
    written = _written(func._schema.arguments, args, kwargs)
    if "device" in kwargs and torch.device(kwargs["device"]).type == owner.torch_device.type:
        kwargs = {**kwargs, "device": "cpu"}
    raw = _mapped(_raw, args), {key: _mapped(_raw, value) for key, value in kwargs.items()}
    changed = [x for x in tensors_in(written) if isinstance(x, SimulatedTensor)]
    graph = None if func.is_view or name in _ALLOCATE else owner.graph
    if graph is not None and name in _READ:
        graph.refuse(f"{name} waits for the device")
    result = func(*raw[0], **raw[1]) if graph is None else graph.run(func, *raw, [x.raw for x in changed])
    if func.is_view:
        owner.count(name, "view")
        return _mapped(lambda raw: SimulatedTensor(raw, owner, inputs[0].memory), result)
    if name in _ALLOCATE:
        return _mapped(lambda raw: SimulatedTensor(raw, owner), result)
    if graph is None:
        owner.count(name, "kernel", _launches(name, tensors))
        owner.timeline.queue(name, [x.memory for x in inputs], [x.memory for x in changed])
    if name in _READ:
        owner.count(name, "read")
        owner.timeline.wait(owner.timeline.clock_of(owner.timeline.current))
    if not isinstance(result, (Tensor, list, tuple)):
        return result
    if written and func._schema.returns and func._schema.returns[0].alias_info is not None:
        return written[0] if len(func._schema.returns) == 1 else tuple(written)
    made = _mapped(lambda raw: SimulatedTensor(raw, owner), result)
    for tensor in tensors_in([made]) if graph is None else ():
        tensor.memory.touch(*owner.timeline.here, is_written=True)  # type: ignore[attr-defined]
    return made


def _launches(name: str, tensors: list[Tensor]) -> int:
    """As those of CUDA: ``cat`` reads 128 tensors at once, and one by one if their dtypes differ."""
    if name not in ("aten::cat", "aten::stack"):
        return 1
    return len(tensors) if len({tensor.dtype for tensor in tensors}) > 1 else -(-len(tensors) // 128)


# arguments of an operation are tensors, lists of them, or plain values; pytrees of torch are five times as slow


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_mapped(change, item) for item in value) if isinstance(value, (list, tuple)) else value


def _raw(tensor: Tensor) -> Tensor:
    return tensor.raw if isinstance(tensor, SimulatedTensor) else tensor


def _written(arguments: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes to, by its schema."""
    given = {**{argument.name: value for argument, value in zip(arguments, args, strict=False)}, **kwargs}
    changed = [argument.name for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write]
    return [given[name] for name in changed if name in given]


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

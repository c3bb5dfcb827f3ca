"""An accelerator that exists in Python only, on which tests count launches and find missing waits.

Streams and what they order, graphs, the device and its tensors, and how it is registered with torch.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..core.torch_modes import forget_devices
from ..statistics.request import PLAIN

NAME = "simulated"


#: How far each stream has certainly come, by stream.
Clock = dict[int, int]


class Memory:
    """The memory of a simulated tensor and of its views: who wrote to it and who read it last."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.stream, _ = timeline.here
        self.written: tuple[int, int] | None = None
        self.used: Clock = {}
        self.kept_for: set[int] = set()  # streams for which a release waits, see record_stream

    def __deepcopy__(self, memo: object) -> Memory:
        return Memory(self._timeline)

    def touch(self, stream: int, at: int, is_written: bool) -> None:
        self.used[stream] = at
        if is_written:
            self.written = stream, at

    def __del__(self) -> None:
        self._timeline.check_release(self)


class Timeline:
    """Streams with vector clocks: one operation precedes another if it is on the same stream, or an event between them was waited for.

    A kernel runs at once, since the host cannot look into the device's memory. What the host can see is late: a non-blocking copy leaves
    NaN in the host's memory until the host has waited for it, and its source in the host's memory must stay unchanged until then.

    Attributes:
        is_lazy: copies are late, and races are looked for.
        races: a sentence for each thing that was used too early.
        current: the stream that operations are queued on.
    """

    def __init__(self) -> None:
        self.is_lazy = False
        self.races: list[str] = []
        self._lock = threading.RLock()
        self.current = 0
        self._count = 1
        self._done: dict[int, int] = {0: 0}  # operations queued on each stream
        self._clocks: dict[int, Clock] = {0: {}}
        self._host: Clock = {}
        # copies that were started to and from the host: their place, the host's memory, and the values that it gets or must keep
        self._copies: list[tuple[tuple[int, int], Tensor, Tensor]] = []
        self._sources: list[tuple[tuple[int, int], Tensor, Tensor]] = []

    def be_lazy(self, is_lazy: bool) -> None:
        self.wait_for_all()
        self.is_lazy = is_lazy
        if is_lazy:
            self.races = []

    def new_stream(self) -> int:
        with self._lock:
            number, self._count = self._count, self._count + 1
            self._done[number], self._clocks[number] = 0, {}
            return number

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Use ``stream``, in all threads: autograd's thread works on the stream of the caller, or on that of the forward."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @property
    def here(self) -> tuple[int, int]:
        """The current stream, and how many operations were queued on it."""
        return self.current, self._done[self.current]

    def clock_of(self, stream: int) -> Clock:
        """What precedes the next operation on ``stream``."""
        with self._lock:
            return {**self._clocks[stream], stream: self._done[stream]}

    def wait_on(self, stream: int, clock: Clock) -> None:
        """The next operations on ``stream`` come after what ``clock`` has."""
        with self._lock:
            _advance(self._clocks[stream], clock)

    def queue(self, name: str, read: list[Memory], written: list[Memory]) -> None:
        with self._lock:
            stream = self.current
            self._done[stream] += 1
            now = self._done[stream]
            if self.is_lazy:
                clock = dict(self._clocks[stream])
                _advance(clock, self._host)
                for memory in read:
                    if memory.written is not None and not _precedes(memory.written, stream, clock):
                        self.races.append(f"{name} on stream {stream} reads what stream {memory.written[0]} may still write")
                for memory in written:
                    early = {user for user, at in memory.used.items() if not _precedes((user, at), stream, clock)}
                    if early:
                        self.races.append(f"{name} on stream {stream} writes to what stream {min(early)} may still use")
            for memory in read:
                memory.touch(stream, now, is_written=False)
            for memory in written:
                memory.touch(stream, now, is_written=True)

    def check_release(self, memory: Memory) -> None:
        """Memory is free for the next tensor of the stream that it was allocated on."""
        if not self.is_lazy:
            return
        with self._lock:
            clock = {**self._clocks[memory.stream]}
            _advance(clock, self._host)
            for stream, at in memory.used.items():
                if stream != memory.stream and stream not in memory.kept_for and clock.get(stream, 0) < at:
                    self.races.append(f"memory of stream {memory.stream} is released while stream {stream} may still use it")

    def copy_to_host(self, host: Tensor, values: Tensor) -> None:
        """A non-blocking copy that was queued just now. It spoils ``host`` until :meth:`wait` was called."""
        if not self.is_lazy:
            host.copy_(values)
            return
        with self._lock:
            self._copies.append((self.here, host, values.clone()))
            # what cannot be taken for a value
            host.fill_(torch.nan if host.is_floating_point() else -1 if host.dtype.is_signed else 1)

    def copy_from_host(self, host: Tensor) -> None:
        """A non-blocking copy of ``host`` to the device that was queued just now."""
        if self.is_lazy:
            with self._lock:
                self._sources.append((self.here, host, host.clone()))

    def wait(self, clock: Clock) -> None:
        with self._lock:
            _advance(self._host, clock)
            for _, host, values in self._finished(self._copies):
                host.copy_(values)
            for _, host, values in self._finished(self._sources):
                if not torch.allclose(host, values, rtol=0.0, atol=0.0, equal_nan=True):
                    self.races.append("the host changed memory while it was copied to the device")

    def _finished(self, copies: list[tuple[tuple[int, int], Tensor, Tensor]]) -> list[tuple[tuple[int, int], Tensor, Tensor]]:
        """Take out those that the host has waited for."""
        waiting = [copy for copy in copies if self._host.get(copy[0][0], 0) < copy[0][1]]
        finished = [copy for copy in copies if self._host.get(copy[0][0], 0) >= copy[0][1]]
        copies[:] = waiting
        return finished

    def awaited(self, stream: int) -> int:
        """How many operations of ``stream`` the host has waited for."""
        return self._host.get(stream, 0)

    def is_past(self, clock: Clock) -> bool:
        """Whether the host has waited for all that ``clock`` has."""
        return all(self._host.get(stream, 0) >= at for stream, at in clock.items())

    def wait_for_all(self) -> None:
        self.wait(dict(self._done))


def _advance(clock: Clock, other: Clock) -> None:
    for stream, at in other.items():
        clock[stream] = max(clock.get(stream, 0), at)


def _precedes(place: tuple[int, int], stream: int, clock: Clock) -> bool:
    return place[0] == stream or clock.get(place[0], 0) >= place[1]


# --- graphs ----------------------------------------------------------------------------------------------------------------------


class SimulatedGraph:
    """Operations with the memory that they read and write, as in a CUDA graph.

    While it is captured nothing runs: afterwards memory has the values of before, and new tensors have none. A replay changes the values
    but, unlike an operation that Python calls, no version counter.

    Attributes:
        error: the first thing that a capture does not allow; None if there was none.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []  # the last is the result
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._made: list[Tensor] = []
        self.error: str | None = None

    def refuse(self, what: str) -> None:
        """Something that a capture does not allow, which makes the graph useless.

        Raises:
            RuntimeError: in any case.
        """
        self.error = self.error or f"operation not permitted when stream is capturing: {what}"  # CUDA's words
        raise RuntimeError(self.error)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], written: Iterable[Tensor]) -> Any:
        """Capture one operation on tensors of the host; it changes ``written``."""
        for tensor in written:
            self._before.setdefault(id(tensor), (tensor, tensor.clone()))
        result = function(*args, **kwargs)
        self._calls.append((function, args, kwargs, result))
        self._made += [tensor for tensor in tensors_in([result]) if all(tensor is not old for old in tensors_in(args))]
        return result

    def end(self) -> None:
        """The capture is over.

        Raises:
            RuntimeError: it was not allowed to do what it did.
        """
        for tensor in self._made:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        for tensor, values in self._before.values():
            tensor.copy_(values)
        self._before, self._made = {}, []
        if self.error is not None:
            raise RuntimeError(self.error)

    def replay(self) -> None:
        """Run all operations."""
        with torch.no_grad():
            for function, args, kwargs, result in self._calls:
                for old, new in zip(tensors_in([result]), tensors_in([function(*args, **kwargs)]), strict=True):
                    if old is not new:
                        old.copy_(new)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments or results of an operation: tensors, lists of them, or plain values."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


# --- the device ------------------------------------------------------------------------------------------------------------------


@dataclass
class Work:
    """What a device did.

    Attributes:
        kernels: launches by operation, views apart.
        views: operations that launch nothing, by name.
        reads: operations whose result the host waited for, by name.
        copies_to_host: bytes of each, and whether the host waited.
        copies_to_device: the same.
        waits_for_events: how often the host waited for an event or a stream that had not been waited for; only while the device is lazy.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    views: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)
    copies_to_host: list[tuple[int, bool]] = field(default_factory=list)
    copies_to_device: list[tuple[int, bool]] = field(default_factory=list)
    waits_for_events: int = 0

    @property
    def launches(self) -> int:
        """Number of kernels."""
        return sum(self.kernels.values())

    @property
    def waits(self) -> int:
        """How often the host waited: reads and blocking copies."""
        return sum(self.reads.values()) + sum(waits for _, waits in (*self.copies_to_host, *self.copies_to_device))


class SimulatedDevice:
    """An accelerator that exists in Python only: ``model.to(device.torch_device)`` and the usual training loop run on it.

    Each operation runs on the CPU at once, and is counted as a kernel. While the device is :meth:`lazy` it shows what a real one would not
    forgive. Torch's optimizers and clips need ``foreach=False`` here: they choose by the exact type of a tensor.

    Attributes:
        torch_device: ``simulated:0``.
        timeline: its streams.
        work: what it did so far.
        graph: the one that is captured, or None.
        has_float64: whether operations may be in float64; to be set before the first tensor is made.
    """

    def __init__(self) -> None:
        self.torch_device = torch.device(NAME, 0)
        self.timeline, self.work = Timeline(), Work()
        self.graph: SimulatedGraph | None = None
        self.has_float64 = True
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> SimulatedDevice:
        return self

    def count(self, name: str, kind: str, launches: int = 1) -> None:
        """One operation: a ``"kernel"`` of this number of launches, a ``"view"`` or a ``"read"``."""
        with self._lock:
            {"kernel": self.work.kernels, "view": self.work.views, "read": self.work.reads}[kind][name] += launches

    def count_copy(self, way: str, size: int, is_async: bool) -> None:
        """One copy ``"to host"`` or ``"to device"`` of ``size`` bytes."""
        with self._lock:
            (self.work.copies_to_host if way == "to host" else self.work.copies_to_device).append((size, not is_async))

    def count_wait(self) -> None:
        """The host waited for an event."""
        with self._lock:
            self.work.waits_for_events += 1

    @contextmanager
    def counted(self) -> Iterator[Work]:
        """Count apart what the device does within the block."""
        before, self.work = self.work, Work()
        try:
            yield self.work
        finally:
            self.work = before

    @contextmanager
    def lazy(self) -> Iterator[None]:
        """Within the block nothing finishes before the host waits for it.

        Memory of a non-blocking copy to the host holds NaN until then.

        Raises:
            AssertionError: at the end of the block, with all that was used too early.
        """
        self.timeline.be_lazy(True)
        try:
            yield
            self.timeline.wait_for_all()
            assert not self.timeline.races, "; ".join(dict.fromkeys(self.timeline.races))
        finally:
            self.timeline.be_lazy(False)

    @contextmanager
    def captured(self) -> Iterator[SimulatedGraph]:
        """Capture the work of the block into a graph instead of doing it.

        Raises:
            RuntimeError: the block waited for the device, or copied from or to the host.
        """
        graph = self.graph = SimulatedGraph()
        try:
            yield graph
        finally:
            self.graph = None
            graph.end()


# --- its tensors -----------------------------------------------------------------------------------------------------------------


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
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        """Its memory is used on ``stream`` too."""
        self.memory.kept_for.add(stream.stream_id)

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


# --- registration with torch -----------------------------------------------------------------------------------------------------


class Stream:
    """A stream of the device, with the methods of torch's streams."""

    def __init__(self, device: object = None, *, stream_id: int | None = None) -> None:
        self._timeline = simulated_device().timeline
        self.stream_id = self._timeline.new_stream() if stream_id is None else stream_id

    def wait_event(self, event: Event) -> None:
        """What is queued next comes after ``event``."""
        self._timeline.wait_on(self.stream_id, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        """What is queued next comes after what ``stream`` has by now."""
        self._timeline.wait_on(self.stream_id, self._timeline.clock_of(stream.stream_id))

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        _wait(self._timeline, self._timeline.clock_of(self.stream_id))


class Event:
    """An event of the device, with the methods of torch's events."""

    def __init__(self, device: object = None, **_: object) -> None:
        self._timeline = simulated_device().timeline
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = self._timeline.clock_of(self._timeline.current if stream is None else stream.stream_id)

    def wait(self, stream: Stream | None = None) -> None:
        self._timeline.wait_on(self._timeline.current if stream is None else stream.stream_id, self.clock)

    def query(self) -> bool:
        """Whether the host need not wait. While the device is lazy, only a wait lets anything finish."""
        if (graph := simulated_device().graph) is not None:
            graph.refuse("a question about an event")
        return not self._timeline.is_lazy or self._timeline.is_past(self.clock)

    def synchronize(self) -> None:
        _wait(self._timeline, self.clock)


def _wait(timeline: Timeline, clock: Clock) -> None:
    if (graph := simulated_device().graph) is not None:
        graph.refuse("a wait for an event or a stream")
    if timeline.is_lazy and not timeline.is_past(clock):
        simulated_device().count_wait()
    timeline.wait(clock)


class _Module:
    """The functions of ``torch.simulated``, as other devices have them."""

    Event = Event
    Stream = Stream

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """The device draws from the generator of the CPU."""

    def current_stream(self, device: object = None) -> Any:
        return self.Stream(stream_id=simulated_device().timeline.current)

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        return simulated_device().timeline.on(stream.stream_id)

    def is_current_stream_capturing(self) -> bool:
        return simulated_device().graph is not None

    def get_device_properties(self, device: object = None) -> Any:
        return SimpleNamespace(has_fp64=simulated_device().has_float64)

    def synchronize(self, device: object = None) -> None:
        simulated_device().timeline.wait_for_all()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


_library: Any = None


@lru_cache(maxsize=1)
def simulated_device() -> SimulatedDevice:
    """The device, registered with torch once in a process.

    Raises:
        RuntimeError: this release of torch has no devices in Python, or another one is registered.
    """
    from torch.utils import backend_registration

    set_up: Callable[..., None] | None = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if set_up is None:
        raise RuntimeError(f"torch {torch.__version__} has no devices in Python; 2.10 and later have")
    set_up(NAME, backend_module=_Module())
    forget_devices()
    PLAIN.add(SimulatedTensor)  # tensors of other devices are ordinary ones
    device = SimulatedDevice()
    global _library  # it must stay alive
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def empty(size: Sequence[int], dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
        layout = memory_format or torch.contiguous_format
        return SimulatedTensor(torch.empty(size, dtype=dtype, memory_format=layout, device="cpu"), device)

    def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: Any = None, **_: Any) -> Tensor:
        return SimulatedTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), device)

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        """What ``torch.tensor(..., device=)`` calls, past the type of the tensor."""
        return copied_to_device(device, target, source, non_blocking)  # type: ignore[arg-type]

    _library.impl("_copy_from", copy_from, "PrivateUse1")
    _library.impl("empty.memory_format", lambda size, *_, **options: empty(size, **options), "PrivateUse1")
    _library.impl("empty_strided", lambda size, stride, *_, **options: empty_strided(size, stride, **options), "PrivateUse1")
    return device

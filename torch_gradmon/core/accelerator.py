"""What differs between kinds of accelerators: events, memory for copies, random generators. Only the Triton kernels name a kind, too."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .compat import accelerator_kind

#: Kinds of devices whose first request for pinned memory failed, and those for which one was met.
_UNPINNED: set[str] = set()
_PINNED: set[str] = set()
#: Bytes that work on a device may take for a moment, and the part of its memory.
_SPARE, _PART = 256 << 20, 128
#: The address of the current stream by the number of its device; private, and absent in builds without CUDA.
_RAW_STREAM: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
#: Backends of process groups for memory of the host, which may take that of some devices too.
_OF_HOSTS = ("gloo", "mpi")


def functions_of(device: torch.device) -> Any:
    """The module with the functions of a kind of device, such as ``torch.cuda`` or ``torch.xpu``; None if it has none."""
    try:
        return torch.get_device_module(device)
    except (RuntimeError, AttributeError):
        return None


def in_use() -> torch.device | None:
    """The current accelerator; None if there is none, or none was used yet. Initialises nothing."""
    kind = accelerator_kind()
    functions = None if kind is None else functions_of(kind)
    if kind is None or functions is None or not _is_used(functions):
        return None
    return torch.device(kind.type, getattr(functions, "current_device", lambda: 0)())


def _is_used(functions: Any) -> bool:
    """Whether the process uses the device. To ask whether there is one may itself initialise a driver, which a fork does not survive."""
    initialised = getattr(functions, "is_initialized", None)
    return bool(functions.is_available() if initialised is None else initialised())


def of_backend(name: str) -> torch.device:
    """The device that the tensors of a process group must be on; ``name`` is that of its backend, such as ``"nccl"``."""
    kind = accelerator_kind()
    if kind is None or kind.type == "mps" or any(of_hosts in name for of_hosts in _OF_HOSTS):
        return torch.device("cpu")
    return torch.device(kind.type, getattr(functions_of(kind), "current_device", lambda: 0)())


def has_triton_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels may run: on GPUs of NVIDIA, and of AMD, which torch calls by the same name."""
    return device.type == "cuda"


def described() -> Iterator[tuple[str, str, bool]]:
    """Each accelerator: its name for torch, its product name, and whether the Triton kernels may run."""
    kind = accelerator_kind()
    functions = None if kind is None else functions_of(kind)
    if kind is None or functions is None or not functions.is_available():
        return
    for number in range(functions.device_count()):
        device = torch.device(kind.type, number)
        product = getattr(functions, "get_device_name", lambda _: kind.type)(number)
        yield str(device), product, has_triton_kernels(device)


@lru_cache(maxsize=64)
def spare_memory(device: torch.device) -> int:
    """Bytes of the device that may be taken for a moment, to save launches: 256 MB, and a 128th of all; 0 if that is unknown."""
    try:
        properties = getattr(functions_of(device), "get_device_properties", lambda _: None)(device)
    except (AssertionError, RuntimeError):  # not in this build of torch
        properties = None
    return min(_SPARE, getattr(properties, "total_memory", 0) // _PART)


@lru_cache(maxsize=64)
def has_float64(device: torch.device) -> bool:
    """Whether ``device`` computes in float64. Those of Apple (MPS) and some of Intel (XPU) do not."""
    if device.type in ("cpu", "cuda", "meta"):
        return True
    try:
        properties = getattr(functions_of(device), "get_device_properties", lambda _: None)(device)
    except (AssertionError, RuntimeError):  # not in this build of torch: a fake tensor
        properties = None
    return device.type != "mps" and bool(getattr(properties, "has_fp64", True))


# --- graphs ----------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def capture_check() -> Callable[[], bool] | None:
    """The function that knows whether work of the current stream is captured into a graph, so that nothing runs before a replay.

    None where no device can capture. Initialises nothing.
    """
    kind = accelerator_kind()
    functions = None if kind is None else functions_of(kind)
    check: Callable[[], bool] | None = getattr(functions, "is_current_stream_capturing", None)
    if check is None:
        return None

    def captures() -> bool:
        try:  # a build for CUDA on a machine without, or a child of a process that has used it
            return _is_used(functions) and check()
        except (AssertionError, RuntimeError):
            return False

    return captures


def forget_devices() -> None:
    """Another accelerator is registered: look at all again."""
    capture_check.cache_clear()
    has_float64.cache_clear()
    spare_memory.cache_clear()


# --- streams ---------------------------------------------------------------------------------------------------------------------


def current_stream(device: torch.device) -> Any:
    """The stream that work on ``device`` is queued on, with a ``stream_id``; None if it has no streams. Work on others may run before."""
    try:
        return getattr(functions_of(device), "current_stream", lambda _: None)(device)
    except (AssertionError, RuntimeError):  # not in this build of torch: a fake tensor
        return None


def stream_number(device: torch.device) -> int | None:
    """The number of the current stream of ``device``; None if it has no streams. On CUDA far cheaper than :func:`current_stream`."""
    if device.type == "cuda" and device.index is not None and _RAW_STREAM is not None:
        try:
            return int(_RAW_STREAM(device.index))
        except (AssertionError, RuntimeError):  # a fake tensor
            return None
    return getattr(current_stream(device), "stream_id", None)


def keep_for_current_stream(tensor: Tensor) -> None:
    """Keep the memory of ``tensor``, once it is released, until the current stream has read it; it may be another one's."""
    if not tensor.is_cpu and (stream := current_stream(tensor.device)) is not None:
        tensor.record_stream(stream)


def on_stream(stream: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Queue work of ``device`` on ``stream``, which :func:`current_stream` returned."""
    manager: AbstractContextManager[Any] = nullcontext() if stream is None else functions_of(device).stream(stream)
    return manager


# --- copies between host and device ----------------------------------------------------------------------------------------------


def copied_to_host(source: Tensor) -> tuple[Tensor, Any]:
    """Start a copy to the host's memory, and return it with the event to wait for.

    The event is None if the device has no streams that are known to work (Apple's MPS), or is not there (a fake tensor): then the tensor
    is ``source`` itself, to be read when its values are needed.
    """
    functions = functions_of(source.device)
    if not (hasattr(functions, "Event") and hasattr(functions, "current_stream") and functions.is_available()):
        return source, None
    with on(source.device):
        host = _host_memory(source)
        host.copy_(source, non_blocking=True)
        event = functions.Event()
        event.record()
    return host, event


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` the current one."""
    manager = getattr(functions_of(device), "device", None)
    return nullcontext() if manager is None else manager(device)


def copied_to_device(source: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor of the host. The host does not wait where its memory can be pinned."""
    if device.type == "cpu":
        return source
    pinned = _pinned(source, device)
    # the caching allocator does not use pinned memory again before it was read
    return source.to(device) if pinned is None else pinned.copy_(source).to(device, non_blocking=True)


def copied_module(module: nn.Module) -> nn.Module:
    """A deep copy. The weights of its recurrent layers lie in one piece, as those of any on a GPU do: else cuDNN warns at each call."""
    copied = copy.deepcopy(module)
    for part in copied.modules():
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters()
    return copied


def _host_memory(like: Tensor) -> Tensor:
    """Memory for a copy, pinned where that is possible: only then a copy can run behind the host's back."""
    pinned = _pinned(like, like.device)
    return torch.empty(like.shape, dtype=like.dtype, device="cpu") if pinned is None else pinned


def _pinned(like: Tensor, device: torch.device) -> Tensor | None:
    if device.type not in _UNPINNED:
        try:
            # the caching allocator reuses these few kilobytes in the next step
            found = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
        except (RuntimeError, NotImplementedError):
            if device.type not in _PINNED:  # else the memory of the host is short for the moment
                _UNPINNED.add(device.type)
            return None
        _PINNED.add(device.type)
        return found
    return None


# --- random generators -------------------------------------------------------------------------------------------------------------


def rng_state(device: torch.device) -> Tensor | None:
    """The state of the device's generator, uint8 on the host; None if it has none, or a graph is captured. Waits for nothing."""
    functions = functions_of(device)
    if not hasattr(functions, "get_rng_state"):
        return None
    with contextlib.suppress(RuntimeError):
        return functions.get_rng_state() if device.type == "mps" else functions.get_rng_state(device)  # type: ignore[no-any-return]
    return None


def set_rng_state(device: torch.device, state: Tensor) -> None:
    """Set the state that :func:`rng_state` returned."""
    functions = functions_of(device)
    if device.type == "mps":
        functions.set_rng_state(state)
    else:
        functions.set_rng_state(state, device)


@contextlib.contextmanager
def untouched_generators(devices: Iterable[torch.device | None]) -> Iterator[None]:
    """Restore the generators of these accelerators afterwards."""
    states = {device: rng_state(device) for device in devices if device is not None and device.type != "cpu"}
    try:
        yield
    finally:
        for device, state in states.items():
            if state is not None:
                set_rng_state(device, state)


def all_in_use() -> list[torch.device]:
    """All accelerators of the current kind; none if none was used yet."""
    device = in_use()
    if device is None:
        return []
    return [torch.device(device.type, number) for number in range(functions_of(device).device_count())]

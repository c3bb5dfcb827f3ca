"""What torch does differently between releases, devices and modes of the user, behind one name each."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import platform
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

# --- releases of torch ---

#: Whether ``torch.export`` can be distinguished from ``torch.compile``. In releases before 2.7 it cannot, so no graph gets statistics.
TELLS_EXPORT = hasattr(torch.compiler, "is_exporting")
#: Whether a compiled graph writes once where a checkpoint in it writes. Before 2.9 it does again where it recomputes.
CHECKPOINTS_WRITE_ONCE = torch.__version__ >= "2.9"


def is_exporting() -> bool:
    """Whether ``torch.export`` may be tracing."""
    # The flag behind torch.compiler.is_exporting(): to the compiler of 2.9.1 the function is True everywhere.
    return not TELLS_EXPORT or torch.compiler._is_exporting_flag or _is_strict_export()


def _is_strict_export() -> bool:
    """Called while tracing, but not traced. A strict export, the default of 2.7, does not set the flag there."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return bool(InstructionTranslator.current_tx().output.export)
    except AttributeError:  # nothing is being traced
        return False


# as torch.compiler.assume_constant_result does, but without importing the compiler, which takes a second
_is_strict_export._dynamo_marked_constant = True  # type: ignore[attr-defined]


def accelerator_kind() -> torch.device | None:
    """The kind of accelerator that this build of torch is for, whether there is one or not; None for a build for the CPU."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # 2.6, where there is none
        return None


def fsdp_param_groups(state: Any) -> Sequence[Any]:
    """The groups of parameters of a module under ``fully_shard``, from its state. In older releases a module has at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


# --- accelerator ---

#: Kinds of devices whose first request for pinned memory failed, and those for which one was met.
_UNPINNED: set[str] = set()
_PINNED: set[str] = set()
#: Bytes that work on a device may take for a moment, and the part of its memory.
_SPARE, _PART = 256 << 20, 128
#: The address of the current stream by the number of its device; private, and absent in builds without CUDA.
_RAW_STREAM: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


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
    return min(_SPARE, getattr(_answer(device, "get_device_properties"), "total_memory", 0) // _PART)


@lru_cache(maxsize=64)
def has_float64(device: torch.device) -> bool:
    """Whether ``device`` computes in float64. Those of Apple (MPS) and some of Intel (XPU) do not."""
    if device.type in ("cpu", "cuda", "meta"):
        return True
    return device.type != "mps" and bool(getattr(_answer(device, "get_device_properties"), "has_fp64", True))


def _answer(device: torch.device, name: str) -> Any:
    """What the function of this ``name`` of a kind of device says about ``device``; None without one."""
    try:
        return getattr(functions_of(device), name, lambda _: None)(device)
    except (AssertionError, RuntimeError):  # not in this build of torch, as for a fake tensor
        return None


# --- graphs ----------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def capture_check() -> Callable[[], bool] | None:
    """The function that knows whether work of the current stream is captured into a graph, so that nothing runs before a replay; None
    where no device can capture. Initialises nothing.
    """
    kind = accelerator_kind()
    functions = None if kind is None else functions_of(kind)
    check: Callable[[], bool] | None = getattr(functions, "is_current_stream_capturing", None)
    if functions is None or check is None:
        return None
    is_used = getattr(functions, "is_initialized", None) or functions.is_available  # see _is_used

    def captures() -> bool:
        try:  # a build for CUDA on a machine without, or a child of a process that has used it
            return bool(is_used()) and check()
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
    return _answer(device, "current_stream")


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
        host = _pinned(source, source.device)
        if host is None:  # the copy does not run behind the host's back then
            host = torch.empty(source.shape, dtype=source.dtype, device="cpu")
        host.copy_(source, non_blocking=True)
        event = functions.Event()
        event.record()
    return host, event


def on(device: torch.device) -> AbstractContextManager[Any]:
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


@contextlib.contextmanager
def untouched_generators(devices: Iterable[torch.device | None]) -> Iterator[None]:
    found = {str(device): rng_state(device) for device in devices if device is not None and device.type != "cpu"}
    try:
        yield
    finally:
        set_rng_states({device: state for device, state in found.items() if state is not None})


# --- pickles and copies without the monitor ---

_ATTRIBUTES = ("gradmon", "__reduce_ex__", "values")


class Unsaved:
    """Keeps entries of a dict of hooks out of pickles and deep copies; the hooks still run.

    It is attached to the dict, not the module: a module may have its own ``__getstate__``, shallow copies share the dict, and handles know
    the dict by its identity, so it cannot be replaced.
    """

    def __init__(self, hooks: OrderedDict[int, Any]) -> None:
        self._hooks = weakref.ref(hooks)
        self.keys: set[int] = set()
        self.monitor: weakref.ref[Any] | None = None  # of a module with MonitorMixin; also left out
        hooks.gradmon, hooks.__reduce_ex__ = self, self._reduce  # type: ignore[attr-defined, method-assign]

    def _bare(self) -> OrderedDict[int, Any]:
        hooks = self._hooks()
        assert hooks is not None  # this is a method of the dict
        bare = OrderedDict((key, hook) for key, hook in hooks.items() if key not in self.keys)
        vars(bare).update((name, value) for name, value in vars(hooks).items() if name not in _ATTRIBUTES)
        return bare

    def _reduce(self, protocol: Any) -> Any:
        return self._bare().__reduce_ex__(protocol)

    def leave_unscripted(self) -> None:
        """Hide the entries from ``torch.jit.script`` too, which compiles the dict's values; calls use its items."""
        if (hooks := self._hooks()) is not None:
            hooks.values = lambda: self._bare().values()  # type: ignore[method-assign]

    def leave_if_empty(self) -> None:
        hooks = self._hooks()
        if hooks is not None and not self.keys and self.monitor is None:
            for name in _ATTRIBUTES:
                vars(hooks).pop(name, None)


def unsaved_of(hooks: Any) -> Unsaved | None:
    return getattr(hooks, "gradmon", None)


def leave_out(handle: RemovableHandle, scripted: bool = True) -> None:
    """Keep the hook of ``handle`` out of pickles of its module or optimizer; not ``scripted``: also out of ``torch.jit.script``."""
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        hooks = reference()
        if isinstance(hooks, OrderedDict) and handle.id in hooks:
            unsaved = unsaved_of(hooks) or Unsaved(hooks)
            unsaved.keys.add(handle.id)
            if not scripted:
                unsaved.leave_unscripted()


def remove(handle: RemovableHandle) -> None:
    """Remove the hook of ``handle`` and undo :func:`leave_out`."""
    handle.remove()
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        if (unsaved := unsaved_of(reference())) is not None:
            unsaved.keys.discard(handle.id)
            unsaved.leave_if_empty()


class BareState:
    """A replacement for an object's ``__getstate__``: ``bare`` gives an attribute without anything of the monitor, None if nothing
    remains.
    """

    def __init__(self, owner: Any, bare: Callable[[Any], Any]) -> None:
        self._owner, self._bare = weakref.ref(owner), bare

    def __call__(self) -> Any:
        owner = self._owner()
        of_class = getattr(type(owner), "__getstate__", None)  # from Python 3.11 on every class has it
        state = vars(owner) if of_class is None else of_class(owner)
        if not isinstance(state, dict):
            return state
        bare = {name: self._bare(value) for name, value in state.items() if value is not self}
        return {name: value for name, value in bare.items() if value is not None or state[name] is None}


# --- process ---

#: Whether there is a process group.
has_group: Callable[[], bool] = torch.distributed.is_initialized if torch.distributed.is_available() else bool


def is_muted(group: Any, has_output_on_all: bool = False) -> bool:
    """Whether the first rank alone writes output, and this is another one: before there is a group, by the launcher's environment."""
    if has_output_on_all:
        return False
    return torch.distributed.get_rank(group) > 0 if has_group() else os.environ.get("RANK", "0") != "0"


class HomeProcess:
    """The process that made this object. A forked worker has a copy of it, and must not touch what the object's owner has open."""

    def __init__(self) -> None:
        self.number = os.getpid()

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self.number


class SharedContext:
    """A context that changes something of the whole process. Threads that are in it at the same time share one: were each to restore what
    it found, the one that entered second would restore the change of the first for good. The first one makes it.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._lock = threading.RLock()  # what is collected meanwhile may leave
        self._inside = 0
        self._context: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._context = self._make()
                self._context.__enter__()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._context is not None:
                self._context.__exit__(None, None, None)
                self._context = None


def process_facts() -> dict[str, Any]:
    """What identifies this process, for :func:`is_gone`."""
    number = os.getpid()
    return {"id": number, "began": _began(number), "where": _where()}


def is_gone(facts: Mapping[str, Any]) -> bool:
    """Whether a process with these facts certainly no longer exists. One of another machine, container or user may, and so may any where
    the system does not show when processes began, as Linux does.
    """
    number, began, where = (facts.get(name) for name in ("id", "began", "where"))
    if os.name != "posix" or not began or not where or where != _where():  # Windows would send a signal
        return False
    if not isinstance(number, int) or not 0 < number < 1 << 31:
        return False
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except OSError:  # of another user: it exists
        return False
    now = _began(number)
    return now is not None and now != began  # another process has its number by now, or none but its entry is left


def _where() -> str:
    """This machine since it was started, and the container on it: a hash, since runs are given away. Empty if the system shows neither."""
    try:
        found = [platform.node(), Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        return ""
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


def _began(number: int) -> str | None:
    """When a process started, in the system's own unit; empty if it has ended, None if the system does not show it."""
    try:
        state, *rest = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if state in "ZX" else rest[18]


# --- the exception with which a training ends ---

#: How loops and generators end that are not interrupted.
_REGULAR = (StopIteration, StopAsyncIteration, GeneratorExit)


def ending(handled: int, is_last: bool) -> str:
    """The exception that ends a training now, as text; empty without one.

    It is the one that passes through the caller or is handled there, as in a ``finally``, unless the training went on inside of the
    handler: ``handled`` is the id of the one that the script handled when the training last called the model. At the end of the
    interpreter it is the one that ended the script, if this training ``is_last``: nothing else was trained since.
    """
    error = sys.exc_info()[1]
    if id(error) == handled:
        error = _of_script() if is_last else None
    if error is None or isinstance(error, _REGULAR) or (isinstance(error, SystemExit) and not error.code):
        return ""
    name, text = type(error).__name__, " ".join(str(error).split())
    return f"{name}: {text[:200]}" if text else name


def _of_script() -> BaseException | None:
    """The exception that Python has printed last, if that ended the script: neither in a prompt, nor by a runner of tests or notebooks."""
    error = getattr(sys, "last_value", None)
    trace: TracebackType | None = getattr(error, "__traceback__", None)
    if not isinstance(error, BaseException) or trace is None or hasattr(sys, "ps1"):
        return None
    return error if trace.tb_frame.f_globals.get("__name__") in ("__main__", "runpy") else None


# --- modes of the user, autocast, states of all generators ---

_NOTHING: AbstractContextManager[object] = nullcontext()
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack


def outside_dispatch_modes() -> AbstractContextManager[object]:
    """A context outside of all dispatch and function modes, in which no mode of the user sees an operation.

    Selective activation checkpointing stores results of operations in order and would return ours to the model's recomputation; flop
    counters would count them; a mode that draws random numbers would draw more.
    """
    sees_functions = _function_modes() and _sees_functions()
    if not _dispatch_modes():
        return torch._C.DisableTorchFunction() if sees_functions else _NOTHING
    return _outside_of_all_modes() if sees_functions else _disable_current_modes()


def _sees_functions() -> bool:
    # torch.set_default_device is a function mode without side effects; metric functions may rely on it
    stack = map(torch._C._get_function_stack_at, range(_function_modes()))
    return not all(isinstance(mode, DeviceContext) for mode in stack)


@contextlib.contextmanager
def _outside_of_all_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


#: Makes a context with gradients and without inference mode, as in a new thread: for functions of the script, which may train.
fresh_grad_mode = partial(torch.inference_mode, False)


@contextlib.contextmanager
def autocast_cache_kept() -> Iterator[None]:
    """Keep autocast's cache of cast weights unchanged.

    The outermost ``torch.autocast`` context clears the cache on exit. A loop that enables autocast by ``torch.set_autocast_enabled`` has
    no context, so one of ours, or of a metric function, would be the outermost. Its exit would make the model cast its weights again, and
    gradients would be rounded and summed differently.
    """
    is_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # weights cast inside would have no graph
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.set_autocast_cache_enabled(is_enabled)


@contextlib.contextmanager
def no_autocast(device_type: str) -> Iterator[None]:
    """Disable autocast for this device type, and keep its cache."""
    is_enabled = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    with autocast_cache_kept():
        if is_enabled:
            torch.set_autocast_enabled(device_type, False)
        try:
            yield
        finally:
            if is_enabled:
                torch.set_autocast_enabled(device_type, True)


def is_traced() -> bool:
    """Whether operations are traced, or run on tensors without values: by ``make_fx``, AOTAutograd, or under a fake mode."""
    if not _dispatch_modes():
        return False
    key = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(each) is not None for each in (key.FUNCTIONAL, key.PROXY, key.FAKE))


def is_compiling() -> bool:
    """Whether the running code is traced by ``torch.compile`` or ``torch.export``. Not so in the other threads while one of them compiles,
    unlike ``torch.compiler.is_compiling()`` from torch 2.13 on.
    """
    return torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and is_traced())


def rng_states() -> dict[str, Tensor]:
    """The states of torch's random generators by device, as uint8 on the host: of the CPU, and of the current accelerator if it is in use.
    Nothing waits for a device.
    """
    states, device = {"cpu": torch.get_rng_state()}, in_use()
    if device is not None and (state := rng_state(device)) is not None:
        states[str(device)] = state
    return states


def set_rng_states(states: Mapping[str, Tensor]) -> None:
    for name, state in states.items():
        device = torch.device(name)
        if device.type == "cpu":
            torch.set_rng_state(state)
        elif device.type == "mps":
            functions_of(device).set_rng_state(state)
        else:
            functions_of(device).set_rng_state(state, device)


def will_run(node: Any) -> bool:
    """Within a backward pass: whether it runs this node, and does not return what the node would accumulate."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # the engine's answer for a leaf whose gradient is returned
        return False

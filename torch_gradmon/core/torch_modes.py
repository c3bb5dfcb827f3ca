"""Modes of torch: what others put around the model's forward must not see our operations; autocast; and the random generators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

_NOTHING: AbstractContextManager[object] = nullcontext()
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack


def outside_dispatch_modes() -> AbstractContextManager[object]:
    """A context outside of all dispatch modes and function modes, in which no mode of the user sees an operation.

    Selective activation checkpointing keeps the results of operations in order, and would hand ours to the model's
    recomputation; flop counters would count them; a mode that draws random numbers would draw more of them.
    """
    sees_functions = _function_modes() and _sees_functions()
    if not _dispatch_modes():
        return torch._C.DisableTorchFunction() if sees_functions else _NOTHING
    return _outside_of_all_modes() if sees_functions else _disable_current_modes()


def call_outside_modes(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` as in :func:`outside_dispatch_modes`, at no cost where no mode is active: a step enters several fences."""
    if not (_function_modes() or _dispatch_modes()):
        return function(*args)
    with outside_dispatch_modes():
        return function(*args)


def _sees_functions() -> bool:
    # torch.set_default_device is a function mode too, without side effects; metric functions may rely on it
    stack = map(torch._C._get_function_stack_at, range(_function_modes()))
    return not all(isinstance(mode, DeviceContext) for mode in stack)


@contextlib.contextmanager
def _outside_of_all_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@contextlib.contextmanager
def autocast_cache_kept() -> Iterator[None]:
    """Whatever runs inside, autocast's cache of cast weights stays as it is.

    The outermost ``torch.autocast`` context empties the cache when it exits. A loop that enables autocast by
    ``torch.set_autocast_enabled`` has entered no context, so one of ours, or of a metric function, would be the outermost: its
    exit would make the model cast its weights again, and gradients would be rounded and summed in another way.
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
    """Autocast is off inside for this device type, and its cache stays as it is."""
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
    """Whether operations are being recorded or tried on tensors without values: by ``make_fx``, AOTAutograd, or under a fake mode."""
    if not _dispatch_modes():
        return False
    key = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(each) is not None for each in (key.FUNCTIONAL, key.PROXY, key.FAKE))


def rng_states() -> dict[str, Tensor]:
    """The states of torch's random generators by device, uint8 on the CPU: that of the CPU, and of the current GPU if it is used.

    They are on the host, so nothing waits for a device.
    """
    with outside_dispatch_modes():
        states = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            with contextlib.suppress(RuntimeError):  # while a graph is captured it cannot be asked for
                device = torch.cuda.current_device()
                states[f"cuda:{device}"] = torch.cuda.get_rng_state(device)
    return states

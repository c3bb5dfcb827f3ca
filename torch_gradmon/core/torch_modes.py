"""Modes of torch: hiding our operations from modes of the user, autocast, and random generators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from . import accelerator

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


def fresh_grad_mode() -> AbstractContextManager[object]:
    """A context with gradients and without inference mode, as in a new thread: for functions of the script, which may train."""
    return torch.inference_mode(False)


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
    """The states of torch's random generators by device, as uint8 on the CPU: of the CPU, and of the current accelerator if it is in use.

    They are on the host, so nothing waits for a device.
    """
    with outside_dispatch_modes():
        states = {"cpu": torch.get_rng_state()}
        device = accelerator.in_use()
        if device is not None and (state := accelerator.rng_state(device)) is not None:
            states[str(device)] = state
    return states


def set_rng_states(states: Mapping[str, Tensor]) -> None:
    """Set the states that :func:`rng_states` returned."""
    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state)
        else:
            accelerator.set_rng_state(torch.device(device), state)


def is_accumulating() -> bool:
    """In a hook on the gradient of a leaf: whether the pass accumulates it, and does not return it as ``torch.autograd.grad`` does."""
    node = torch._C._current_autograd_node()
    return node is None or will_run(node)


def will_run(node: Any) -> bool:
    """Within a backward pass: whether it runs this node, and does not return what the node would accumulate."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # the engine's answer for a leaf whose gradient is returned
        return False


def is_batched(value: object) -> bool:
    """Whether it is a batch of gradients in a tensor without readable values, as in ``torch.autograd.grad(is_grads_batched=True)``."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(value)

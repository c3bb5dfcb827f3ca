"""What a program switches on around its loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: Those that see what a recorder does, its operations or its hooks.
SEEING = ("dispatch_mode", "function_mode", "fast_path")


class RandomDispatch(TorchDispatchMode):
    """Draws a random number whenever anything is computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch.rand(())
        return func(*args, **(kwargs or {}))


class RandomFunctions(TorchFunctionMode):
    """The same one floor up."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            torch.rand(())
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _switched(on: Callable[[], object], off: Callable[[], object]) -> Iterator[None]:
    on()
    try:
        yield
    finally:
        off()


def around(name: str) -> Any:
    """The context in which a loop runs."""
    if name == "fast_path":  # of encoders in evaluation, which torch leaves where any module has a hook
        return contextlib.nullcontext()
    enable = torch.backends.mha.set_fastpath_enabled
    with_hooks = _switched(lambda: enable(False), lambda: enable(True))
    return with_hooks if not name else both(with_hooks, _around(name))


@contextlib.contextmanager
def both(one: Any, other: Any) -> Iterator[None]:
    """The one context, and the other inside of it."""
    with one, other:
        yield


def _around(name: str) -> Any:
    if name == "default_float64":
        return _switched(lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32))
    if name == "deterministic":
        return _switched(lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False))
    if name == "saved_tensors":
        return torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda tensor: tensor)
    contexts = {
        "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
        "device": lambda: torch.device("cpu"),
        "dispatch_mode": RandomDispatch,
        "function_mode": RandomFunctions,
    }
    return contexts.get(name, contextlib.nullcontext)()


@contextlib.contextmanager
def autocast_set() -> Iterator[None]:
    """Autocast switched on without its context manager."""
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()

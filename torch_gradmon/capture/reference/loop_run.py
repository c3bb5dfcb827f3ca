"""A run of the reference module by the training loop itself, in a step that the loop has begun explicitly."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...core.fence import Fence
from ...core.torch_modes import outside_dispatch_modes
from ...statistics.request import refusal
from ..hooks import Handles, ModuleHook, takes_hooks
from ..modules.compiled import is_compiled
from ..modules.pass_tracker import PassTracker
from ..modules.structure import tensors_of
from .source import ReplayedForward


@dataclass
class LoopForward:
    """One run of the reference: inputs and outputs of its parts, and all outputs by path, in the order of calls."""

    run: ReplayedForward = field(default_factory=lambda: ReplayedForward(keeps_all=True))
    outputs: dict[str, deque[Tensor]] = field(default_factory=dict)

    def returned(self, name: str, output: Any) -> None:
        """A part has returned."""
        self.run.returned(name, output)
        for path, tensor in tensors_of(output, name):
            if refusal(tensor) is None:
                self.outputs.setdefault(path, deque()).append(tensor.detach().clone())


class LoopRun:
    """Keeps the reference's last run by the loop, which the model's next run is compared with, so no extra run is needed.

    torch-module-monitor compares this way: the reference runs first, on inputs of the loop's choice. It applies to steps in which the
    reference ran before the model. A loop that runs it after the model, such as a teacher, has another purpose.

    Memory: copies of the first inputs and of the outputs of the requested parts.

    Args:
        passes: knows when nothing is measured.
        fence: gets failures and counts the time.
    """

    def __init__(self, passes: PassTracker, fence: Fence) -> None:
        self._passes, self._fence = passes, fence
        self._handles = Handles()
        self._running: LoopForward | None = None
        self._ran: LoopForward | None = None
        self._leads: bool | None = None

    def begin(self, reference: nn.Module, parts: Mapping[str, nn.Module]) -> None:
        """Start a step that compares with ``reference`` and its ``parts`` by name."""
        self.end()
        if is_compiled(reference):  # hooks would cause a recompilation, and not be called
            return
        for name, part in parts.items():
            if takes_hooks(part):
                hook = ModuleHook(self._called, name)
                self._handles.of_module(part.register_forward_pre_hook(hook, with_kwargs=True))
                self._handles.of_module(part.register_forward_hook(ModuleHook(self._returned, name)))
        if self._handles and takes_hooks(reference):  # around the other hooks
            self._handles.of_module(reference.register_forward_pre_hook(ModuleHook(self._began), prepend=True))
            self._handles.of_module(reference.register_forward_hook(ModuleHook(self._ended), always_call=True))

    def end(self) -> None:
        """End the step."""
        self._handles.remove()
        self._running = self._ran = self._leads = None

    def take(self) -> LoopForward | None:
        """The run to compare the model's run with, which begins now; None if the loop made none."""
        ran, self._ran = self._ran, None
        if self._leads is None:
            self._leads = ran is not None
        return ran if self._leads else None

    def _began(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # runs by the monitor are paused, and one in a backward pass is a recomputation
        ours = self._passes.paused or torch._C._current_graph_task_id() != -1
        self._running = None if ours or torch._C._functorch.peek_interpreter_stack() is not None else LoopForward()

    def _called(self, name: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if (ran := self._running) is not None:
            self._fenced(lambda: ran.run.called(name, args, kwargs or {}))

    def _returned(self, name: str, part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if (ran := self._running) is not None:
            self._fenced(lambda: ran.returned(name, output))

    def _fenced(self, work: Callable[[], None]) -> None:
        start = time.perf_counter()
        try:
            with torch.no_grad(), outside_dispatch_modes():
                work()
        except Exception as error:
            self._running = None  # the monitor runs the reference itself then
            self._fence.complaints.add("reference:loop", "a run of the reference by the loop could not be followed", error)
        self._fence.add_time(time.perf_counter() - start)

    def _ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._running is not None:
            self._ran = self._running if self._running.outputs else None
            self._running = None

"""Hooks on the watched model's forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...capture.hooks import Handles, ModuleHook, takes_hooks, untraced_by_itself
from ...core.fence import Fence
from .idle_stretch import IdleStretch
from .listener import LoopDriver
from .optimizer_hooks import OptimizerHooks

_dispatch_modes = torch._C._len_torch_dispatch_stack


class _RootHook(ModuleHook):
    """Calls ``method`` unless the call of the model is one that is only counted."""

    def __init__(self, method: Callable[..., Any], stretch: IdleStretch) -> None:
        super().__init__(method)
        self._stretch = weakref.ref(stretch)

    def __call__(self, *args: Any) -> Any:
        """Count the call, or call the method."""
        if torch.compiler.is_dynamo_compiling():
            return None
        stretch = self._stretch()
        if stretch is not None and stretch.left and not _dispatch_modes() and stretch.forward_began(args[0]):
            return None
        return super().__call__(*args)


untraced_by_itself(_RootHook.__call__)


class ModelHooks:
    """Reports calls of the model.

    Args:
        driver: receives the reports; held weakly.
        fence: guards each report.
        module: the watched model.
        optimizers: hooks on the optimizers.
        stretch: idle steps that are only counted.
    """

    def __init__(
        self, driver: LoopDriver, fence: Fence, module: nn.Module, optimizers: OptimizerHooks, stretch: IdleStretch
    ) -> None:
        self._driver, self._fence = weakref.ref(driver), fence
        self._optimizers = optimizers
        self._handles = Handles()
        if takes_hooks(module):
            self._handles.of_module(module.register_forward_pre_hook(_RootHook(self._forward_hook, stretch)))

    def remove(self) -> None:
        """Take the hook away; calling it again does nothing."""
        self._handles.remove()

    def _forward_hook(self, module: nn.Module, args: tuple[object, ...]) -> None:
        self._fence.run(self._root_called, module, True)

    def root_called(self, module: nn.Module) -> None:
        """The root is called, as another hook on it reports. Idempotent."""
        self._fence.run(self._root_called, module, False)

    def part_called(self, module: nn.Module) -> None:
        """A part of the model is called, by something else than the root."""
        self._fence.run(self._forward_began, module, True)

    def _root_called(self, module: nn.Module, by_own_hook: bool) -> None:
        driver = self._driver()
        if self._optimizers.may_skip and driver is not None and module.training and torch._C._current_graph_task_id() == -1:
            driver.moves_buffers(module)
        if self._forward_began(module, by_own_hook) and by_own_hook and driver is not None:
            driver.root_began()

    def _forward_began(self, module: nn.Module, counts: bool) -> bool:
        """Report a training forward, and no evaluation or recomputation; whether it is one. ``counts``: nothing else reports it."""
        if not self._optimizers.steps.is_shielded:
            self._optimizers.steps.shield()
        driver = self._driver()
        if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None:
            return False  # a transform or a trace is no training
        # grad mode was switched off by the fence
        if driver is None or not self._fence.had_grad or torch._C._current_graph_task_id() != -1:
            return False
        if not module.training and not driver.may_train_in_eval():
            return False
        in_closure = self._optimizers.in_closure
        if not in_closure:
            self._optimizers.heal()
        driver.forward_began(not module.training, in_closure, counts)
        return True

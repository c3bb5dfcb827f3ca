"""Hooks of the model and its gradients, and all hooks of a loop."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from ..capture.hooks import Handles, Hook, ModuleHook, takes_hooks, untraced_by_itself
from ..core.fence import Fence
from ..core.torch_modes import is_accumulating
from ..step.model_index import Place
from .machine import StepsInBackward
from .optimizer_hooks import IdleStretch, LoopDriver, OptimizerHooks, ScalerHooks

# --- Hooks on parameters: they report the ends of backward passes, and each gradient ---


def _tensor_in(place: Place) -> int | None:
    """The identity of a parameter's inner tensor: a conversion that swaps tensors changes it, and loses the hooks."""
    parameter = place()
    return None if parameter is None else parameter._cdata


class _GradientHook(Hook):
    """Calls ``method`` with ``position`` in the first hook of each backward pass, and in all of them where optimizers may step within.

    Args:
        method: of a weakly held object.
        position: of the parameter.
        tasks: the passes that are known.
        in_backward: which optimizers step within the backward pass.
    """

    def __init__(self, method: Callable[..., Any], position: int, tasks: set[int], in_backward: StepsInBackward) -> None:
        super().__init__(method, position)
        self._tasks, self._in_backward = tasks, in_backward

    def __call__(self, *args: Any) -> Any:
        """Call the method if it has to know."""
        if torch.compiler.is_dynamo_compiling():
            return None
        within = self._in_backward
        if torch._C._current_graph_task_id() in self._tasks and within.is_settled and not within.known:
            return None
        return super().__call__(*args)


class BackwardHooks:
    """Reports the ends of backward passes. Registered in steps that take values only.

    Args:
        driver: receives the reports; held weakly.
        fence: guards each report.
        optimizers: hooks on the optimizers.
        in_backward: which optimizers step within the backward pass.

    Attributes:
        awaited: passes that have reached a parameter, and have not ended: they are running, or were interrupted.
    """

    def __init__(self, driver: LoopDriver, fence: Fence, optimizers: OptimizerHooks, in_backward: StepsInBackward) -> None:
        self._driver, self._fence = weakref.ref(driver), fence
        self._optimizers, self._in_backward = optimizers, in_backward
        self._handles = Handles()
        self._installed: tuple[Sequence[Place], Sequence[tuple[Place, Hook, Hook]]] = (), ()
        self._tensors: list[int | None] = []  # the tensor in each place when hooks were registered
        self._completing: set[int] = set()  # places with hooks after the accumulation
        self._tasks: set[int] = set()
        self.awaited: set[int] = set()
        self._is_over = False  # the engine reports the end of a backward pass right now
        self._stepped_within: set[int] = set()  # ids of the parameters of optimizers that have stepped within a backward pass

    def install(self, parameters: Iterable[Place], local: Iterable[tuple[Place, Hook, Hook]]) -> None:
        """Register the hooks for the ends of backward passes; ``local`` adds hooks on each gradient and after its accumulation."""
        self.uninstall()
        self._installed = places, local = list(parameters), list(local)
        # a parameter that an optimizer has and that is frozen now may thaw later in the step, as where two of them alternate
        owned = {id(p) for optimizer in self._optimizers.alive() for group in optimizer.param_groups for p in group["params"]}

        def is_trained(parameter: nn.Parameter | None) -> bool:
            if parameter is None or parameter.requires_grad:
                return parameter is not None
            return id(parameter) in owned and (parameter.is_floating_point() or parameter.is_complex())

        first = self._is_over or torch._C._current_graph_task_id() == -1
        for place, on_gradient, on_accumulate in local:
            if is_trained(place()):
                self._handles.on_gradient(place, on_gradient)
                self._handles.on_accumulate(place, on_accumulate, first)
        self._completing.clear()
        for position, place in enumerate(places):
            parameter = place()
            if not is_trained(parameter):
                continue
            if type(parameter) is not nn.Parameter or self._may_step_at(parameter):  # FSDP2 calls no others
                self._await_accumulation(position, first)
            else:
                # removed, one after the accumulation would go on costing as much: a part of it stays in the tensor
                self._handles.on_gradient(place, _GradientHook(self._came, position, self._tasks, self._in_backward))
        self._tensors = [_tensor_in(place) for place in places]

    def uninstall(self) -> None:
        """Remove the hooks."""
        self._handles.remove()
        self._tasks.clear()

    def revive(self, optimizer: Optimizer) -> bool:
        """Register hooks again that no longer fire although their parameters exist. Returns whether there were any.

        Parameters may be replaced as objects or, by a conversion, as the tensors inside of them.
        """
        places, local = self._installed
        if self._tensors == [_tensor_in(place) for place in places]:
            return False
        if all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"]):
            return False
        for place in places:
            if (parameter := place()) is not None:
                for attribute in ("_post_accumulate_grad_hooks", "_backward_hooks"):
                    # those of others too: it is the assignment that counts
                    hooks = getattr(parameter, attribute)
                    if hooks is not None:
                        setattr(parameter, attribute, None)
                        setattr(parameter, attribute, hooks)
        self.install(places, local)
        return True

    def _await_accumulation(self, position: int, first: bool) -> None:
        """Have the accumulation of this gradient reported, before a hook in which an optimizer steps."""
        if position not in self._completing:
            self._completing.add(position)
            self._handles.on_accumulate(self._installed[0][position], Hook(self._accumulated, position), first)

    # no fence where there is nothing to report

    def _came(self, position: int, gradient: Tensor | None) -> None:
        if not self._in_backward.is_settled or self._in_backward.known:
            self._fence.run(self._expect_step, position)
        if is_accumulating():
            self.await_end()
        else:
            self._remember(torch._C._current_graph_task_id())

    def _expect_step(self, position: int) -> None:
        parameter = self._installed[0][position]()
        if parameter is not None and self._may_step_at(parameter):  # the hook on it came after ours
            self._await_accumulation(position, first=True)

    def _accumulated(self, position: int, parameter: Tensor) -> None:
        if not self._in_backward.is_settled or self._in_backward.known:
            self._fence.run(self._report_complete, position, parameter)
        self.await_end()

    def _report_complete(self, position: int, parameter: Tensor) -> None:
        driver = self._driver()
        if driver is not None and self._may_step_at(parameter):
            driver.gradient_complete(position)

    def _may_step_at(self, parameter: Tensor) -> bool:
        """Whether the optimizer of ``parameter`` may step within the backward pass, before the first step by the hooks on it."""
        within = self._in_backward
        if within.is_settled and not within.known:
            return False
        if id(parameter) in self._stepped_within:
            return True
        hooks: dict[int, object] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        is_foreign = any(type(hook) is not Hook for hook in hooks.values()) or hasattr(parameter, "_in_backward_optimizers")
        return is_foreign or not (within.is_settled or not within.known)

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step within the running backward pass."""
        if not torch.compiler.is_dynamo_compiling():
            self._stepped_within.update(id(p) for group in optimizer.param_groups for p in group["params"])
            self.await_end()

    def await_end(self) -> None:
        """Report the end of the running backward pass, once for each pass."""
        # the engine's id identifies a pass, so that one that raised cannot block the next one
        task = torch._C._current_graph_task_id()
        if task == -1:  # FSDP2 in a pipeline calls the hooks itself, when it reduces gradients after the pass
            return
        if task not in self._tasks:
            self._remember(task)
            engine = Variable._execution_engine
            # DDP copies the reduced gradients back in a callback of its own; one queued from within a callback comes after it
            self.awaited.add(task)
            engine.queue_callback(lambda: engine.queue_callback(functools.partial(self._ended, task)))

    def _remember(self, task: int) -> None:
        if len(self._tasks) > 10_000:
            self._tasks.clear()
        self._tasks.add(task)

    def _ended(self, task: int) -> None:
        self.awaited.discard(task)
        if not self._optimizers.in_closure:
            self._optimizers.heal()
        self._is_over = True
        try:
            self._fence.run(self._report_end)
        finally:
            self._is_over = False

    def _report_end(self) -> None:
        if (driver := self._driver()) is not None:
            # at the end of a pass a running node belongs to an outer one, as in re-entrant checkpoints
            is_nested = torch._C._current_autograd_node() is not None
            driver.backward_ended(is_nested)
            if not is_nested:
                self.awaited.clear()  # also of passes that were interrupted


# --- Hooks on the watched model's forward ---


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


# --- All hooks that follow one loop ---


class LoopHooks:
    """Hooks on the model's forward, on parameters, optimizers and the scaler.

    Args:
        driver: receives the reports.
        fence: guards each report.
        module: the watched model.
        optimizers: in the order in which they step.
        scaler: their GradScaler, if one is known.
        wrappers: around the optimizers, each with the one inside.
        in_backward: which optimizers step within the backward pass.
        stretch: idle steps that are only counted.
    """

    def __init__(
        self,
        driver: LoopDriver,
        fence: Fence,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        wrappers: Sequence[tuple[Any, Optimizer]],
        in_backward: StepsInBackward,
        stretch: IdleStretch,
    ) -> None:
        self.stretch = stretch
        self.optimizers = OptimizerHooks(driver, fence, optimizers, wrappers, stretch, module if _is_container(module) else None)
        self.scaler = ScalerHooks(driver, fence, self.optimizers, scaler)
        self.backward = BackwardHooks(driver, fence, self.optimizers, in_backward)
        self.model = ModelHooks(driver, fence, module, self.optimizers, stretch)

    @property
    def are_plain(self) -> bool:
        """Whether a step of the optimizer is one call of its hooks, and nothing else belongs to it."""
        return self.optimizers.are_plain and not self.scaler.is_known

    def remove(self) -> None:
        """Remove all hooks; a second call does nothing."""
        self.backward.uninstall()
        self.optimizers.remove()
        self.model.remove()
        self.scaler.remove()


def _is_container(module: nn.Module) -> bool:
    """Whether only its modules are called, so that perhaps nothing else refers to it, as to one of the two networks of a GAN."""
    if isinstance(module, torch.jit.ScriptModule):  # which is no container, and has its forward elsewhere
        return False
    has_forward = "forward" in module.__dict__ or type(module).forward is not nn.Module.forward
    return not (has_forward or module._parameters or module._buffers)

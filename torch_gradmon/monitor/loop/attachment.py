"""Follow a training loop that nobody edits: hooks on the parameters, the optimizers, the scaler and the model's forward.

What the hooks see is told to a :class:`Loop`, which decides what to measure. Times are those of :mod:`torch.optim` and
:mod:`torch.amp`: see each method.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd import Variable
from torch.optim import Optimizer

from ...capture.grad_scale import GradScale, calling_scaler
from ...capture.hooks import Handles, Hook, ModuleHook, WrappedMethod, takes_hooks
from ...core.errors import GradmonWarning, SpikeError
from ...core.fence import Fence
from ...core.torch_modes import call_outside_modes
from ...core.validation import inside
from ...plugins.spike_policy.gradient_hold import PutBack, ScalerAsItWas, SetAside, versions
from ...step.parameter_refs import Place
from . import in_backward
from .in_backward import StepsInBackward
from .wrappers import WrapperCalls

F = TypeVar("F", bound=Callable[..., Any])


def _harmless(method: F) -> F:
    """Whatever fails in what a hook calls becomes one warning, never an error in the training loop."""

    @functools.wraps(method)
    def run(self: Attachment, *args: Any) -> Any:
        try:
            return call_outside_modes(method, self, *args)
        except (SpikeError, GradmonWarning):
            raise
        except Exception as error:
            loop = self._loop()
            if loop is not None:
                loop.guard.complaints.add(
                    f"internal:{method.__name__}", "a hook failed, some values are lost; training goes on", error
                )
            return None

    return run  # type: ignore[return-value]


def _owned(optimizers: Iterable[Optimizer]) -> set[int]:
    """The ids of all parameters that these have."""
    return {id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}


def _put_first(optimizer: Optimizer) -> None:
    """Put the hooks of monitors before those of others, in their order: behind the step those find gradients that are held back as they
    were, and what they write is no update. Before it, see :meth:`Attachment._step_called`.
    """
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        known = getattr(optimizer, hooks, None)
        if isinstance(known, OrderedDict):
            for name in [name for name, hook in reversed(known.items()) if hasattr(hook, "keeps_alive")]:
                known.move_to_end(name, last=False)


def _tensor_in(place: Place) -> int | None:
    """Where torch keeps the tensor of a parameter: a conversion that swaps tensors moves it, and leaves the hooks behind."""
    parameter = place()
    return None if parameter is None else parameter._cdata


class Loop(Protocol):
    """What an attachment tells."""

    guard: Fence
    in_backward: StepsInBackward

    def counts_eval(self) -> bool:
        """The root is called in evaluation mode, with gradients; whether that may be training."""

    def forward_began(self, in_eval: bool) -> None:
        """The root module is called in training, be it ``in_eval`` mode."""

    def root_in_training(self) -> None:
        """The root is called in training mode, be it without gradients."""

    def root_began(self) -> None:
        """That was told by the hook of the root itself."""

    def backward_ended(self) -> None:
        """One backward pass is over, and its gradients are accumulated and reduced."""

    def gradient_complete(self, position: int) -> None:
        """The gradient of this parameter was accumulated, whose optimizer may step before the backward pass is over."""

    @property
    def holds_scaler(self) -> bool:
        """Whether the step that ends is as if it had never been, for the scaler too, unless it found infinite gradients."""

    @property
    def overrules_scaler(self) -> bool:
        """Whether that holds although this rank's scaler refused it."""

    def wrapper_began(self, optimizer: Optimizer) -> None:
        """A wrapper around the optimizer is about to step, of whose step the optimizer's is a part."""

    def wrapper_ended(self, optimizer: Optimizer) -> None:
        """It has returned, and the optimizer has not stepped."""

    def step_began(self, optimizer: Optimizer, has_closure: bool) -> bool:
        """The optimizer is about to step, or to call its closure; whether it is to change nothing."""

    def closure_ended(self, optimizer: Optimizer) -> bool:
        """The closure has computed the gradients that the optimizer will use; whether it is to change nothing."""

    def closure_raised(self, optimizer: Optimizer) -> None:
        """The closure has raised, and so will the step."""

    def step_ended(self, optimizer: Optimizer, found_inf: torch.Tensor | None) -> None:
        """The optimizer has stepped, unless ``found_inf`` (of a fused optimizer under a GradScaler) is not zero."""

    def step_refused(self, optimizer: Optimizer) -> None:
        """The scaler did not let the optimizer step."""

    def scaler_updated(self) -> None:
        """The scaler has ended the attempt."""

    def scale_mistaken(self, reason: str, scaler: torch.amp.GradScaler | None) -> None:
        """What scales the gradients turns out to be another ``scaler`` than was thought, or none."""


class Onlooker(Protocol):
    """What is told beside the loop, of every step, whether it is measured or not."""

    def forward_began(self) -> None:
        """The root module is called in training."""

    def step_began(self, optimizer: Optimizer, has_closure: bool) -> None:
        """The optimizer is about to step, or to call its closure; its gradients are as the loop left them."""

    def step_ended(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped."""

    def step_refused(self, optimizer: Optimizer) -> None:
        """The scaler did not let the optimizer step."""

    def scaled(self) -> None:
        """The scaler has scaled a loss."""

    def unscaling(self, optimizer: Optimizer) -> None:
        """The scaler is about to unscale the gradients of the optimizer."""

    def unscaled(self, optimizer: Optimizer) -> None:
        """It has."""

    def updated(self) -> None:
        """The scaler has ended the attempt."""

    def leave(self) -> None:
        """There is nothing to look at any more."""


class Attachment:
    """All hooks that follow one loop; :meth:`remove` takes every one of them away.

    Args:
        loop: told what happens; the optimizers' hooks keep it alive, nothing else here does.
        module: the watched model.
        optimizers: in the order in which they step.
        scaler: their GradScaler; its ``step`` and ``update`` are wrapped on the instance, because no optimizer hook fires when
            a step is refused.
        onlooker: is told of the same, before the loop acts on it.
        wrappers: around the optimizers, each with the one inside, whose steps are part of theirs.
    """

    def __init__(
        self,
        loop: Loop,
        module: nn.Module,
        optimizers: Iterable[Optimizer],
        scaler: torch.amp.GradScaler | None,
        onlooker: Onlooker,
        wrappers: Iterable[tuple[Any, Optimizer]] = (),
    ) -> None:
        self._loop, self._onlooker = weakref.ref(loop), onlooker
        self.optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._handles = Handles()
        self._parameters = Handles()
        self._armed: tuple[list[Place], list[tuple[Place, Hook, Hook]]] = [], []
        self._tensors: list[int | None] = []  # what was in each place when it was armed
        self._tasks: set[int] = set()
        self._depth: dict[int, int] = {}
        self._aside: dict[int, SetAside] = {}
        self._skipped: dict[int, list[PutBack]] = {}  # gradients of each optimizer that belong to a skipped step
        self._before_closure: dict[int, list[int]] = {}
        self._around_last: dict[int, Callable[..., Any]] = {}  # what stands for the last hook before each optimizer's step
        self._called: set[int] = set()  # optimizers that a scaler has let step, though a wrapper may leave the step out
        self._wrappers = WrapperCalls(wrappers, self._wrapper_began, self._wrapper_ended)
        self.scales = GradScale()
        self.scales.around = self._wrappers.around
        self.may_skip = False  # whether steps may be skipped; all that is done for that is left out where they may not
        self.in_closure = False
        self.in_scaler_step = False
        self._backward_is_over = False  # as the engine tells at its end
        self._wrapped: list[WrappedMethod] = []
        self._targets: dict[str, Callable[..., Any]] = {"sees": self._step_began}
        self._shielded = False
        if takes_hooks(module):
            self._handles.of_module(module.register_forward_pre_hook(ModuleHook(self._forward_began)))
        for optimizer in optimizers:
            # the one strong reference to the loop: a monitor that nobody kept lives as long as the optimizer that it watches
            self._handles.of_optimizer(optimizer.register_step_pre_hook(self._strongly(loop, "began", self._step_called)))
            self._handles.of_optimizer(optimizer.register_step_post_hook(self._strongly(loop, "ended", self._step_ended)))
            _put_first(optimizer)
        if scaler is not None:
            self.adopt(scaler)
        self._shield()

    def _strongly(self, loop: Loop, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        self._targets[name] = method
        targets = self._targets

        def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return targets[name](optimizer, args, kwargs)

        hook.keeps_alive = loop  # type: ignore[attr-defined]
        return hook

    def _shield(self) -> None:
        """A compiled ``optimizer.step`` must not trace what its hooks do. Without a compiler in the process there is no need,
        and importing it only for this would take a second.
        """
        if not self._shielded and (compiler := sys.modules.get("torch._dynamo")) is not None:
            self._shielded = True
            for name, method in self._targets.items():
                self._targets[name] = compiler.disable(method)

    def adopt(self, scaler: torch.amp.GradScaler) -> None:
        """Follow ``scaler`` from now on."""
        self.scales.scaler = scaler
        self._wrapped.append(WrappedMethod(scaler, "step", self._scaler_step))
        self._wrapped.append(WrappedMethod(scaler, "update", self._scaler_update))
        self._wrapped.append(WrappedMethod(scaler, "scale", self._scaler_scale))
        self._wrapped.append(WrappedMethod(scaler, "unscale_", self._scaler_unscale))

    def remove(self) -> None:
        """Take all hooks away; calling it again does nothing."""
        self.disarm()
        self._heal()
        self._onlooker.leave()
        self._handles.remove()
        self._around_last = {}
        for wrapped in reversed(self._wrapped):
            wrapped.remove()
        self._wrapped = []
        self._wrappers.remove()

    # --- parameters: armed on monitored steps only -------------------------------------------------------------------------

    def arm(self, parameters: Iterable[Place], local: Iterable[tuple[Place, Hook, Hook]]) -> None:
        """Watch for the ends of backward passes; ``local`` adds hooks on each gradient and behind its accumulation."""
        self.disarm()
        self._armed = list(parameters), list(local)
        parameters, local = self._armed
        # what an optimizer has and is frozen now may be thawed later in the step, as where two of them step by turns
        owned = _owned(optimizer for reference in self.optimizers if (optimizer := reference()) is not None)

        def is_trained(parameter: nn.Parameter | None) -> bool:
            if parameter is None or parameter.requires_grad:
                return parameter is not None
            return id(parameter) in owned and (parameter.is_floating_point() or parameter.is_complex())

        first = self._backward_is_over or not in_backward.is_running()
        for place, on_gradient, on_accumulate in local:
            if is_trained(place()):
                self._parameters.on_gradient(place, on_gradient)
                self._parameters.on_accumulate(place, on_accumulate, first)
        for position, place in enumerate(parameters):
            if is_trained(place()):  # before hooks in which an optimizer steps
                self._parameters.on_accumulate(place, Hook(self._accumulated, position), first)
        self._tensors = [_tensor_in(place) for place in parameters]

    def hooks_died(self) -> bool:
        """Whether parameters were replaced since hooks were hung on them, as objects or, by a conversion, as the tensors inside."""
        return self._tensors != [_tensor_in(place) for place in self._armed[0]]

    def revive(self) -> None:
        """Hang the hooks on parameters again, which fire no more though they are there."""
        places, local = self._armed
        for place in places:
            if (parameter := place()) is not None:
                for attribute in ("_post_accumulate_grad_hooks", "_backward_hooks"):
                    # those of others too: it is the assignment that counts
                    hooks = getattr(parameter, attribute)
                    if hooks is not None:
                        setattr(parameter, attribute, None)
                        setattr(parameter, attribute, hooks)
        self.arm(places, local)

    def move_last(self, optimizer: Optimizer) -> None:
        """This optimizer turned out to step after the others."""
        self.optimizers.sort(key=lambda reference: reference() is optimizer)

    def disarm(self) -> None:
        """Take the hooks on parameters away."""
        self._parameters.remove()
        self._tasks.clear()

    @_harmless
    def _accumulated(self, position: int, parameter: torch.Tensor) -> None:
        if torch.compiler.is_compiling():  # compiled autograd, whose engine takes no callbacks
            return
        loop = self._loop()
        if loop is not None and loop.in_backward.concerns(parameter):
            loop.gradient_complete(position)
        self._await_end_of_backward()

    def _await_end_of_backward(self) -> None:
        # one callback for each backward pass; told apart by the engine's id, so that one that raised cannot block the next
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            if len(self._tasks) > 10_000:
                self._tasks.clear()
            self._tasks.add(task)
            engine = Variable._execution_engine
            # DDP copies the reduced gradients back in a callback of its own; one queued from within a callback comes after it
            engine.queue_callback(lambda: engine.queue_callback(self._backward_ended))

    def _heal(self) -> None:
        """An optimizer that raised in its step left its depth behind, and its gradients aside: they are not put back, for the loop may
        have zeroed what it found.
        """
        self._depth.clear()
        while self._aside:
            self._aside.popitem()[1].undo()

    def leftovers(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """The parameters of ``optimizer`` that still have the gradients of a step that was skipped."""
        self._skipped[id(optimizer)] = [left for left in self._skipped.get(id(optimizer), []) if left.is_there()]
        found = (left.parameter() for left in self._skipped[id(optimizer)])
        return [parameter for parameter in found if parameter is not None]

    def accept(self) -> None:
        """What is left of skipped steps may be used after all."""
        self._skipped = {}

    def was_changed(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` has written to its parameters before its closure had computed gradients."""
        return self._before_closure.get(id(optimizer), []) != versions(optimizer)

    def _backward_ended(self) -> None:
        if not self.in_closure:
            self._heal()
        loop = self._loop()
        if loop is not None:
            self._backward_is_over = True
            try:
                loop.backward_ended()
            finally:
                self._backward_is_over = False

    # --- forward -------------------------------------------------------------------------------------------------------------

    @_harmless
    def _forward_began(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        loop = self._loop()
        if self.root_called(module) and loop is not None:
            loop.root_began()

    def root_called(self, module: nn.Module) -> bool:
        """The root is called, by whichever hook that is known first; see :meth:`forward_began`."""
        loop = self._loop()
        if self.may_skip and loop is not None and module.training and torch._C._current_graph_task_id() == -1:
            loop.root_in_training()
        return self.forward_began(module)

    def forward_began(self, module: nn.Module) -> bool:
        """The root is called: tell the loop, unless this is evaluation or recomputation; whether it was told."""
        self._shield()
        loop = self._loop()
        if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None:
            return False  # a transform or a trace is no training
        if loop is None or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return False
        if not module.training and not loop.counts_eval():
            return False
        if not self.in_closure:
            self._heal()
        self._onlooker.forward_began()
        loop.forward_began(not module.training)
        return True

    # --- optimizers ----------------------------------------------------------------------------------------------------------

    def _step_called(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the optimizer will use is known once the last hook before its step has returned, which may clip. So that one is wrapped
        for this call: hooks of others keep their places, for one that takes itself away has to be the last one in the dict, which is
        being iterated over.
        """
        known = getattr(optimizer, "_optimizer_step_pre_hooks", None)
        name = next(reversed(known)) if isinstance(known, OrderedDict) and known else None
        if not isinstance(known, OrderedDict) or name is None or hasattr(known[name], "keeps_alive"):
            return self._step_began(optimizer, args, kwargs)
        hook = known[name]

        def and_ours(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if name in known:
                known[name] = hook
            result = hook(optimizer, args, kwargs)
            if self._around_last.get(id(optimizer)) is not and_ours:
                return result  # left behind by a step in which a hook before it has raised
            del self._around_last[id(optimizer)]
            given = result if isinstance(result, tuple) and len(result) == 2 else (args, kwargs)
            ours = self._targets["sees"](optimizer, *given)  # this function is of the graph of a compiled step
            return result if ours is None else ours

        known[name] = self._around_last[id(optimizer)] = and_ours
        return None

    @_harmless
    def _step_began(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        loop = self._loop()
        depth = self._depth[id(optimizer)] = self._depth.get(id(optimizer), 0) + 1
        if loop is None or depth > 1:  # a subclass whose step calls super().step fires the hooks twice
            return None
        self._called.add(id(optimizer))
        if in_backward.is_running() and not torch.compiler.is_compiling():
            self._await_end_of_backward()
        if (reason := self.scales.mistake(optimizer, calling := calling_scaler())) is not None:
            if self.scales.scaler is None and calling is not None:
                self.adopt(calling)
            loop.scale_mistaken(reason, calling)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        # a subclass may take something else there, which is none of our business
        self._onlooker.step_began(optimizer, callable(closure))
        if loop.step_began(optimizer, callable(closure)):
            self._set_aside(optimizer)
        elif self.may_skip and callable(closure):
            self._before_closure[id(optimizer)] = versions(optimizer)
        if not callable(closure):
            return None
        wrapped = self._followed(closure, optimizer)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _followed(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        def followed() -> Any:
            self.in_closure = True
            try:
                loss = closure()
            except BaseException:
                self._heal()  # no forward or backward pass comes before the next step, which would be taken for a part of this one
                if (loop := self._loop()) is not None:
                    loop.closure_raised(optimizer)
                raise
            finally:
                self.in_closure = False
            loop = self._loop()
            if loop is not None and loop.closure_ended(optimizer):
                self._set_aside(optimizer)
            return loss

        return followed

    def _set_aside(self, optimizer: Optimizer) -> None:
        aside = self._aside.get(id(optimizer))
        if aside is None:
            self._aside[id(optimizer)] = SetAside(optimizer)
        else:
            aside.again()

    @_harmless
    def _step_ended(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        depth = self._depth[id(optimizer)] = max(0, self._depth.get(id(optimizer), 1) - 1)
        if depth == 0 and not self._wrappers.goes_on(optimizer):
            self._step_over(optimizer)

    @_harmless
    def _wrapper_began(self, optimizer: Optimizer) -> None:
        self._called.add(id(optimizer))
        if (loop := self._loop()) is not None:
            loop.wrapper_began(optimizer)

    @_harmless
    def _wrapper_ended(self, optimizer: Optimizer, has_stepped: bool) -> None:
        if has_stepped:
            self._step_over(optimizer)
        elif (loop := self._loop()) is not None:
            loop.wrapper_ended(optimizer)

    def _step_over(self, optimizer: Optimizer) -> None:
        loop = self._loop()
        if (aside := self._aside.pop(id(optimizer), None)) is not None:
            self._skipped[id(optimizer)] = aside.put_back()
            if aside.changed_parameters and loop is not None:
                kind, what = type(optimizer).__name__, "changed parameters in a step that was to be skipped"
                inner = f"{kind} {what}, although it had no gradients; attach the optimizer that it wraps instead"
                outer = f"the wrapper around {kind} {what}: what it does besides the step of {kind} cannot be held back"
                loop.guard.complaints.add("skip:changed", outer if self._wrappers.around(optimizer) else inner)
        if loop is not None:
            self._onlooker.step_ended(optimizer)
            found_inf = getattr(optimizer, "found_inf", None)
            loop.step_ended(optimizer, found_inf if isinstance(found_inf, torch.Tensor) else None)

    # --- scaler --------------------------------------------------------------------------------------------------------------

    def _scaler_step(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # what is stepped may be of any kind; only those that were attached are followed
        stepped = self._inside(optimizer)
        inner = next((o for r in self.optimizers if (o := r()) is not None and o is stepped), None)
        self._called.discard(id(inner))
        self.in_scaler_step = inner is not None
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            self.in_scaler_step = False
        loop = self._loop()
        if loop is not None and inner is not None and id(inner) not in self._called:
            self._onlooker.step_refused(inner)
            loop.step_refused(inner)
        return result

    def _scaler_scale(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._onlooker.scaled()
        return original(*args, **kwargs)

    def _scaler_unscale(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self._onlooker.unscaling(self._inside(optimizer))
        original(optimizer, *args, **kwargs)
        self._onlooker.unscaled(self._inside(optimizer))

    def _inside(self, optimizer: Any) -> Any:
        known = self._wrappers.inside(optimizer)
        return inside(optimizer) if known is optimizer else known

    def _scaler_update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        loop = self._loop()
        scaler = self.scales.scaler
        # what the loop itself sets the scale to stands
        held = loop is not None and loop.holds_scaler and not args and not kwargs
        before = ScalerAsItWas(scaler) if held and scaler is not None else None
        original(*args, **kwargs)
        self._onlooker.updated()
        if loop is not None and before is not None:
            before.put_back(loop.overrules_scaler)
        if loop is not None:
            loop.scaler_updated()

    def inverse_scale(self, optimizer: Optimizer | None) -> torch.Tensor | None:
        """What the gradients of ``optimizer`` must be multiplied by, as a device tensor; None where they are unscaled."""
        return self.scales.inverse(optimizer, stepping=self._depth.get(id(optimizer), 0) > 0)

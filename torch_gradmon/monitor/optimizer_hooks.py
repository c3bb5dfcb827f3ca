"""Hooks of optimizers and scalers, and what follows the loop between two steps."""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from threading import get_ident
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..capture.gradients import GradScale, calling_scaler, scale_of
from ..capture.hooks import Handles, WrappedMethod, untraced_by_itself
from ..core.errors import WarningLog
from ..core.fence import Fence
from ..core.torch_modes import capture_check
from ..core.validation import inside
from ..step.ranks import is_dtensor
from .machine import StepState
from .plugin_set import PluginSet

# --- The moments of a training loop, for those that follow it ---


class LoopDriver:
    """What hooks report, and ask. Hooks decide nothing.

    All methods are called inside of the fence.
    """

    def may_train_in_eval(self) -> bool:
        """The model is called in evaluation mode, with gradients: whether that may be training."""
        raise NotImplementedError

    def moves_buffers(self, module: nn.Module) -> None:
        """The model is called in training mode, perhaps without gradients."""

    def forward_began(self, in_eval: bool, in_closure: bool, counts: bool) -> None:
        """The model is called in training, perhaps in evaluation mode. ``counts``: no other hook reports this call."""

    def root_began(self) -> None:
        """The hook on the model itself reported that."""

    def gradient_complete(self, position: int) -> None:
        """The gradient of this parameter is complete, and its optimizer may step before the backward pass is over."""

    def backward_ended(self, is_nested: bool) -> None:
        """A backward pass is over, and its gradients are accumulated and reduced."""

    def wrapper_began(self, optimizer: Optimizer) -> None:
        """A wrapper around the optimizer is about to step."""

    def wrapper_ended(self, optimizer: Optimizer) -> None:
        """The wrapper returned, and the optimizer has not stepped."""

    def step_began(self, optimizer: Optimizer, has_closure: bool, within: bool) -> bool:
        """The optimizer is about to step, or to call its closure; whether it must change nothing."""
        raise NotImplementedError

    def closure_ended(self, optimizer: Optimizer) -> bool:
        """The closure has computed the gradients that the optimizer will use; whether it must change nothing."""
        raise NotImplementedError

    def closure_raised(self, optimizer: Optimizer, error: str) -> None:
        """The closure raised, and so will the step."""

    def step_ended(self, optimizer: Optimizer, found_inf: Tensor | None, within: bool) -> None:
        """The optimizer has stepped, unless ``found_inf`` (of a fused optimizer under a GradScaler) is not zero."""

    def step_overflowed(self, optimizer: Optimizer) -> None:
        """The scaler skipped the optimizer's step."""

    def loss_scaled(self) -> None:
        """The scaler has scaled a loss."""

    def unscaling(self, optimizer: Optimizer) -> None:
        """The scaler is about to unscale the gradients of the optimizer."""

    def unscaled(self, optimizer: Optimizer) -> None:
        """The scaler has unscaled them."""

    def scaler_updated(self) -> None:
        """The scaler has ended the attempt."""

    def scale_mistaken(self, reason: str, scaler: GradScaler | None) -> None:
        """Another ``scaler`` than assumed scales the gradients, or none."""

    def holds_scaler(self) -> tuple[bool, bool]:
        """Whether the scaler must not count this attempt, and whether that holds although it found infinite gradients on this rank."""
        raise NotImplementedError


# --- Consecutive idle steps in which hooks do no more than count ---


_has_grad, _running_task = torch.is_grad_enabled, torch._C._current_graph_task_id
_interpreter, _tracing_state = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
#: The longest time without a look at requests from other processes, in seconds.
LONGEST = 1.0


class IdleSteps(Protocol):
    """Has the open step, or the last one."""

    def pass_idle(self, step: int) -> None:
        """The steps up to ``step`` were idle, or are."""


class IdleTags(Protocol):
    """Facts about steps, from the loop."""

    current: dict[str, Any]

    def clear(self) -> None:
        """Forget it."""


class IdleStretch:
    """Steps after an idle one that are certain to be idle as well, in a loop whose habits are known.

    Each event that such a step does not have ends the stretch before the event is handled: from there on the loop is followed as if it
    had always been. The last idle step before a monitored one is never part of a stretch, so that hooks are there in time. Nothing here
    is guarded by the fence: there is nothing that could fail.

    Args:
        state: of the step machine.
        steps: gets to know of them when the loop is followed again.
        tags: nothing is kept of these steps.
        plugins: one of them may have to see the next step.
        fence: measures the time.

    Attributes:
        left: the number of steps that are left.
        depth: how many calls of each optimizer's step are running, by its id.
    """

    def __init__(self, state: StepState, steps: IdleSteps, tags: IdleTags, plugins: PluginSet, fence: Fence) -> None:
        self._state, self._steps, self._tags, self._plugins, self._fence = state, steps, tags, plugins, fence
        self.left = self._missed = self._forwards = self._thread = self._key = 0
        # calls of the model since the last followed step of an optimizer, and the most between two
        self._followed = self._most = 0
        self._due = self._spent = 0.0
        self.depth: dict[int, int] = {}
        self._captures, self._watching = capture_check(), plugins.watching

    def begin(self, steps: int) -> None:
        """The next ``steps`` steps are idle."""
        self.left, self._thread, self._due = steps, get_ident(), perf_counter() + LONGEST

    def stop(self) -> None:
        """Follow the loop again; an open step remains open."""
        if self.left:
            self.left = 0
            self._leave()

    def _leave(self) -> None:
        if self._forwards and self._state.is_open:
            self._state.patterns.called_in_training = True
        if (self._missed or self._forwards) and self._state.clock.step is not None:
            self._steps.pass_idle(self._state.clock.step)
            if not self._state.is_open:
                self._state.leave_idle(self._key)
        self._fence.add_time(self._spent)
        self._spent = 0.0

    def wake(self) -> None:
        """The same, and plugins know at once what they have missed."""
        self.stop()
        self.catch_up()

    def catch_up(self) -> None:
        """The loop is followed again: report what plugins have missed."""
        if self._missed or self._forwards:
            missed, forwards, self._missed, self._forwards = self._missed, self._forwards, 0, 0
            if missed:
                self._plugins.call("on_missed", missed)
            self._followed += forwards
            for _ in range(forwards):
                self._plugins.call("on_forward")

    def forward_followed(self) -> None:
        """The model is called, and the loop is followed."""
        self.catch_up()
        self._followed += 1

    def step_followed(self) -> None:
        """The optimizer has stepped, and the loop is followed."""
        self._most, self._followed = max(self._most, self._followed), 0

    # --- hooks: their code and data have left the cache since the last step, so each call and each object counts ---------------

    def forward_began(self, module: nn.Module) -> bool:
        """The model is called. Returns whether that is all, else the loop is followed again."""
        if not _has_grad() or _running_task() != -1:
            return True  # evaluation, or a recomputation
        if _interpreter() is not None or _tracing_state() is not None:
            return True  # a transform, or a trace
        began, state = perf_counter(), self._state
        is_usual = self._forwards < self._most  # else another optimizer may step now
        is_odd = not is_usual or not module.training or get_ident() != self._thread
        is_odd = is_odd or (self._captures is not None and self._captures())
        if is_odd or self._watching or state.progress.begun:
            self.stop()
            return False
        if not state.is_open:
            state.open_idle()
        self._forwards += 1
        self._spent += perf_counter() - began
        return True

    def step_began(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """The optimizer is about to step, perhaps with arguments. Returns whether that is all, else the loop is followed again."""
        state, key = self._state, id(optimizer)
        is_odd = not state.is_open or len(args) > 1 or bool(kwargs or state.progress.begun)
        is_odd = is_odd or getattr(optimizer, "found_inf", None) is not None
        is_odd = is_odd or (self._captures is not None and self._captures())
        if is_odd or self._watching or _running_task() != -1:
            self.stop()
            return False
        state.progress.begun.add(key)
        self.depth[key] = 1
        return True

    def step_ended(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """The optimizer has stepped. Returns whether that is all, else the loop is followed again."""
        began, state, key = perf_counter(), self._state, id(optimizer)
        if not state.is_open or key not in state.progress.begun:
            self.stop()
            return False
        state.close_idle(key)
        self._key = key
        if self._tags.current:
            self._tags.clear()
        self.depth[key] = self._forwards = 0
        self._missed += 1
        ended = perf_counter()
        self._spent += ended - began
        self.left -= 1
        if ended >= self._due or self.left <= 0:  # below if another thread has stopped it
            self.left = 0
            self._leave()
        return True


# --- step hooks ---


StepHook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]


def _put_first(optimizer: Optimizer) -> None:
    """Move the hooks of monitors before those of others, in their order.

    Then other hooks after the step find the gradients restored, and their writes do not count as updates. For hooks before the step
    see :meth:`StepHooks._step_called`.
    """
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        known = getattr(optimizer, hooks, None)
        if isinstance(known, OrderedDict):
            for name in [name for name, hook in reversed(known.items()) if hasattr(hook, "keeps_alive")]:
                known.move_to_end(name, last=False)


class StepHooks:
    """Calls ``before`` as the last hook before an optimizer's step and ``after`` as the first one behind it.

    Args:
        kept: kept alive by the optimizers, and by nothing else here.
        optimizers: get the hooks.
        before: may return other arguments for the step.
        after: called with the step's arguments.
        stretch: idle steps that are only counted.

    Attributes:
        is_shielded: a compiler is loaded, and does not trace the hooks.
    """

    def __init__(
        self, kept: object, optimizers: Iterable[Optimizer], before: StepHook, after: StepHook, stretch: IdleStretch
    ) -> None:
        self._handles = Handles()
        self._around_last: dict[int, StepHook] = {}  # the wrapper of the last hook before each optimizer's step
        self._before = before
        self._shielded: dict[str, StepHook] = {"called": self._step_called, "before": before, "after": after}
        self.is_shielded = False
        for optimizer in optimizers:
            # the only strong references: a monitor without others lives as long as its optimizer
            self._handles.of_optimizer(
                optimizer.register_step_pre_hook(self._strongly(kept, "called", stretch, stretch.step_began))
            )
            self._handles.of_optimizer(
                optimizer.register_step_post_hook(self._strongly(kept, "after", stretch, stretch.step_ended))
            )
            _put_first(optimizer)
        self.shield()

    def _strongly(self, kept: object, name: str, stretch: IdleStretch, counts: StepHook) -> StepHook:
        method, shielded, is_after = self._shielded[name], self._shielded, name == "after"

        def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if torch.compiler.is_dynamo_compiling():  # else the shield would cost a tenth of a step that is not monitored
                return shielded[name](optimizer, args, kwargs)
            # with others on the step, the last of them may be behind ours, and one that raises prevents the step
            is_alone = is_after or len(getattr(optimizer, "_optimizer_step_pre_hooks", ())) == 1
            if is_alone and stretch.left and counts(optimizer, args, kwargs):
                return None
            return method(optimizer, args, kwargs)

        untraced_by_itself(hook)
        hook.keeps_alive = kept  # type: ignore[attr-defined]
        return hook

    def shield(self) -> None:
        """Prevent a compiled ``optimizer.step`` from tracing its hooks, if a compiler is loaded: importing one takes a second."""
        if not self.is_shielded and (compiler := sys.modules.get("torch._dynamo")) is not None:
            self.is_shielded = True
            for name, method in self._shielded.items():
                self._shielded[name] = compiler.disable(method)

    def remove(self) -> None:
        """Remove all hooks; a second call does nothing."""
        self._handles.remove()
        self._around_last = {}

    def _step_called(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrap the last hook before the step for this call: it may clip, so the gradients are final only when it returns.

        Other hooks keep their positions: one that removes itself must stay last in the dict, which is being iterated over.
        """
        known = getattr(optimizer, "_optimizer_step_pre_hooks", None)
        name = next(reversed(known)) if isinstance(known, OrderedDict) and known else None
        if not isinstance(known, OrderedDict) or name is None or hasattr(known[name], "keeps_alive"):
            return self._before(optimizer, args, kwargs)
        hook = known[name]

        def and_ours(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if name in known:
                known[name] = hook
            result = hook(optimizer, args, kwargs)
            if self._around_last.get(id(optimizer)) is not and_ours:
                return result  # a leftover of a step in which an earlier hook raised
            del self._around_last[id(optimizer)]
            given = result if isinstance(result, tuple) and len(result) == 2 else (args, kwargs)
            # this function is part of the graph of a compiled step
            ours = (self._shielded["before"] if torch.compiler.is_dynamo_compiling() else self._before)(optimizer, *given)
            return result if ours is None else ours

        known[name] = self._around_last[id(optimizer)] = and_ours
        return None


# --- wrappers ---


#: Packages of trainers, whose wrappers pass a step on as it is, or leave it out.
_TRAINERS = ("accelerate.", "lightning.", "lightning_fabric.", "pytorch_lightning.", "transformers.")


class WrapperCalls:
    """Follows the calls of ``step`` of wrappers, by a stand-in for the method on the instance: not all of them call hooks.

    Args:
        wrappers: each with the optimizer inside, which calls hooks.
        began: called with the optimizer inside when the outermost wrapper is about to step.
        ended: called with the optimizer inside when the outermost wrapper has stepped, and with whether that one has.
    """

    def __init__(
        self,
        wrappers: Iterable[tuple[Any, Optimizer]],
        began: Callable[[Optimizer], object],
        ended: Callable[[Optimizer, bool], object],
    ) -> None:
        self._began, self._ended = began, ended
        self._depth: Counter[int] = Counter()
        self._stepped: set[int] = set()
        self._inside: dict[int, tuple[weakref.ref[Any], weakref.ref[Optimizer]]] = {}
        self._wrapped: list[_WrappedStep] = []
        for outer, inner in wrappers:
            self._inside[id(outer)] = weakref.ref(outer), weakref.ref(inner)
            if not any(kind.__module__.startswith(_TRAINERS) for kind in type(outer).__mro__):
                self._wrapped.append(_WrappedStep(outer, "step", functools.partial(self._step, weakref.ref(inner))))

    @property
    def exist(self) -> bool:
        """Whether there are any."""
        return bool(self._inside)

    def inside(self, optimizer: Any) -> Any:
        """The optimizer inside of this one, or itself."""
        outer, inner = self._inside.get(id(optimizer), (None, None))
        found = inner() if inner is not None and outer is not None and outer() is optimizer else None
        return optimizer if found is None else found

    def around(self, optimizer: Optimizer) -> list[int]:
        """The ids of the wrappers around this one."""
        return [key for key, (_, inner) in self._inside.items() if inner() is optimizer]

    def goes_on(self, optimizer: Optimizer) -> bool:
        """The optimizer has stepped; whether a wrapper around it is still at it."""
        goes_on = self._depth[id(optimizer)] > 0
        if goes_on:
            self._stepped.add(id(optimizer))
        return goes_on

    def _step(self, inner: weakref.ref[Optimizer], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        optimizer = inner()
        if optimizer is None:
            return original(*args, **kwargs)
        if not self._depth[id(optimizer)]:
            self._began(optimizer)
        self._depth[id(optimizer)] += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._depth[id(optimizer)] -= 1
            if not self._depth[id(optimizer)]:
                stepped = id(optimizer) in self._stepped
                self._stepped.discard(id(optimizer))
                self._ended(optimizer, stepped)

    def remove(self) -> None:
        """Take all stand-ins away."""
        for wrapped in reversed(self._wrapped):
            wrapped.remove()
        self._wrapped, self._inside = [], {}


class _WrappedStep(WrappedMethod):
    """Looks like the method itself to learning rate schedulers, which mark it, and wrap the function in it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original(), name)

    @property
    def __func__(self) -> Callable[..., Any]:
        @functools.wraps(self._original().__func__)  # type: ignore[attr-defined]
        def step(_: Any, *args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return step


# --- Skipping an optimizer's step: its gradients are removed before the step and restored after it ---


class PutBack(NamedTuple):
    """A gradient that belongs to a skipped step, until it is written to or replaced."""

    parameter: weakref.ref[Tensor]
    gradient: weakref.ref[Tensor]
    version: int

    def is_there(self) -> bool:
        """Whether the parameter still has this gradient, unchanged."""
        parameter, gradient = self.parameter(), self.gradient()
        return parameter is not None and gradient is not None and parameter.grad is gradient and gradient._version == self.version


class SetAside:
    """Removes the gradients of an optimizer, the only way to skip a step that works with every optimizer of ``torch.optim``.

    Zero gradients would enter the moments and count as steps, and weight decay would still apply.
    Some optimizers change other state even without gradients: L-BFGS counts evaluations, others create an empty state. So the
    non-tensor values of the optimizer's state and its options are saved and restored too.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._state = {parameter: _shallow(state) for parameter, state in optimizer.state.items()}
        self._options = [
            {name: (value, _copied(value)) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._versions = versions(optimizer)
        self.again()

    def again(self) -> None:
        """Remove the new gradients of a closure; they replace those that were removed before."""
        found = [(p, p.grad) for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        if found:
            self._gradients = found
        for parameter, _ in found:
            parameter.grad = None

    def put_back(self) -> list[PutBack]:
        """Restore everything after the step, except where a parameter has a new gradient. Returns the restored gradients."""
        back = []
        for parameter, gradient in self._gradients:
            if parameter.grad is None:
                parameter.grad = gradient
                if not is_dtensor(gradient):  # the version counter of a DTensor does not count writes
                    back.append(PutBack(weakref.ref(parameter), weakref.ref(gradient), gradient._version))
        self.undo()
        return back

    def undo(self) -> None:
        """Restore state and options only: after a failed step the gradients are useless."""
        self._gradients = []
        state: dict[Any, Any] = self._optimizer.state
        for parameter in list(state):
            if parameter not in self._state:
                del state[parameter]
            elif isinstance(state[parameter], dict):
                state[parameter].clear()
                state[parameter].update(self._state[parameter])
        for group, options in zip(self._optimizer.param_groups, self._options, strict=False):
            for name in [name for name in group if name != "params" and name not in options]:
                del group[name]
            for name, (value, before) in options.items():
                group[name] = before
                if isinstance(value, Tensor):
                    group[name] = value
                    with torch.no_grad():
                        value.copy_(before)

    @property
    def changed_parameters(self) -> bool:
        """Whether the step changed parameters although it had no gradients, according to their version counters."""
        return versions(self._optimizer) != self._versions


def versions(optimizer: Optimizer) -> list[int]:
    """The number of in-place writes to each of its parameters, without those of fused kernels and through ``.data``."""
    return [p._version for group in optimizer.param_groups for p in group["params"] if not p.is_inference()]


def _shallow(state: Any) -> Any:
    return dict(state) if isinstance(state, dict) else state


def _copied(value: Any) -> Any:
    """Options are few and small; functions among them are not copied."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value


class GradientHolds:
    """Removes the gradients of optimizers whose step must change nothing.

    Args:
        complaints: receives a warning when a step changes something nevertheless.

    Attributes:
        any: some gradients are removed at the moment.
    """

    def __init__(self, complaints: WarningLog) -> None:
        self._complaints = complaints
        self._held: dict[int, SetAside] = {}
        self.any = False
        self._left: dict[int, list[PutBack]] = {}  # gradients of each optimizer that belong to a skipped step
        self._versions: dict[int, list[int]] = {}

    def hold(self, optimizer: Optimizer) -> None:
        """Remove the gradients of ``optimizer`` until its step ends."""
        held, self.any = self._held.get(id(optimizer)), True
        if held is None:
            self._held[id(optimizer)] = SetAside(optimizer)
        else:
            held.again()

    def restore(self, optimizer: Optimizer, is_wrapped: bool) -> None:
        """Restore the gradients of ``optimizer`` after its step. Warns if the step changed parameters without them."""
        held = self._held.pop(id(optimizer), None)
        self.any = bool(self._held)
        if held is None:
            return
        self._left[id(optimizer)] = held.put_back()
        if held.changed_parameters:
            kind, what = type(optimizer).__name__, "changed parameters in a skipped step"
            inner = f"{kind} {what}, although it had no gradients; attach the optimizer that it wraps instead"
            outer = f"the wrapper around {kind} {what}: what it changes outside the step of {kind} cannot be prevented"
            self._complaints.add("skip:changed", outer if is_wrapped else inner)

    def drop(self) -> None:
        """Restore the state of optimizers that raised in their steps, but not their gradients, which the loop may have zeroed."""
        while self._held:
            self._held.popitem()[1].undo()
        self.any = False

    def leftovers(self, optimizer: Optimizer) -> list[Tensor]:
        """The parameters of ``optimizer`` that still have the gradients of a skipped step."""
        self._left[id(optimizer)] = [left for left in self._left.get(id(optimizer), []) if left.is_there()]
        found = (left.parameter() for left in self._left[id(optimizer)])
        return [parameter for parameter in found if parameter is not None]

    def accept(self) -> None:
        """Let optimizers use the gradients that skipped steps left."""
        self._left = {}

    def note_versions(self, optimizer: Optimizer) -> None:
        """Note the parameters' versions before the optimizer calls its closure."""
        self._versions[id(optimizer)] = versions(optimizer)

    def was_changed(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` has written to its parameters since :meth:`note_versions`."""
        return self._versions.get(id(optimizer), []) != versions(optimizer)


# --- Hooks on optimizers: they report steps and closures, and remove gradients for skipped steps ---


class OptimizerHooks:
    """Reports the steps of optimizers.

    Args:
        driver: receives the reports. Only the optimizers' hooks keep it alive.
        fence: guards each report.
        optimizers: in the order in which they step.
        wrappers: around the optimizers, each with the one inside, whose steps are part of theirs.
        stretch: idle steps that are only counted.
        container: of models that were put together for the monitor, kept alive by the optimizers' hooks, too.

    Attributes:
        may_skip: steps may be skipped. If not, skipping costs nothing.
        in_closure: a closure is running.
        steps: the hooks on their steps.
    """

    def __init__(
        self,
        driver: LoopDriver,
        fence: Fence,
        optimizers: Iterable[Optimizer],
        wrappers: Iterable[tuple[Any, Optimizer]],
        stretch: IdleStretch,
        container: nn.Module | None = None,
    ) -> None:
        self._driver, self._fence = weakref.ref(driver), fence
        wake = weakref.WeakMethod(stretch.stop)  # else the loss of an optimizer would show only after the stretch
        self._references = [weakref.ref(optimizer, lambda _: (stop := wake()) and stop()) for optimizer in optimizers]
        self._stretch, self._depth = stretch, stretch.depth
        self.may_skip = self.in_closure = self._is_odd = False
        self.holds = GradientHolds(fence.complaints)
        self.wrappers = WrapperCalls(wrappers, self._wrapper_began, self._wrapper_ended)
        self.steps = StepHooks((driver, container), self.alive(), self._before_hook, self._ended_hook, stretch)

    def allow_skips(self, are_allowed: bool) -> None:
        """Whether steps may be skipped from now on."""
        self.may_skip = are_allowed

    def alive(self) -> list[Optimizer]:
        """The optimizers that still exist."""
        return [optimizer for reference in self._references if (optimizer := reference()) is not None]

    @property
    def are_plain(self) -> bool:
        """Whether a single optimizer calls each hook once a step so far, without wrapper, closure, or check for infinite gradients."""
        return len(self._references) == 1 and not (self._is_odd or self.wrappers.exist)

    def is_stepping(self, optimizer: Optimizer | None) -> bool:
        """Whether the optimizer is in its step."""
        return self._depth.get(id(optimizer), 0) > 0

    def remove(self) -> None:
        """Remove all hooks; a second call does nothing."""
        self.heal()
        self.steps.remove()
        self.wrappers.remove()

    def heal(self) -> None:
        """Forget a step in which the optimizer raised: its depth and its removed gradients."""
        self._depth.clear()
        if self.holds.any:
            self.holds.drop()

    # --- before the step -----------------------------------------------------------------------------------------------------

    def _before_hook(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._stretch.left and self._stretch.step_began(optimizer, args, kwargs):
            return None
        return self._fence.run(self._step_began, optimizer, args, kwargs)

    def _step_began(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        driver = self._driver()
        depth = self._depth[id(optimizer)] = self._depth.get(id(optimizer), 0) + 1
        self._is_odd |= depth > 1
        if driver is None or depth > 1:  # a subclass whose step calls super().step fires the hooks twice
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        # a subclass may take something else there
        has_closure = callable(closure)
        self._is_odd |= has_closure
        if driver.step_began(optimizer, has_closure, torch._C._current_graph_task_id() != -1):
            self.holds.hold(optimizer)
        elif self.may_skip and has_closure:
            self.holds.note_versions(optimizer)
        if closure is None or not has_closure:
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
            except BaseException as error:
                self.heal()  # no forward or backward pass comes before the next step, which would be taken for a part of this one
                self._fence.run(self._closure_raised, optimizer, type(error).__name__)
                raise
            finally:
                self.in_closure = False
            self._fence.run(self._closure_ended, optimizer)
            return loss

        return followed

    def _closure_raised(self, optimizer: Optimizer, error: str) -> None:
        if (driver := self._driver()) is not None:
            driver.closure_raised(optimizer, error)

    def _closure_ended(self, optimizer: Optimizer) -> None:
        if (driver := self._driver()) is not None and driver.closure_ended(optimizer):
            self.holds.hold(optimizer)

    # --- after the step ------------------------------------------------------------------------------------------------------

    def _ended_hook(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._fence.run(self._step_ended, optimizer)

    def _step_ended(self, optimizer: Optimizer) -> None:
        depth = self._depth[id(optimizer)] = max(0, self._depth.get(id(optimizer), 1) - 1)
        if depth == 0 and not self.wrappers.goes_on(optimizer):
            self._step_over(optimizer)

    def _step_over(self, optimizer: Optimizer) -> None:
        driver = self._driver()
        if self.holds.any:
            self.holds.restore(optimizer, is_wrapped=bool(self.wrappers.around(optimizer)))
        if driver is not None:
            found_inf = getattr(optimizer, "found_inf", None)
            self._is_odd |= found_inf is not None
            is_backward_running = torch._C._current_graph_task_id() != -1
            driver.step_ended(optimizer, found_inf if isinstance(found_inf, Tensor) else None, is_backward_running)

    def _wrapper_began(self, optimizer: Optimizer) -> None:
        self._fence.run(self._outer_began, optimizer)

    def _outer_began(self, optimizer: Optimizer) -> None:
        if (driver := self._driver()) is not None:
            driver.wrapper_began(optimizer)

    def _wrapper_ended(self, optimizer: Optimizer, has_stepped: bool) -> None:
        self._fence.run(self._outer_ended, optimizer, has_stepped)

    def _outer_ended(self, optimizer: Optimizer, has_stepped: bool) -> None:
        if has_stepped:
            self._step_over(optimizer)
        elif (driver := self._driver()) is not None:
            driver.wrapper_ended(optimizer)


# --- Wrappers around the methods of a GradScaler: no optimizer hook fires when it skips a step ---


class ScalerHooks:
    """Reports what the scaler does, and knows which gradients it has scaled.

    Args:
        driver: receives the reports; held weakly.
        fence: guards each report.
        optimizers: hooks on the optimizers.
        scaler: the GradScaler; None where none is known.

    Attributes:
        in_step: the scaler's ``step`` is running.
    """

    def __init__(self, driver: LoopDriver, fence: Fence, optimizers: OptimizerHooks, scaler: torch.amp.GradScaler | None) -> None:
        self._driver, self._fence = weakref.ref(driver), fence
        self._optimizers = optimizers
        self._scales = GradScale(optimizers.wrappers.around)
        self._wrapped: list[WrappedMethod] = []
        self._called: set[int] = set()  # ids of optimizers that have stepped; a wrapper around one may have omitted its step
        self.in_step = False
        if scaler is not None:
            self._adopt(scaler)

    def _adopt(self, scaler: torch.amp.GradScaler) -> None:
        self._scales.scaler = scaler
        around = {"step": self._step, "update": self._update, "scale": self._scale, "unscale_": self._unscale}
        self._wrapped += [WrappedMethod(scaler, name, method) for name, method in around.items()]

    @property
    def is_known(self) -> bool:
        """Whether there is a scaler, as far as is known."""
        return self._scales.scaler is not None

    @property
    def scale(self) -> Tensor | None:
        """The scaler's scale, on its device."""
        return scale_of(self._scales.scaler)

    def remove(self) -> None:
        """Remove the wrappers; a second call does nothing."""
        for wrapped in reversed(self._wrapped):
            wrapped.remove()
        self._wrapped = []

    def inverse_scale(self, optimizer: Optimizer | None) -> Tensor | None:
        """The factor that unscales the gradients of ``optimizer``, as a device tensor; None if they are unscaled."""
        return self._scales.inverse(optimizer, stepping=self._optimizers.is_stepping(optimizer))

    def wrapper_began(self, optimizer: Optimizer) -> None:
        """A wrapper around the optimizer is about to step."""
        self._called.add(id(optimizer))

    def step_began(self, optimizer: Optimizer, takes_values: bool) -> None:
        """The optimizer is about to step, and only now its scaler is certain.

        An unknown scaler matters where the step ``takes_values``, and the search costs more than all else in a step that does not.
        """
        self._called.add(id(optimizer))
        if not takes_values and self._scales.scaler is None:
            return
        reason = self._scales.mistake(optimizer, calling := calling_scaler())
        if reason is not None:
            if self._scales.scaler is None and calling is not None:
                self._adopt(calling)
            if (driver := self._driver()) is not None:
                driver.scale_mistaken(reason, calling)

    def _inside(self, optimizer: Any) -> Any:
        known = self._optimizers.wrappers.inside(optimizer)
        return inside(optimizer) if known is optimizer else known

    def _step(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # what is stepped may be of any kind; only those that were attached are followed
        stepped = self._inside(optimizer)
        inner = next((each for each in self._optimizers.alive() if each is stepped), None)
        self._called.discard(id(inner))
        self.in_step = inner is not None
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            self.in_step = False
        if inner is not None and id(inner) not in self._called:
            self._report("step_overflowed", inner)
        return result

    def _scale(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._report("loss_scaled")
        return original(*args, **kwargs)

    def _unscale(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self._report("unscaling", self._inside(optimizer))
        original(optimizer, *args, **kwargs)
        self._report("unscaled", self._inside(optimizer))

    def _update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        driver, scaler = self._driver(), self._scales.scaler
        # a scale that the loop itself sets remains
        is_held, overrules = driver.holds_scaler() if driver is not None and not args and not kwargs else (False, False)
        before = ScalerAsItWas(scaler) if is_held and scaler is not None else None
        original(*args, **kwargs)
        if before is not None:
            before.put_back(overrules)
        self._report("scaler_updated")

    def _report(self, event: str, *args: object) -> None:
        if (driver := self._driver()) is not None:
            self._fence.run(getattr(driver, event), *args)


class ScalerAsItWas:
    """Restores scale and growth of a GradScaler after an ``update()`` that counted a skipped step as a good one.

    If the scaler found infinite gradients, its update remains. The device decides this, without synchronising.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._kept = [
            (name, tensor.clone()) for name in ("_scale", "_growth_tracker") if (tensor := _of(scaler, name)) is not None
        ]
        states = getattr(scaler, "_per_optimizer_states", {}).values()
        found = [tensor for state in states for tensor in state.get("found_inf_per_device", {}).values()]
        self._found_inf = torch.stack([tensor.to(found[0].device).max() for tensor in found]).max() if found else None

    def put_back(self, overruled: bool) -> None:
        """Undo the update. ``overruled``: even if it found infinite gradients, since other ranks found none."""
        for name, before in self._kept:
            now = _of(self._scaler, name)
            if now is not None:
                refused = None if self._found_inf is None or overruled else self._found_inf.to(now.device) > 0
                now.copy_(before if refused is None else torch.where(refused, now, before))


def _of(scaler: torch.amp.GradScaler, name: str) -> Tensor | None:
    found = getattr(scaler, name, None)
    return found if isinstance(found, Tensor) else None

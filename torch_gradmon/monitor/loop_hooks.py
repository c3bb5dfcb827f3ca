"""The hooks that follow one loop: on optimizers, scaler, parameters and model. They report, and decide nothing."""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd import Variable
from torch.optim import Optimizer

from ..capture.gradients import GradScale, calling_scaler
from ..capture.hooks import Handles, Hook, ModuleHook, WrappedMethod, takes_hooks, untraced_by_itself
from ..core.errors import WarningLog
from ..core.torch_modes import will_run
from ..core.validation import inside
from ..step.model_index import PLAIN_GRADIENTS, ModelIndex, Place, parameters_of
from ..step.planner import Planner
from ..step.ranks import is_dtensor
from .machine import StepsInBackward
from .program import StepProgram

_has_grad, _running_task = torch.is_grad_enabled, torch._C._current_graph_task_id
_interpreter, _tracing_state = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack


def weakly(method: Callable[..., Any], *extra: object) -> Callable[..., Any]:
    """What calls ``method`` with the original of a :class:`WrappedMethod` and ``extra``, while its object is alive: not because of it."""
    reference = weakref.WeakMethod(method)

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        alive = reference()
        return original(*args, **kwargs) if alive is None else alive(original, *extra, *args, **kwargs)

    return around


# --- Wrappers around optimizers ---


#: Packages of trainers, whose wrappers pass a step on as it is, or leave it out.
_TRAINERS = ("accelerate.", "lightning.", "lightning_fabric.", "pytorch_lightning.", "transformers.")


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
        self._state = {p: dict(state) if isinstance(state, dict) else state for p, state in optimizer.state.items()}
        self._options = [
            {name: (value, _copied(value)) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self.again()

    def again(self) -> None:
        """Remove the new gradients of a closure; they replace those that were removed before."""
        found = [(p, p.grad) for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._gradients = found or self._gradients
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


def versions(optimizer: Optimizer) -> list[int]:
    """The number of in-place writes to each of its parameters, without those of fused kernels and through ``.data``."""
    return [p._version for group in optimizer.param_groups for p in group["params"] if not p.is_inference()]


def _copied(value: Any) -> Any:
    """Options are few and small; functions among them are not copied."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value


class GradientHolds:
    """Removes the gradients of optimizers whose step must change nothing; by the id of the optimizer.

    Attributes:
        held: what is removed at the moment.
    """

    def __init__(self, complaints: WarningLog) -> None:
        self._complaints = complaints
        self.held: dict[int, SetAside] = {}
        self.left: dict[int, list[PutBack]] = {}  # gradients that belong to a skipped step, and must not be used
        self._versions: dict[int, list[int]] = {}

    def hold(self, optimizer: Optimizer) -> None:
        if (held := self.held.get(id(optimizer))) is None:
            self.held[id(optimizer)] = SetAside(optimizer)
            self.note_versions(optimizer)
        else:
            held.again()

    def restore(self, optimizer: Optimizer, is_wrapped: bool) -> None:
        """Restore the gradients of ``optimizer`` after its step. Warns if the step changed parameters without them."""
        held = self.held.pop(id(optimizer), None)
        if held is None:
            return
        self.left[id(optimizer)] = held.put_back()
        if self.was_changed(optimizer):
            kind, what = type(optimizer).__name__, "changed parameters in a skipped step"
            inner = f"{kind} {what}, although it had no gradients; attach the optimizer that it wraps instead"
            outer = f"the wrapper around {kind} {what}: what it changes outside the step of {kind} cannot be prevented"
            self._complaints.add("skip:changed", outer if is_wrapped else inner)

    def drop(self) -> None:
        """Restore the state of optimizers that raised in their steps, but not their gradients, which the loop may have zeroed."""
        while self.held:
            self.held.popitem()[1].undo()

    def leftovers(self, optimizer: Optimizer) -> list[Tensor]:
        """The parameters of ``optimizer`` that still have the gradients of a skipped step."""
        left = self.left[id(optimizer)] = [each for each in self.left.get(id(optimizer), []) if each.is_there()]
        return [parameter for each in left if (parameter := each.parameter()) is not None]

    def note_versions(self, optimizer: Optimizer) -> None:
        """Note the parameters' versions before the optimizer calls its closure, or steps without gradients."""
        self._versions[id(optimizer)] = versions(optimizer)

    def was_changed(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` has written to its parameters since :meth:`note_versions`, according to their version counters."""
        return self._versions.get(id(optimizer), []) != versions(optimizer)


# --- Hooks on optimizers: they report steps and closures, and remove gradients for skipped steps ---


StepHook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]


def _put_first(optimizer: Optimizer) -> None:
    """Move the hooks of monitors before those of others, in their order.

    Then other hooks after the step find the gradients restored, and their writes do not count as updates. For hooks before the step
    see :meth:`OptimizerHooks._step_called`.
    """
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        known = getattr(optimizer, hooks, None)
        if isinstance(known, OrderedDict):
            for name in [name for name, hook in reversed(known.items()) if hasattr(hook, "keeps_alive")]:
                known.move_to_end(name, last=False)


class OptimizerHooks:
    """Reports the steps of optimizers to ``loop``, a ``FollowedLoop`` of runtime.py: as the last hook before a step, and the first one
    behind it. A ``container``, of models that were put together for the monitor, is kept alive by the optimizers' hooks, too.

    The calls of ``step`` of ``wrappers``, each given with the optimizer inside, are followed by a stand-in for the method on the instance:
    not all of them call hooks. The outermost one counts.

    Attributes:
        may_skip: steps may be skipped. If not, skipping costs nothing.
        in_closure: a closure is running.
        is_shielded: a compiler is loaded, and does not trace the hooks.
    """

    def __init__(self, loop: Any, wrappers: Iterable[tuple[Any, Optimizer]], container: nn.Module | None = None) -> None:
        self._loop, self._fence, self._program = loop, loop.fence, loop.program
        self._depth: dict[int, int] = self._program.depth
        self.may_skip = bool(loop.lifecycle.plugins.listening["before_optimizer_step"])
        self.in_closure = self.is_shielded = self._had_closure = self.is_odd = False
        self.holds = GradientHolds(self._fence.complaints)
        self._wrappers: dict[int, tuple[weakref.ref[Any], weakref.ref[Optimizer]]] = {}
        self.in_wrapper: Counter[int] = Counter()  # how many calls are running, by the id of the optimizer inside
        self._stepped_inside: set[int] = set()
        for outer, inner in wrappers:
            self._wrappers[id(outer)] = weakref.ref(outer), weakref.ref(inner)
            if not any(kind.__module__.startswith(_TRAINERS) for kind in type(outer).__mro__):
                wrapped = _WrappedStep(outer, "step", weakly(self._wrapper_called, weakref.ref(inner)))
                loop.removals.callback(wrapped.remove)
        self._around_last: dict[int, StepHook] = {}  # the wrapper of the last hook before each optimizer's step
        loop.removals.callback(self._around_last.clear)
        loop.removals.callback(self.heal)
        over = functools.partial(self._fence.run, self.step_ended)
        self._shielded: dict[str, StepHook] = {"called": self._step_called, "before": self._before, "after": over}
        kept = loop, container
        for optimizer in loop.ownership.alive():
            # the only strong references: a monitor without others lives as long as its optimizer
            before = self._strongly(kept, "called", self._program.idle_step_began, self._program.step_began)
            after = self._strongly(kept, "after", self._program.idle_step_ended, self._program.step_ended)
            loop.handles.of_optimizer(optimizer.register_step_pre_hook(before))
            loop.handles.of_optimizer(optimizer.register_step_post_hook(after))
            _put_first(optimizer)
        self.shield()

    def _strongly(self, kept: object, name: str, counts: StepHook, takes: StepHook) -> StepHook:
        """A hook that keeps ``kept`` alive, and gives the step to the program, which ``counts`` it or ``takes`` it, or to the loop."""
        method, shielded, program, is_after = self._shielded[name], self._shielded, self._program, name == "after"
        fenced = self._fence.run

        def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if torch.compiler.is_dynamo_compiling():  # else the shield would cost a tenth of a step that is not monitored
                return shielded[name](optimizer, args, kwargs)
            # with others on the step, the last of them may be behind ours, and one that raises prevents the step
            if is_after or len(getattr(optimizer, "_optimizer_step_pre_hooks", ())) == 1:
                if program.left and counts(optimizer, args, kwargs):
                    return None
                if program.is_ready:
                    return fenced(takes, optimizer, args, kwargs)
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

    @property
    def are_plain(self) -> bool:
        """Whether a single optimizer calls each hook once a step so far, without wrapper, closure, or check for infinite gradients."""
        return len(self._loop.ownership.order) == 1 and not (self.is_odd or self._had_closure or self._wrappers)

    def heal(self) -> None:
        """Forget a step in which the optimizer raised: its depth and its removed gradients."""
        self._depth.clear()
        if self.holds.held:
            self.holds.drop()

    # --- wrappers --------------------------------------------------------------------------------------------------------------

    def inside(self, optimizer: Any) -> Any:
        """The optimizer in this wrapper, or itself."""
        outer, inner = self._wrappers.get(id(optimizer), (None, None))
        found = inner() if inner is not None and outer is not None and outer() is optimizer else None
        return inside(optimizer) if found is None or found is optimizer else found

    def around(self, optimizer: Optimizer) -> list[int]:
        return [key for key, (_, inner) in self._wrappers.items() if inner() is optimizer]

    def _wrapper_called(self, original: Callable[..., Any], inner: weakref.ref[Optimizer], *args: Any, **kwargs: Any) -> Any:
        optimizer = inner()
        if optimizer is None:
            return original(*args, **kwargs)
        if not self.in_wrapper[id(optimizer)]:
            self._fence.run(self._loop.wrapper_began, optimizer)
        self.in_wrapper[id(optimizer)] += 1
        try:
            return original(*args, **kwargs)
        finally:
            self.in_wrapper[id(optimizer)] -= 1
            if not self.in_wrapper[id(optimizer)]:
                has_stepped = id(optimizer) in self._stepped_inside
                self._stepped_inside.discard(id(optimizer))
                self._fence.run(self.step_ended if has_stepped else self._loop.wrapper_ended, optimizer)

    # --- before the step -----------------------------------------------------------------------------------------------------

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

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._program.left and self._program.idle_step_began(optimizer, args, kwargs):
            return None
        return self._fence.run(self.step_began, optimizer, args, kwargs)

    def step_began(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        depth = self._depth[id(optimizer)] = self._depth.get(id(optimizer), 0) + 1
        self.is_odd |= depth > 1
        if depth > 1:  # a subclass whose step calls super().step fires the hooks twice
            return None
        closure: Any = kwargs.get("closure", args[1] if len(args) > 1 else None)
        has_closure = callable(closure)  # a subclass may take something else there
        self._had_closure |= has_closure
        if self._loop.step_began(optimizer, has_closure, _running_task() != -1):
            self.holds.hold(optimizer)
        elif self.may_skip and has_closure:
            self.holds.note_versions(optimizer)
        if not has_closure:
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
                self._fence.run(self._loop.machine.closure_raised, id(optimizer), type(error).__name__)
                raise
            finally:
                self.in_closure = False
            self._fence.run(self._closure_ended, optimizer)
            return loss

        return followed

    def _closure_ended(self, optimizer: Optimizer) -> None:
        if self._loop.closure_ended(optimizer):
            self.holds.hold(optimizer)

    # --- after the step ------------------------------------------------------------------------------------------------------

    def step_ended(self, optimizer: Optimizer, *_: object) -> None:
        depth = self._depth[id(optimizer)] = max(0, self._depth.get(id(optimizer), 1) - 1)
        if self.in_wrapper[id(optimizer)] and not depth:
            self._stepped_inside.add(id(optimizer))
        if depth or self.in_wrapper[id(optimizer)]:
            return
        if self.holds.held:
            self.holds.restore(optimizer, is_wrapped=bool(self.around(optimizer)))
        found_inf = getattr(optimizer, "found_inf", None)
        self.is_odd |= found_inf is not None
        self._loop.step_ended(optimizer, found_inf if isinstance(found_inf, Tensor) else None, _running_task() != -1)


# --- Wrappers around the methods of a GradScaler: no optimizer hook fires when it skips a step ---


class ScalerHooks:
    """Reports what the scaler does; ``scales`` knows which gradients it has scaled. ``in_step``: the scaler's ``step`` is running."""

    def __init__(self, loop: Any, scaler: GradScaler | None) -> None:
        self._loop, self._fence, self._optimizers = loop, loop.fence, loop.optimizer_hooks
        self.scales = GradScale(self._optimizers.around)
        self.called: set[int] = set()  # ids of optimizers that have stepped; a wrapper around one may have omitted its step
        self.in_step = False
        if scaler is not None:
            self._adopt(scaler)

    def _adopt(self, scaler: GradScaler) -> None:
        self.scales.scaler = scaler
        around = {"step": self._step, "update": self._update, "scale": self._scale, "unscale_": self._unscale}
        for name, method in around.items():
            self._loop.removals.callback(WrappedMethod(scaler, name, weakly(method)).remove)

    def inverse_scale(self, optimizer: Optimizer | None) -> Tensor | None:
        """The factor that unscales the gradients of ``optimizer``, as a device tensor; None if they are unscaled."""
        if self.scales.scaler is None and getattr(optimizer, "grad_scale", None) is None:
            return None
        return self.scales.inverse(optimizer, stepping=self._loop.program.depth.get(id(optimizer), 0) > 0)

    def step_began(self, optimizer: Optimizer, takes_values: bool) -> None:
        """The optimizer is about to step, and only now its scaler is certain.

        An unknown scaler matters where the step ``takes_values``, and the search costs more than all else in a step that does not.
        """
        self.called.add(id(optimizer))
        if not takes_values and self.scales.scaler is None:
            return
        calling = calling_scaler()
        if calling is None and self.scales.scaler is None:
            return
        reason = self.scales.mistake(optimizer, calling)
        if reason is not None:
            if self.scales.scaler is None and calling is not None:
                self._adopt(calling)
            self._loop.forget_scaled(reason)

    def _tell(self, event: str, *args: object) -> None:
        self._fence.run(self._loop.lifecycle.plugins.tell, "audit", event, *args)

    def _step(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # what is stepped may be of any kind; only those that were attached are followed
        stepped = self._optimizers.inside(optimizer)
        inner = next((each for each in self._loop.ownership.alive() if each is stepped), None)
        self.called.discard(id(inner))
        self.in_step = inner is not None
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            self.in_step = False
        if inner is not None and id(inner) not in self.called:
            self._fence.run(self._loop.step_overflowed, inner)
        return result

    def _scale(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._tell("on_loss_scaled")
        return original(*args, **kwargs)

    def _unscale(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self._tell("on_unscaling", self._optimizers.inside(optimizer))
        original(optimizer, *args, **kwargs)
        self._tell("on_unscaled", self._optimizers.inside(optimizer))

    def _update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        scaler, lifecycle = self.scales.scaler, self._loop.lifecycle
        # the scaler must not count a skipped attempt; a scale that the loop itself sets remains
        is_held = lifecycle.is_skipped and not (args or kwargs)
        before = ScalerAsItWas(scaler) if is_held and scaler is not None else None
        original(*args, **kwargs)
        if before is not None:
            policy = lifecycle.plugins.built_in.policy
            before.put_back(overruled=policy is not None and policy.overrules_scaler)
        self._fence.run(self._loop.scaler_updated)


class ScalerAsItWas:
    """Restores scale and growth of a GradScaler after an ``update()`` that counted a skipped step as a good one.

    If the scaler found infinite gradients, its update remains. The device decides this, without synchronising.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._kept = [(name, tensor.clone()) for name, tensor in self._now().items()]
        states = getattr(scaler, "_per_optimizer_states", {}).values()
        found = [tensor for state in states for tensor in state.get("found_inf_per_device", {}).values()]
        self._found_inf = torch.stack([tensor.to(found[0].device).max() for tensor in found]).max() if found else None

    def _now(self) -> dict[str, Tensor]:
        found = {name: getattr(self._scaler, name, None) for name in ("_scale", "_growth_tracker")}
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}

    def put_back(self, overruled: bool) -> None:
        """Undo the update. ``overruled``: even if it found infinite gradients, since other ranks found none."""
        found = self._now()
        for name, before in self._kept:
            if (now := found.get(name)) is not None:
                refused = None if self._found_inf is None or overruled else self._found_inf.to(now.device) > 0
                now.copy_(before if refused is None else torch.where(refused, now, before))


# --- Which optimizer has which parameters ---


class Ownership:
    """The optimizers of one loop, by the names that the step machine has for them, and the positions of their parameters.

    Attributes:
        order: the names in the order in which they step; the step machine changes it.
        owned: positions of the parameters of each optimizer.
        unowned: positions of parameters that no optimizer has.
        all_positions: all of these, ascending.
    """

    def __init__(self, optimizers: Sequence[Optimizer], program: StepProgram) -> None:
        self.order: list[Hashable] = [id(optimizer) for optimizer in optimizers]
        wake = weakref.WeakMethod(program.stop)  # else the loss of an optimizer would show only after the stretch
        self.references: dict[Hashable, weakref.ref[Optimizer]] = {
            id(each): weakref.ref(each, lambda _: (stop := wake()) and stop()) for each in optimizers
        }
        self.owned: dict[Hashable, list[int]] = {}
        self.unowned: list[int] = []
        self.all_positions: list[int] = []
        self._sizes: list[int] = []
        self._source = PLAIN_GRADIENTS

    def __getitem__(self, name: Hashable) -> Optimizer | None:
        """The optimizer, while it exists; None for the name None, under which unowned parameters stand."""
        reference = self.references.get(name)
        return None if reference is None else reference()

    def alive(self) -> list[Optimizer]:
        """The optimizers that still exist, in the order in which they step."""
        found = []
        for name in self.order:
            if (optimizer := self.references[name]()) is not None:
                found.append(optimizer)
        return found

    def parameters(self, name: Hashable) -> list[Tensor]:
        optimizer = self[name]
        return [] if optimizer is None else parameters_of(optimizer)

    def update(self, planner: Planner) -> set[int]:
        """Find the positions anew; returns those of parameters that several optimizers have."""
        self._source = planner.source
        self.has_changed()
        self.owned, self.unowned = planner.positions(self.alive())
        self.all_positions = sorted({*self.unowned}.union(*self.owned.values()))
        owners = Counter(position for positions in self.owned.values() for position in positions)
        return {position for position, count in owners.items() if count > 1}

    def has_changed(self) -> bool:
        """Whether an optimizer got or lost parameters since the last call."""
        before, self._sizes = self._sizes, []
        for name in self.order:
            if (optimizer := self.references[name]()) is not None:
                self._sizes += map(len, self._source.groups_of(optimizer))
        return self._sizes != before

    def groups(self, index: ModelIndex) -> list[tuple[str, frozenset[str]]]:
        """The names of the parameters of each group of all optimizers."""
        groups = [group for optimizer in self.alive() for group in index.source.groups_of(optimizer)]
        members = index.groups or [frozenset(index.names[p] for p in index.positions(group)) for group in groups]
        return [(f"group_{number}", names) for number, names in enumerate(members)]

    def shares(self) -> list[tuple[Hashable | None, Optimizer | None, list[int]]]:
        """The positions of each optimizer that exists; under None those that no optimizer has."""
        found: list[tuple[Hashable | None, Optimizer | None, list[int]]] = []
        for name in self.order:
            if (optimizer := self.references[name]()) is not None:
                found.append((name, optimizer, self.owned.get(name, [])))
        return [*found, (None, None, self.unowned)]

    def of(self, name: Hashable, with_unowned: bool) -> list[int]:
        own = self.owned.get(name, [])
        return sorted([*own, *self.unowned]) if with_unowned else own

    def place(self, name: Hashable) -> str:
        return f"optimizer {self.order.index(name) + 1} of {len(self.order)} ({self.kind(name)})"

    def kind(self, name: Hashable) -> str:
        return type(self[name]).__name__


# --- Hooks on parameters: they report the ends of backward passes, and each gradient ---


def _tensor_in(place: Place) -> int | None:
    """The identity of a parameter's inner tensor: a conversion that swaps tensors changes it, and loses the hooks."""
    parameter = place()
    return None if parameter is None else parameter._cdata


#: Backward passes that are remembered.
_MOST = 10_000


class _PassHook(Hook):
    """Calls ``method`` with ``position`` in the first hook of each backward pass, which is not ``quiet`` then, and in all hooks where
    optimizers may step within. It is called once for each parameter, between kernels of the backward pass that leave nothing in a cache.
    """

    def __init__(self, method: Callable[..., Any], position: int, quiet: set[int]) -> None:
        super().__init__(method, position)
        self._quiet = quiet

    def __call__(self, value: Any) -> Any:  # type: ignore[override]
        if torch.compiler.is_dynamo_compiling() or _running_task() in self._quiet:
            return None
        return super().__call__(value)


class BackwardHooks:
    """Reports the ends of backward passes. Registered in steps that take values only.

    Attributes:
        awaited: passes that have reached a parameter, and have not ended: they are running, or were interrupted.
    """

    def __init__(self, loop: Any) -> None:
        self._loop, self._fence, self._optimizers = loop, loop.fence, loop.optimizer_hooks
        self._in_backward: StepsInBackward = loop.state.in_backward
        self._program: StepProgram = loop.program
        self._handles = Handles()
        self._places: Sequence[Place] = ()
        self._tensors: list[int | None] = []  # the tensor in each place when hooks were registered
        self._completing: set[int] = set()  # places with hooks after the accumulation
        self._tasks: set[int] = set()
        self.awaited: set[int] = set()
        self._is_over = False  # the engine reports the end of a backward pass right now
        self._stepped_within: set[int] = set()  # ids of the parameters of optimizers that have stepped within a backward pass

    def install(self) -> None:
        """Register the hooks for the ends of backward passes, and where micro-batches are measured, on each gradient and after its
        accumulation.
        """
        self.uninstall()
        loop, planner = self._loop, self._loop.lifecycle.planner
        references = planner.inventory.references
        self._places = list(planner.source.hook_places(references))
        # a parameter that an optimizer has and that is frozen now may thaw later in the step, as where two of them alternate
        owned = set(map(id, parameters_of(*loop.ownership.alive())))

        def is_trained(parameter: nn.Parameter | None) -> bool:
            if parameter is None or parameter.requires_grad:
                return parameter is not None
            return id(parameter) in owned and (parameter.is_floating_point() or parameter.is_complex())

        first = self._is_over or _running_task() == -1
        for position in planner.local_positions():
            if is_trained(references[position]()):
                self._handles.on_gradient(references[position], Hook(loop.gradient_came, position))
                self._handles.on_accumulate(references[position], Hook(loop.gradient_accumulated, position), first)
        self._completing.clear()
        for position, place in enumerate(self._places):
            parameter = place()
            if not is_trained(parameter):
                continue
            if type(parameter) is not nn.Parameter or self._may_step_at(parameter):  # FSDP2 calls no others
                self._await_accumulation(position, first)
            else:
                # removed, one after the accumulation would go on costing as much: a part of it stays in the tensor
                self._handles.on_gradient(place, _PassHook(self._came, position, self._in_backward.quiet))
        self._tensors = [_tensor_in(place) for place in self._places]

    def uninstall(self) -> None:
        self._handles.remove()
        self._tasks.clear()
        self._in_backward.quiet.clear()

    def revive(self, optimizer: Optimizer) -> bool:
        """Register hooks again that no longer fire although their parameters exist. Returns whether there were any.

        Parameters may be replaced as objects or, by a conversion, as the tensors inside of them.
        """
        if self._tensors == [_tensor_in(place) for place in self._places]:
            return False
        if all(parameter.grad is None for parameter in parameters_of(optimizer)):
            return False
        for place in self._places:
            if (parameter := place()) is not None:
                for attribute in ("_post_accumulate_grad_hooks", "_backward_hooks"):
                    # those of others too: it is the assignment that counts
                    if (hooks := getattr(parameter, attribute)) is not None:
                        setattr(parameter, attribute, None)
                        setattr(parameter, attribute, hooks)
        self.install()
        return True

    def _await_accumulation(self, position: int, first: bool) -> None:
        """Have the accumulation of this gradient reported, before a hook in which an optimizer steps."""
        if position not in self._completing:
            self._completing.add(position)
            hook = _PassHook(self._accumulated, position, self._in_backward.quiet)
            self._handles.on_accumulate(self._places[position], hook, first)

    # no fence where there is nothing to report

    def _came(self, position: int, gradient: Tensor | None) -> None:
        if not self._in_backward.is_settled or self._in_backward.known:
            self._fence.run(self._expect_step, position)
        node = torch._C._current_autograd_node()
        # a pass that returns the gradient, as torch.autograd.grad does, accumulates nothing
        if node is None or will_run(node):
            self.await_end()
        elif len(self._tasks) < _MOST:
            self._know(_running_task())

    def _expect_step(self, position: int) -> None:
        parameter = self._places[position]()
        if parameter is not None and self._may_step_at(parameter):  # the hook on it came after ours
            self._await_accumulation(position, first=True)

    def _accumulated(self, position: int, parameter: Tensor) -> None:
        if not self._in_backward.is_settled or self._in_backward.known:
            self._fence.run(self._report_complete, position, parameter)
        self.await_end()

    def _report_complete(self, position: int, parameter: Tensor) -> None:
        if self._may_step_at(parameter):
            self._loop.gradient_complete(position)

    def _may_step_at(self, parameter: Tensor) -> bool:
        """Whether the optimizer of ``parameter`` may step within the backward pass, before the first step by the hooks on it."""
        within = self._in_backward
        if within.is_settled and not within.known:
            return False
        if id(parameter) in self._stepped_within:
            return True
        hooks: dict[int, object] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        is_foreign = not all(isinstance(hook, Hook) for hook in hooks.values()) or hasattr(parameter, "_in_backward_optimizers")
        return is_foreign or not (within.is_settled or not within.known)

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step within the running backward pass."""
        if not torch.compiler.is_dynamo_compiling():
            self._stepped_within.update(map(id, parameters_of(optimizer)))
            self.await_end()

    def await_end(self) -> None:
        """Report the end of the running backward pass, once for each pass."""
        # the engine's id identifies a pass, so that one that raised cannot block the next one
        task = _running_task()
        if task == -1:  # FSDP2 in a pipeline calls the hooks itself, when it reduces gradients after the pass
            return
        if task not in self._tasks:
            self._know(task)
            engine = Variable._execution_engine
            # DDP copies the reduced gradients back in a callback of its own; one queued from within a callback comes after it
            self.awaited.add(task)
            engine.queue_callback(functools.partial(engine.queue_callback, functools.partial(self._ended, task)))

    def _know(self, task: int) -> None:
        self._tasks.add(task)
        if self._in_backward.is_settled and not self._in_backward.known:
            self._in_backward.quiet.add(task)

    def _ended(self, task: int) -> None:
        self.awaited.discard(task)
        if len(self._tasks) > _MOST:
            self._tasks.clear()
            self._in_backward.quiet.clear()
        if not self._optimizers.in_closure and (self._program.depth or self._optimizers.holds.held):
            self._optimizers.heal()
        self._is_over = True
        try:
            self._fence.run(self._report_end)
        finally:
            self._is_over = False

    def _report_end(self) -> None:
        # at the end of a pass a running node belongs to an outer one, as in re-entrant checkpoints
        is_nested = torch._C._current_autograd_node() is not None
        if self._program.is_ready and not is_nested:
            self._program.backward_ended()
        else:
            self._loop.backward_ended(is_nested)
        if not is_nested:
            self.awaited.clear()  # also of passes that were interrupted


# --- Hooks on the watched model's forward ---


class _RootHook(ModuleHook):
    """Calls ``method`` unless the ``program`` takes the call of the model."""

    def __init__(self, method: Callable[..., Any], program: StepProgram) -> None:
        super().__init__(method)
        self._program = weakref.ref(program)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return None
        program = self._program()
        if program is not None and not _dispatch_modes():
            if program.left and program.idle_forward_began(args[0]):
                return None
            if program.is_ready:
                return program.fence.run(program.forward_began, args[0])
        return super().__call__(*args)


untraced_by_itself(_RootHook.__call__)


class ModelHooks:
    """Reports calls of the model."""

    def __init__(self, loop: Any, module: nn.Module) -> None:
        self._loop, self._fence, self._optimizers = loop, loop.fence, loop.optimizer_hooks
        if takes_hooks(module):
            loop.handles.of_module(module.register_forward_pre_hook(_RootHook(self._forward_hook, loop.program)))

    def _forward_hook(self, module: nn.Module, args: tuple[object, ...]) -> None:
        self._fence.run(self.model_called, module, True)

    def root_called(self, module: nn.Module) -> None:
        """The root is called, as another hook on it reports. Idempotent."""
        self._fence.run(self.model_called, module, False)

    def model_called(self, module: nn.Module, by_own_hook: bool) -> None:
        if self._optimizers.may_skip and module.training and _running_task() == -1 and self._loop.machine.moves_buffers():
            self._loop.lifecycle.plugins.tell("policy", "before_forward", module)
        if self.forward_began(module, by_own_hook) and by_own_hook:
            self._loop.lifecycle.captures.training_began()

    def forward_began(self, module: nn.Module, counts: bool) -> bool:
        """Report a training forward, and no evaluation or recomputation; whether it is one. ``counts``: nothing else reports it."""
        if not self._optimizers.is_shielded:
            self._optimizers.shield()
        if _interpreter() is not None or _tracing_state() is not None:
            return False  # a transform or a trace is no training
        # grad mode was switched off by the fence
        if not self._fence.had_grad or _running_task() != -1:
            return False
        if not module.training and not self._loop.machine.may_train_in_eval():
            return False
        in_closure = self._optimizers.in_closure
        if not in_closure:
            self._optimizers.heal()
        self._loop.forward_began(not module.training, in_closure, counts)
        return True


def is_container(module: nn.Module) -> bool:
    """Whether only its modules are called, so that perhaps nothing else refers to it, as to one of the two networks of a GAN."""
    if isinstance(module, torch.jit.ScriptModule):  # which is no container, and has its forward elsewhere
        return False
    has_forward = "forward" in module.__dict__ or type(module).forward is not nn.Module.forward
    return not (has_forward or module._parameters or module._buffers)

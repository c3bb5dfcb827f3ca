"""The audit of a training loop: passes the events of hooks to the checks."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from ...capture.hooks import Handles, Hook
from ...core.errors import WarningLog
from ...core.loop_mistakes import MISTAKES, SETUP_MISTAKES
from ...step.model_index import PLAIN_GRADIENTS, ModelIndex, Place
from ...step.planner import Planner
from ...step.ranks import is_dtensor
from ..tallies import Check, Tallies
from .checks import LARGEST, PATIENCE, Probe, ProbedOptimizer, UnusedGradients, local_values

# --- ownership ---


#: The steps of the first checks.
_EARLY = (2, 8, 16)
#: The least number of steps between two later checks; models with many parameters have more, so that the cost per step is small.
_LEAST = 16
#: The number of comparisons that confirm a finding.
_COMPARED = 3
#: The total number of comparisons of frozen parameters with a gradient; most of them do not move.
_SUSPECTED = 12
_NEARLY_ALL = 0.9

#: Parameters by name, with their places.
Found = Mapping[str, tuple[Tensor, Place]]


class OwnershipChecks:
    """Checks all parameters of the model.

    Attributes:
        next_step: the number of the next step that has to be reported, unless the model changes.
        is_comparing: the end of the step has to be reported, too.
    """

    def __init__(self, planner: Planner, tallies: Tallies, optimizers: Sequence[Optimizer]) -> None:
        assert planner.inventory is not None
        self._planner, self._inventory = planner, planner.inventory
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._initial = InitialParameters(planner.inventory, tallies)
        self._unowned, self.frozen = UnownedParameters(tallies), FrozenParameters(tallies)
        self._cleared: tuple[ModelIndex | None, list[int]] = (None, [])
        self.next_step = self._next = 0
        self.version = planner.version  # of the model, at the last check
        self.is_comparing = False

    def step_began(self, step: int) -> bool:
        """Check the model before ``step``, from 1 on, while gradients exist. Returns whether a check was due."""
        self.frozen.step_began()
        has_changed = self.version != self._planner.version
        is_due = step >= self._next or has_changed or step in _EARLY
        if is_due:
            self.version = self._planner.version
            self._check()
            if step >= self._next:
                self._next = step + max(_LEAST, self._initial.count // 2)
            if has_changed:
                self._next = min(self._next, step + 4)
        self.is_comparing = self.frozen.sample is not None
        self.next_step = step + 1 if self.is_comparing else min(n for n in (*_EARLY, self._next) if n > step)
        return is_due

    def _check(self) -> None:
        if not self._inventory.is_current():
            self._inventory = self._planner.now() or self._inventory
        self._initial.note_hooks(self._inventory)
        inventory, optimizers = self._inventory, [o for reference in self._optimizers if (o := reference()) is not None]
        sizes = [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
        if (inventory, sizes) == self._cleared:
            return
        found = {
            name: (parameter, place)
            for name, place in zip(inventory.names, inventory.references, strict=True)
            if (parameter := place()) is not None
        }
        owned = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        suspicions = (
            self._initial.are_untied(set(inventory.names)),
            self._unowned.exist(found, owned),
            self.frozen.exist(found, owned),
            self._initial.are_replaced(found, owned),
        )
        # no check is needed until the model or the optimizers change
        self._cleared = (None, []) if any(suspicions) else (inventory, sizes)


class InitialParameters:
    """The parameters at the beginning, ``count`` of them, and what has become of them."""

    def __init__(self, inventory: ModelIndex, tallies: Tallies) -> None:
        self._tallies = tallies
        self._aliases = {name: tuple(others) for name, others in inventory.aliases.items()}
        self._known = {name: _identity(place()) for name, place in zip(inventory.names, inventory.references, strict=True)}
        self._hooked: set[str] = set()  # those with hooks that are none of a monitor's
        self.count = len(self._known)
        self.note_hooks(inventory)

    def note_hooks(self, inventory: ModelIndex) -> None:
        """Note which of those that are still there have hooks of the loop's own."""
        for name, place in zip(inventory.names, inventory.references, strict=True):
            parameter = place()
            if parameter is not None and self._known.get(name) == _identity(parameter):
                (self._hooked.add if _has_hooks(parameter) else self._hooked.discard)(name)

    def are_untied(self, names: set[str]) -> bool:
        """Check whether parameters that were one are among ``names`` with two of theirs."""
        apart = [(other, name) for name, others in self._aliases.items() for other in others if {name, other} <= names]
        if apart:
            self._tallies.seen("weights-untied", where=apart[0], evidence={"pairs": float(len(apart))})
        elif self._aliases:
            self._tallies.missed("weights-untied")
        return bool(apart)

    def are_replaced(self, found: Found, owned: Mapping[int, Tensor]) -> bool:
        """Check whether nearly all are other tensors now, and hooks of the loop were lost with them. A few are replaced deliberately,
        all by a checkpoint or a conversion.
        """
        replaced = [
            name
            for name, (parameter, _) in found.items()
            if name in self._known and self._known[name] != _identity(parameter) and self._known[name][1] == parameter.shape
        ]
        taken = [
            name for name in replaced if id(found[name][0]) in owned and name in self._hooked and not _has_hooks(found[name][0])
        ]
        is_so = bool(taken) and len(replaced) > _NEARLY_ALL * len(found)
        if is_so:
            self._tallies.seen("dead-hooks", where=tuple(taken), evidence={"parameters": float(len(taken))})
        else:
            self._tallies.missed("dead-hooks")
        return is_so


class UnownedParameters:
    """Parameters with a gradient that no optimizer moves."""

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self._sample: Sample | None = None

    def exist(self, found: Found, owned: Mapping[int, Tensor]) -> bool:
        """Check those without an optimizer. Returns whether there are any, with a gradient or without."""
        live = {id(parameter) for parameter, _ in found.values()}
        old = [p for key, p in owned.items() if key not in live]
        sharded = bool(old) and any(is_dtensor(p) for p, _ in found.values()) and not any(is_dtensor(p) for p in old)
        others = {name: p for name, p in found.items() if id(p[0]) not in owned and p[0].requires_grad}
        outside = {name: p for name, p in others.items() if p[0].grad is not None or sharded}
        rule, other = "not-in-optimizer", "optimizer-before-sharding"
        if sharded and any(is_dtensor(p) for p, _ in outside.values()):
            rule, other = other, rule
        self._tallies.retract(other)
        if not outside:
            self._retract(rule)
        elif self._sample is None or self._sample.names[0] not in outside:
            self._sample = Sample.of(outside)
        elif self._sample.looks >= _COMPARED or not self._sample.moved():
            evidence = {"parameters": float(len(outside))}
            if old:
                evidence["old parameters in the optimizer"] = float(len(old))
            self._tallies.seen(rule, where=tuple(outside), evidence=evidence)
        else:  # something else trains them
            self._retract(rule)
        return bool(others)

    def _retract(self, rule: str) -> None:
        self._tallies.retract(rule)
        self._sample = None


class FrozenParameters:
    """Frozen parameters with a gradient, which an optimizer may move: some steps compare a ``sample`` before and after."""

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self.sample: Sample | None = None
        self._compared = 0

    def step_began(self) -> None:
        if self.sample is not None:
            self.sample.take()

    def step_ended(self) -> None:
        if self.sample is not None and self.sample.value is not None:
            if self.sample.moved():
                self._tallies.seen("frozen-but-moving", where=self.sample.names)
            else:
                self._tallies.missed("frozen-but-moving")
            self._compared += 1
            if self.sample.looks >= _COMPARED:
                self.sample = None

    def exist(self, found: Found, owned: Mapping[int, Tensor]) -> bool:
        """Begin to compare if there are any. Returns whether there are, or a comparison is under way."""
        if self.sample is not None:
            return True
        frozen = {
            name: (parameter, place)
            for name, (parameter, place) in found.items()
            if not parameter.requires_grad and parameter.grad is not None and id(parameter) in owned
        }
        if frozen and self._tallies.is_fact("frozen-but-moving"):
            self._tallies.seen("frozen-but-moving", where=tuple(frozen))
        elif frozen and self._compared < _SUSPECTED:
            self.sample = Sample.of(frozen)
        return bool(frozen)


class Sample:
    """The smallest of some parameters, and its value at one moment."""

    def __init__(self, names: tuple[str, ...], place: Place | None) -> None:
        self.names, self._place = names, place
        self.looks = 0
        self.take()

    @classmethod
    def of(cls, parameters: Found) -> Sample:
        """A sample of these parameters, with the value that it has now."""
        name = min(parameters, key=lambda name: parameters[name][0].numel())
        parameter, place = parameters[name]
        return cls((name, *(other for other in parameters if other != name)), place if parameter.numel() <= LARGEST else None)

    def take(self) -> None:
        """Remember the value as it is now. Does not synchronise."""
        self.value = None if (now := self._now()) is None else now.clone()

    def moved(self) -> bool:
        """Whether the value has changed or cannot be compared. Synchronises, so callers use it a few times only."""
        self.looks += 1
        now, before = self._now(), self.value
        return before is None or now is None or now.shape != before.shape or not torch.equal(now, before)

    def _now(self) -> Tensor | None:
        return None if self._place is None else local_values(self._place())


def _has_hooks(parameter: Tensor) -> bool:
    """Whether the parameter has a hook that is none of a monitor's."""
    kinds = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return any(not isinstance(hook, Hook) for hooks in kinds if hooks for hook in [*hooks.values()])


def _identity(parameter: Tensor | None) -> tuple[int, torch.Size]:
    return (0, torch.Size()) if parameter is None else (id(parameter), parameter.shape)


# --- Sampling of steps: a loop without findings for a long time is audited only in some of its steps ---


#: The number of consecutive steps without a finding after which a loop is trusted.
TRUSTED = 300
#: A trusted loop alternates between skipped and audited steps, with enough audited ones for any mistake to become a fact.
RESTED, LOOKED = 48, 16
#: Each pause is twice as long as the one before, and shorter than three quarters of the clean steps until then, up to this many steps.
MOST_RESTED = 16 * RESTED


class Rest:
    """Counts steps.

    Attributes:
        is_on: whether the next step is skipped.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._begin()

    def _begin(self) -> None:
        self._clean, self._until, self._length = 0, TRUSTED, RESTED

    @property
    def left(self) -> int:
        return self._until - self._clean if self.is_on else 0

    def missed(self, steps: int) -> None:
        """Count ``steps`` steps of the pause, fewer than are left."""
        self._clean += steps

    def step_ended(self, is_clean: bool) -> bool:
        """Count a step, ``is_clean`` if it has no finding. Returns whether a pause begins or ends here."""
        was = self.is_on
        if not is_clean:
            self.is_on = False
            self._begin()
            return was
        self._clean += 1
        if self._clean == self._until:
            self.is_on = not was
            self._until += self._length if self.is_on else LOOKED
            if was:
                self._length = min(2 * self._length, MOST_RESTED)
        return self.is_on != was


# --- Exchanges of gradients between ranks, within the backward pass ---


class GradientExchange:
    """Knows when a backward pass exchanges gradients, and when that has ended.

    Attributes:
        has_ranks: gradients may be exchanged.
        is_active: accumulations have to be reported.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._call, self._settling = call, set[Probe]()
        parallel = sys.modules.get("torch.nn.parallel.distributed")
        kind = getattr(parallel, "DistributedDataParallel", ())
        # the wrapper whose flag shows whether a backward pass exchanges gradients
        self._ddp = next((weakref.ref(child) for child in module.modules() if isinstance(child, kind)), None)
        self.update()

    def update(self) -> None:
        distributed = torch.distributed
        self.has_ranks = distributed.is_available() and distributed.is_initialized()
        self.is_active = self.has_ranks or self._ddp is not None

    def accumulated(self, probe: Probe) -> None:
        """Count the exchange of a gradient that was accumulated, if there is any."""
        ddp = None if self._ddp is None else self._ddp()
        if probe.is_sharded or (ddp is not None and bool(getattr(ddp, "require_backward_grad_sync", False))):
            probe.interval.synced += 1
        if self.has_ranks and probe not in self._settling:
            # look again when DDP has copied the reduced gradients back, which it does in such a callback
            self._settling.add(probe)
            engine = Variable._execution_engine
            settle = functools.partial(self._call, self._settled, probe)
            engine.queue_callback(lambda: engine.queue_callback(settle))

    def _settled(self, probe: Probe) -> None:
        self._settling.discard(probe)
        probe.settled()


# --- Hooks on the probes, and what they observe during backward passes ---


#: The most optimizers that get a probe. More are usually those of single parameters, which step within the backward pass.
_OPTIMIZERS = 3


class ProbeHooks:
    """Chooses the probes of one loop and has hooks on them."""

    def __init__(
        self, planner: Planner, tallies: Tallies, call: Callable[..., Any], module: nn.Module, optimizers: Sequence[Optimizer]
    ) -> None:
        self._planner, self._tallies, self._call = planner, tallies, call
        self.optimizers = {
            id(optimizer): ProbedOptimizer(optimizer, tallies, is_alone=len(set(optimizers)) == 1) for optimizer in optimizers
        }
        #: those that may have a probe
        self.probed = list(self.optimizers.values())[:_OPTIMIZERS]
        self.exchange = GradientExchange(module, call)
        self.is_paused = False  # whether events are no part of training at the moment
        self._handles, self._unused = Handles(), UnusedGradients()
        self.clock = 0  # counts the steps of all optimizers, also prevented ones, while there are hooks
        for probed in self.probed:
            probed.choose_probe(planner.now())
        self.register()

    def restart(self, probed: ProbedOptimizer) -> None:
        """Drop the probe's history. The next forward adds or removes the hooks."""
        self.is_current = False
        if probed.probe is not None:
            probed.probe.forget()

    def register(self, is_resting: bool = False) -> None:
        """Register one hook on each probe, a second one while values of its gradient are needed, and none with ``is_resting``."""
        self.is_current = True  # False where other hooks are needed, which cannot be registered within one of these
        self._handles.remove()
        for key, probed in self.optimizers.items():
            if probed.probe is not None and not probed.probe.is_offloaded and not is_resting:
                self._handles.on_accumulate(probed.probe.place, Hook(self._accumulated_hook, key, probed.probe))
                if probed.checks.writes.needs_values:
                    self._handles.on_gradient(probed.probe.place, Hook(self._incoming_hook, key, probed.probe))

    def remove(self) -> None:
        self._handles.remove()

    # --- backward passes -------------------------------------------------------------------------------------------------------

    def _accumulated_hook(self, key: int, probe: Probe, parameter: Tensor) -> None:
        # as compiled autograd does; or another probe has taken its place, whose hook is yet to come
        if not torch.compiler.is_dynamo_compiling() and probe is self.optimizers[key].probe:
            self._call(self._accumulated, self.optimizers[key], parameter)

    def _accumulated(self, probed: ProbedOptimizer, parameter: Tensor) -> None:
        probe = probed.probe
        if probe is None:
            return
        if self.is_paused:
            probe.interval.doubtful = probe.interval.is_paused = True
            return
        probe.accumulated(parameter, self.clock)
        if probed.stepped_in != torch._C._current_graph_task_id():
            self._backward_ended(probed)
        interval, writes = probe.interval, probed.checks.writes
        if probed.checks.losses.is_looking:
            probed.checks.losses.accumulated(interval, probed.owned)
        if not self._tallies.is_empty:
            probed.checks.accumulated(interval)
        if interval.late >= 0:
            probed.checks.dropped_after_step(probe)
        if probed.scaler.is_unscaled:
            probed.scaler.accumulated_unscaled()
        if interval.writes and writes.begin():
            self.is_current = False
        if writes.is_unclear:
            writes.keep(probe)
        if self.exchange.is_active or probe.is_sharded:
            self.exchange.accumulated(probe)
        if not self.clock and self._unused.are_certain(parameter, probe, writes.clears):
            self._tallies.seen("never-stepped", probed.key, evidence={"backward passes": float(interval.fired)})

    def _backward_ended(self, probed: ProbedOptimizer) -> None:
        for other in self.probed:
            if other.is_unknown:  # within a closure it is the attached optimizer that moves the parameters
                return
        if probed.unattached.backward_ended():
            passes = {"backward passes": float(probed.unattached.passes)}
            self._tallies.seen("unattached-optimizer", probed.key, evidence=passes)

    def backward_ended(self) -> None:
        """Replace a probe that took part in no backward pass, at the end of one in a monitored step."""
        for probed in self.probed:
            if probed.probe is not None and not probed.probe.has_fired and not self.is_paused:
                self._backward_ended(probed)
                probed.silent += 1
                if probed.silent >= PATIENCE:
                    self._replace(probed)

    def _incoming_hook(self, key: int, probe: Probe, gradient: Tensor | None) -> None:
        if probe is self.optimizers[key].probe:
            self._call(self._incoming, self.optimizers[key], gradient)

    def _incoming(self, probed: ProbedOptimizer, gradient: Tensor | None) -> None:
        probe, writes = probed.probe, probed.checks.writes
        if probe is not None and (parameter := probe.place()) is not None:
            writes.read_written(probe, parameter, gradient)
            writes.read_carried(probe, parameter, gradient)
            self.is_current &= probed.checks.writes.needs_values

    # --- steps -----------------------------------------------------------------------------------------------------------------

    def step_began(self, probed: ProbedOptimizer, optimizer: Optimizer, forwards: int, has_closure: bool) -> None:
        """Judge an optimizer's step, and replace the probe if it has shown nothing."""
        self.clock += 1
        if self.clock == 1:
            self._tallies.retract("never-stepped")
        needed = probed.checks.writes.needs_values
        if probed.step_began(optimizer, forwards, has_closure or self.is_paused):
            self._replace(probed)
            return
        if probed.probe is not None and probed.probe.interval.carried:
            probed.checks.writes.suspect_carried()
        self.is_current &= needed or not probed.checks.writes.needs_values

    def _replace(self, probed: ProbedOptimizer) -> None:
        probed.choose_probe(self._planner.now(), with_gradient=True)
        self.is_current = False


# --- The audit of a training loop: passes the events of hooks to the checks ---


#: Steps of others after which an optimizer that has never stepped is told of: a part that begins later does so sooner as a rule.
_MANY = 100


class LoopAudit(Check):
    """Observes a loop; it measures nothing and changes nothing."""

    name = "loop_audit"

    def __init__(self, planner: Planner, complaints: WarningLog, note: Callable[..., None]) -> None:
        self._planner = planner
        super().__init__(complaints, note, {**MISTAKES, **SETUP_MISTAKES}, "audit")
        self._hooks: ProbeHooks | None = None
        self._ownership: OwnershipChecks | None = None
        self._rest = Rest()
        self._is_paused = False
        self._steps = 0  # since the audit began, without those that a scaler has prevented
        self._forwards = self._most_forwards = 0  # since the last step of any optimizer, and the most between two

    def sees_alternation(self) -> bool:
        """Whether the optimizers have gradients of different numbers of backward passes since their last steps."""
        if self._hooks is None or len(self._hooks.optimizers) < 2:
            return False
        probes = [probed.probe for probed in self._hooks.optimizers.values()]
        return len({probe.interval.fired for probe in probes if probe is not None}) > 1

    def is_stale(self, in_step: bool) -> bool:
        """Whether the model has been trained since the last step of an attached optimizer, whose values would look current.

        Args:
            in_step: whether a step is open in which no optimizer has stepped.
        """
        return self._hooks is not None and any(probed.is_stale(in_step) for probed in self._hooks.probed)

    # --- life cycle ----------------------------------------------------------------------------------------------------------

    def on_attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Begin to audit a loop. Its mistakes show in ``.grad``, so none where an engine has gradients elsewhere."""
        self.on_detach()
        if self._planner.source is not PLAIN_GRADIENTS:
            return
        self._ownership = OwnershipChecks(self._planner, self.tallies, optimizers)
        self._steps = 0
        self.tallies.retract("unattached-optimizer")  # others are attached now
        self.tallies.write_facts(begins=True)
        self._hooks = ProbeHooks(self._planner, self.tallies, self.context.call, module, optimizers)
        self._hooks.is_paused = self._is_paused

    def on_pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        if self._hooks is not None:
            self._hooks.is_paused = is_paused

    def on_detach(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks, self._ownership, self._rest = None, None, Rest()

    def on_optimizers_lost(self) -> None:
        """Record that all optimizers were garbage-collected; the loop has warned about it."""
        self.tallies.seen("unattached-optimizer", warns=False)

    def may_miss(self) -> int:
        """The steps of a pause, until the next check of all parameters."""
        hooks, ownership = self._hooks, self._ownership
        if hooks is None or ownership is None or not (self._rest.is_on and hooks.is_current and self.tallies.is_empty):
            return 0
        return max(0, min(self._rest.left, ownership.next_step - self._steps) - 1)

    def on_missed(self, steps: int) -> None:
        self._steps += steps
        self._rest.missed(steps)

    # --- forward and backward --------------------------------------------------------------------------------------------------

    def on_forward(self) -> None:
        self._forwards += 1
        hooks = self._hooks
        if hooks is None:
            return
        if self._rest.is_on and self._forwards > self._most_forwards + PATIENCE:
            self._rest = Rest()  # no optimizer steps any more
            hooks.register()
        elif not hooks.is_current:
            hooks.register(self._rest.is_on)

    def on_backward_ended(self) -> None:
        if self._hooks is not None:
            self._hooks.backward_ended()

    # --- steps -----------------------------------------------------------------------------------------------------------------

    def on_optimizer_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        hooks, ownership = self._hooks, self._ownership
        if hooks is None or ownership is None or (probed := hooks.optimizers.get(id(optimizer))) is None:
            return
        self._steps += 1
        if not self._rest.is_on:
            hooks.step_began(probed, optimizer, self._forwards, has_closure)
        is_due = self._steps >= ownership.next_step or ownership.version != self._planner.version
        if is_due and ownership.step_began(self._steps):
            hooks.exchange.update()
        if is_due and self._steps >= _MANY * (len(hooks.optimizers) - 1) > 0:
            self._judge_resting(hooks)

    def _judge_resting(self, hooks: ProbeHooks) -> None:
        index = self._planner.inventory
        for probed in hooks.optimizers.values() if index is not None else ():
            if index is not None and probed.rests():
                steps = {"steps of the others": float(self._steps)}
                self.tallies.seen("optimizer-never-steps", probed.key, probed.names(index), steps)

    def on_optimizer_stepped(self, optimizer: Optimizer) -> None:
        hooks, ownership = self._hooks, self._ownership
        if hooks is None or ownership is None or (probed := hooks.optimizers.get(id(optimizer))) is None:
            return
        if ownership.is_comparing:
            ownership.frozen.step_ended()
        if not probed.has_stepped:
            self.tallies.retract("optimizer-never-steps", probed.key)  # it only began late
        # With several optimizers the gradients of one are evidence about the others. In a loop without visible forwards only the
        # probe's hook shows backward passes without steps. Such loops never count as clean, nor do those with open questions.
        writes = probed.checks.writes
        is_clean = self.tallies.is_empty and self._forwards > 0 and len(hooks.optimizers) == 1 and not hooks.exchange.has_ranks
        is_clean = is_clean and probed.probe is not None and not (writes.is_unclear or writes.is_doubtful)
        if not (self._rest.is_on and is_clean) or probed.unattached.passes:
            self._interval_ended(hooks, probed, has_stepped=True)
        self._most_forwards, self._forwards = max(self._most_forwards, self._forwards), 0
        if self._rest.step_ended(is_clean):
            hooks.restart(probed)
        # nor will a forward register them where the parts of the model are called alone
        no_forward = not self._most_forwards and probed.stepped_in == -1
        if not hooks.is_current and (probed.checks.writes.needs_values or no_forward):
            hooks.register(self._rest.is_on)

    def on_optimizer_overflowed(self, optimizer: Optimizer) -> None:
        if self._hooks is None:
            return
        self._hooks.clock += 1
        if (probed := self._hooks.optimizers.get(id(optimizer))) is not None:
            self._interval_ended(self._hooks, probed, has_stepped=False)
            self._most_forwards, self._forwards = max(self._most_forwards, self._forwards), 0

    def _interval_ended(self, hooks: ProbeHooks, probed: ProbedOptimizer, has_stepped: bool) -> None:
        for other in hooks.probed:
            if other is probed or other.shares_parameters(probed):
                other.unattached.step_ended()
                if not self.tallies.is_empty:
                    self.tallies.retract("unattached-optimizer", other.key)
        if not self._rest.is_on:
            probed.step_ended(has_stepped)

    # --- scaler ----------------------------------------------------------------------------------------------------------------

    def on_unscaling(self, optimizer: Optimizer) -> None:
        if self._hooks is not None and (probed := self._hooks.optimizers.get(id(optimizer))) is not None:
            probed.unscaling(optimizer)

    def on_unscaled(self, optimizer: Optimizer) -> None:
        if self._hooks is not None and (probed := self._hooks.optimizers.get(id(optimizer))) is not None:
            probed.scaler.unscaled()

    def on_loss_scaled(self) -> None:
        for probed in () if self._hooks is None else self._hooks.optimizers.values():
            probed.scaler.loss_scaled()

    def on_scaler_updated(self) -> None:
        for probed in () if self._hooks is None else self._hooks.optimizers.values():
            probed.scaler.end_attempt()
